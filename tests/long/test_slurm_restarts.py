"""Every method through a signal, a checkpoint and a requeue on a real Slurm; and through a real time limit."""

import importlib.util
import re
import shutil
import sys
import time

import pytest
from jobs import ROOT, mpirun, run, torchrun

sys.path.insert(0, str(ROOT / "tests" / "slurm"))
from slurm_jobs import SIZE, straight
from test_time_limit import check, requeued

METHODS = [
    "mean", "mean:topk:0.05", "mean:powersgd:2", "adacons", "sasg", "saef", "mgrawa", "lgrawa", "celgc", "localsgd",
    "easgd", "lsgd",
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_requeued_bit_for_bit(slurm, tmp_path, method):
    check(requeued(slurm, tmp_path, method, method), straight(tmp_path, method))


def test_by_mpirun(slurm, tmp_path):
    check(requeued(slurm, tmp_path, "saef", "saef", "mpirun"), straight(tmp_path))


def test_the_time_limit_itself(slurm, tmp_path):
    # Slurm looks at time limits once a minute or so: of two minutes, the warning takes one.
    words = ("hpctk", "train", "digits", "--epochs", "3000", "--checkpoint-steps", "100")
    size = ("--nodes", "2", "--ntasks-per-node", "1")
    job = slurm.submit(
        tmp_path, "mpi", "limit", *size, "--time", "2", "--warning-s", "60", "--max-restarts", "1", "--", *words
    )
    assert job.ended(600) == "FAILED", job.log()
    assert job.facts()["ExitCode"] == "85:0"
    assert job.facts()["Restarts"] == "1"
    assert job.log().count("USR1: the ranks are asked to save") == 2
    assert job.log().count("stopped by SIGUSR2 and saved in") == 2


def accuracy(output):
    return re.search(r"accuracy ([0-9.]+)", output)[1]


@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_other_ways_in(slurm, tmp_path, kind):
    if kind == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("not installed: Horovod (./launch/setup --with-horovod)")
    script = f"train_{kind}.py"
    shutil.copy(ROOT / "examples" / script, tmp_path)
    words = [script, "--epochs", "40"]
    job = slurm.submit(tmp_path, kind, kind, *SIZE, "--", "python", *words, "--folder", "{run}")
    # Listening: the folder is there before the first step, a moment before the handlers are.
    job.wait_for(lambda: (job.run / "checkpoints").exists())
    time.sleep(3)
    job.ask_to_save()
    assert job.ended(300) == "COMPLETED", job.log()
    python = (sys.executable, "-m", "mpi4py")
    straight = torchrun(2, *words) if kind == "ddp" else mpirun(2, *python, *words)
    ended = run(straight, timeout_s=300, cwd=tmp_path, HOROVOD_CYCLE_TIME="5")
    assert ended.code == 0, ended.output
    assert "status 85: back into the queue" in job.log()
    assert accuracy(job.log()) == accuracy(ended.output)
