"""The examples for Horovod as their users start them, and Horovod started before anything of hpctk."""

import re
import sys

import pytest
from jobs import ROOT, mpirun, run, run_ranks


def accuracy(output):
    return float(re.search(r"accuracy ([0-9.]+)%", output)[1])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train_horovod.py", ["--epochs", "4"]),
        ("train_horovod.py", ["--epochs", "4", "--method", "saef"]),
        ("train_horovod_own.py", ["--epochs", "4"]),
    ],
    ids=["stock", "stock, attached", "own"],
)
def test_the_example_learns(script, words):
    command = [sys.executable, "-m", "mpi4py", str(ROOT / "examples" / script), *words]
    # Where cores are few, Horovod's thread takes the time of everybody; docs/horovod.md.
    ended = run(mpirun(2, *command), timeout_s=120, HOROVOD_CYCLE_TIME="5")
    assert ended.code == 0, ended.output
    assert "Warning" not in ended.output
    # Guessing gets one in ten right.
    assert accuracy(ended.output) > 75, ended.output


STEP = """
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    print(f"rank {hvd.rank()} of {hvd.size()} has stepped", flush=True)
"""

HOROVOD_FIRST = f"""
    import horovod.torch as hvd
    hvd.init()
    import torch, hpctk
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hpctk.horovod.DistributedOptimizer(opt, hpctk.Mean(), model=model)
    {STEP}
    hvd.barrier()
    hvd.shutdown()
"""

HOROVOD_LAST = f"""
    import torch, hpctk
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hpctk.horovod.DistributedOptimizer(opt, hpctk.Mean(), model=model)
    import horovod.torch as hvd
    hvd.init()
    {STEP}
"""


@pytest.mark.parametrize(
    ("program", "python", "warns"),
    [(HOROVOD_FIRST, "-u", True), (HOROVOD_LAST, "-mmpi4py", False)],
    ids=["Horovod first, and it starts MPI", "Horovod last"],
)
def test_horovod_may_start_before_or_after(tmp_path, program, python, warns):
    ended = run_ranks(2, program, tmp_path, python)
    assert ended.code == 0, ended.output
    assert all(f"rank {rank} of 2 has stepped" in ended.output for rank in range(2)), ended.output
    assert ("Horovod has started MPI and will end it" in ended.output) == warns, ended.output
