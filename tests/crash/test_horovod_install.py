"""hpctk.horovod says what it needs where that is missing; everything else works without. No Horovod needed here."""

import re
import sys

import pytest
from jobs import run

USE = """
import torch
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for make in (
    lambda: hpctk.horovod.Compression(hpctk.Mean(), model),
    lambda: hpctk.horovod.Compression.topk(0.1, model),
    lambda: hpctk.horovod.DistributedOptimizer(opt, hpctk.Mean(), model=model),
):
    try:
        make()
    except hpctk.HpctkError as error:
        print("refused:", error)
"""

ABSENT = """
import sys
sys.modules["horovod"] = None
import hpctk
"""

#: A Horovod that only tells how it was built and runs.
FAKE = """
import sys, types
import hpctk
hvd = types.ModuleType("horovod.torch")
hvd.mpi_built = lambda: {built}
hvd.is_initialized = lambda: True
hvd.mpi_enabled = lambda: False
sys.modules["horovod"], sys.modules["horovod.torch"] = types.ModuleType("horovod"), hvd
"""

FUNNELED = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
import hpctk
"""


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        (ABSENT, "needs Horovod, which cannot be imported"),
        (FAKE.format(built=False), "rebuild it with HOROVOD_WITH_MPI=1"),
        (FAKE.format(built=True), "Horovod runs over Gloo here"),
        (FUNNELED, "MPI was started with THREAD_FUNNELED.*need THREAD_MULTIPLE"),
    ],
    ids=["absent", "without MPI", "over Gloo", "without threads"],
)
def test_the_error_says_what_is_needed(before, wanted):
    ended = run([sys.executable, "-c", before + USE])
    assert ended.code == 0, ended.output
    refusals = [line for line in ended.output.splitlines() if line.startswith("refused:")]
    assert len(refusals) == 3, ended.output
    assert all(re.search(wanted, line) for line in refusals), ended.output


def test_the_rest_works_without_horovod():
    ended = run(
        [
            sys.executable,
            "-c",
            ABSENT
            + "import torch\n"
            + "model = torch.nn.Linear(2, 2)\n"
            + "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            + "opt = hpctk.DistributedOptimizer(opt, hpctk.Mean(hpctk.TopK(0.5)), model=model)\n"
            + "model(torch.ones(1, 2)).sum().backward(); opt.step(); print('stepped', opt.stats.steps)\n",
        ]
    )
    assert ended.code == 0, ended.output
    assert "stepped 1" in ended.output
