"""Every template that needs no GPU, submitted on two nodes: it trains to what mpirun or torchrun come to.

`mpi` is in test_time_limit.py, where it comes to the same although it is requeued.
"""

import importlib.util
import json
import re
import shutil
import sys

import pytest
from jobs import ROOT, mpirun, run, torchrun
from slurm_jobs import SIZE, digest, training

needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="not installed: Horovod (./launch/setup --with-horovod)"
)


def test_training_by_mpirun(slurm, tmp_path, trained):
    # A name that the shell, sbatch and the file system must all take for a name.
    job = slurm.submit(tmp_path, "mpirun", "x; rm -rf ~", *SIZE, "--", *training())
    assert f"log         x; rm -rf ~-{job.number}.out\n" in job.said
    assert "statistics  runs/x; rm -rf ~/stats; shown by: hpctk report 'runs/x; rm -rf ~'" in job.said
    assert job.ended() == "COMPLETED", job.log()
    assert digest(job.result()) == trained()
    assert job.result()["ranks"] == 2
    assert "restart 0 of at most 20" in job.log()
    assert job.facts()["NodeList"].startswith("n[")


#: Trains by four steps, of which the last two are done by one rank alone.
LOSES_A_RANK = """
import os, signal
import torch, hpctk
model = torch.nn.Linear(2, 2)
opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model)
for t in range(4):
    if t == 2 and opt.world.size == 2 and opt.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    opt.zero_grad()
    model(torch.ones(2)).sum().backward()
    opt.step()
print("ranks at the end:", opt.world.size, "steps:", opt.stats.steps)
"""


def test_going_on_without_a_rank(slurm, tmp_path):
    (tmp_path / "loses.py").write_text(LOSES_A_RANK)
    job = slurm.submit(tmp_path, "mpirun", "loses", *SIZE, "--on-lost-rank", "shrink", "--", "python", "loses.py")
    assert job.ended() == "COMPLETED", job.log()
    assert "ranks at the end: 1 steps: 4" in job.log()


def example(name, tmp_path):
    shutil.copy(ROOT / "examples" / name, tmp_path)
    return ["python", name, "--epochs", "2", "--folder", "{run}"]


def summary(output):
    """Return what an example says at its end."""
    return re.search(r"^\w+(?: on \d+ processes)?: accuracy .*$", output, re.M)[0]


@needs_horovod
def test_horovod_by_srun_and_by_mpirun(slurm, tmp_path):
    words = example("train_horovod.py", tmp_path)
    ended = run(
        mpirun(2, sys.executable, "-m", "mpi4py", *words[1:4]), timeout_s=150, cwd=tmp_path, HOROVOD_CYCLE_TIME="5"
    )
    assert ended.code == 0, ended.output
    # One after the other: Horovod's threads leave little to each other on few cores.
    for kind in ("horovod", "mpirun"):
        job = slurm.submit(tmp_path, kind, kind, *SIZE, "--", *words, HOROVOD_CYCLE_TIME="5")
        assert job.ended() == "COMPLETED", job.log()
        assert summary(job.log()) == summary(ended.output)


def test_torchrun(slurm, tmp_path):
    words = example("train_ddp.py", tmp_path)
    job = slurm.submit(tmp_path, "ddp", "ddp", *SIZE, "--", *words)
    ended = run(torchrun(2, *words[1:4]), timeout_s=150, cwd=tmp_path)
    assert ended.code == 0, ended.output
    assert job.ended() == "COMPLETED", job.log()
    assert summary(job.log()) == summary(ended.output)


def test_a_sweep_of_four(slurm, tmp_path):
    one_rank = ("--nodes", "1", "--ntasks-per-node", "1", "--time", "20")
    job = slurm.submit(
        tmp_path, "array", "sweep", *one_rank, "--methods", "mean,celgc", "--seeds", "1,2", "--",
        "hpctk", "train", "digits", "--epochs", "2",
    )  # fmt: skip
    assert "4 lines" in job.said
    folders = {f"method-{method}-seed-{seed}": (method, seed) for method in ("mean", "celgc") for seed in (1, 2)}
    job.all_ended()
    digests = set()
    for name, (method, seed) in folders.items():
        result = json.loads((job.run / name / "result.json").read_text())
        assert (list(result["methods"]), result["settings"]["seed"]) == ([method], seed)
        digests.add(digest(result))
    assert len(digests) == 4
    report = slurm.run(
        sys.executable, "-m", "hpctk", "report", "--compare", *(f"runs/sweep/{name}" for name in folders), cwd=tmp_path
    )
    assert all(method in report for method in ("mean", "celgc")), report
    logs = sorted(path.name for path in tmp_path.glob("*.out"))
    assert logs == [f"sweep-{job.number}_{line}.out" for line in range(4)]
