"""hpctk.horovod says what it needs where that is missing; everything else works without. No Horovod needed here."""

import re
import sys

import pytest
from jobs import run

#: What each way in says; `use` is called once for everything that may be missing.
USE = """
import sys
import torch
import hpctk
model = torch.nn.Linear(2, 2)
base = torch.optim.SGD(model.parameters(), lr=0.1)

def use(name):
    for make in (
        lambda: hpctk.horovod.Compression(hpctk.Mean(), model),
        lambda: hpctk.horovod.Compression.topk(0.1, model),
        lambda: hpctk.horovod.DistributedOptimizer(base, hpctk.Mean(), model=model),
    ):
        try:
            make()
        except hpctk.HpctkError as error:
            print(f"{name}:", error)
"""

#: None at all, and then one that only tells how it was built and runs.
BROKEN = """
import types
sys.modules["horovod"] = None
use("absent")
opt = hpctk.DistributedOptimizer(base, hpctk.Mean(hpctk.TopK(0.5)), model=model)
model(torch.ones(1, 2)).sum().backward()
opt.step()
print("stepped", opt.stats.steps)
hvd = types.ModuleType("horovod.torch")
hvd.mpi_built = lambda: False
hvd.is_initialized = lambda: True
hvd.mpi_enabled = lambda: False
sys.modules["horovod"], sys.modules["horovod.torch"] = types.ModuleType("horovod"), hvd
use("without MPI")
hvd.mpi_built = lambda: True
use("over Gloo")
"""

FUNNELED = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
"""


@pytest.fixture(scope="module")
def said():
    """Return what two programs have said."""
    programs = (USE + BROKEN, FUNNELED + USE + "use('without threads')\n")
    ended = [run([sys.executable, "-c", program]) for program in programs]
    assert [one.code for one in ended] == [0, 0], ended
    return "".join(one.output for one in ended)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("absent", "needs Horovod, which cannot be imported"),
        ("without MPI", "rebuild it with HOROVOD_WITH_MPI=1"),
        ("over Gloo", "Horovod runs over Gloo here"),
        ("without threads", "MPI was started with THREAD_FUNNELED.*need THREAD_MULTIPLE"),
    ],
)
def test_the_error_says_what_is_needed(said, name, wanted):
    refusals = [line for line in said.splitlines() if line.startswith(f"{name}:")]
    assert len(refusals) == 3, said
    assert all(re.search(wanted, line) for line in refusals), said


def test_the_rest_works_without_horovod(said):
    assert "stepped 1" in said
