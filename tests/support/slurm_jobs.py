"""Jobs on a Slurm of this machine (launch/slurm-local), submitted and watched as a user would."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from jobs import ROOT, clean_environment, mpirun, run

LOCAL = ROOT / "launch" / "slurm-local"
#: Seconds until something that must happen has happened, on a busy machine.
PATIENCE_S = 150
#: Of a job: two nodes with a rank each.
SIZE = ("--nodes", "2", "--ntasks-per-node", "1", "--time", "20")


def missing() -> str:
    """Return why there can be no Slurm here, an empty text where there can."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    tools = [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(tool, path=path)]
    return f"not installed: {', '.join(tools)} (launch/test does it where it may: root, apt-get)" if tools else ""


def slurm_local(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess:
    """Run launch/slurm-local."""
    return subprocess.run(
        [LOCAL, *words], env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=timeout_s,
    )  # fmt: skip


class Slurm:
    """One that is up."""

    def __init__(self, conf: str) -> None:
        self.conf = conf
        self.environ = clean_environment(
            SLURM_CONF=conf, PYTHONPATH=str(ROOT), HPCTK_SLURM_SITE="/dev/null", HPCTK_TIMEOUT_S="60",
            # For mpirun, where the tests run as root.
            OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            # A waiting rank polls, and every node counts all cores of this machine as its own.
            OMPI_MCA_mpi_yield_when_idle="1",
        )  # fmt: skip

    def run(self, *words: str, cwd: Path = ROOT, **environ: str) -> str:
        """Run a command that talks to this Slurm; return what it prints."""
        done = subprocess.run(
            words, env={**self.environ, **environ}, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def submit(self, folder: Path, kind: str, name: str, *words: str, **environ: str) -> Job:
        """Submit a job by `hpctk slurm submit`, from a folder; `words` are its options, and the command behind --."""
        said = self.run(
            sys.executable, "-m", "hpctk", "slurm", "submit", kind, "--job-name", name, *words, cwd=folder, **environ
        )  # fmt: skip
        return Job(self, re.search(r"^job +(\d+)", said)[1], folder, name, said)


class Job:
    """One that was submitted."""

    def __init__(self, slurm: Slurm, number: str, folder: Path, name: str, said: str = "") -> None:
        self.slurm, self.number, self.name, self.said = slurm, number, name, said
        self.folder, self.run = folder, folder / "runs" / name

    def facts(self) -> dict[str, str]:
        """Return what Slurm knows of it."""
        text = self.slurm.run("scontrol", "show", "job", "-o", self.number)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def state(self) -> str:
        return self.facts()["JobState"]

    def log(self) -> str:
        """Return what it has printed so far."""
        file = self.folder / f"{self.name}-{self.number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, what, patience_s: float = PATIENCE_S) -> None:
        """Return once `what()` is true; AssertionError where that never comes, or the job is over before."""
        deadline = time.monotonic() + patience_s
        while not what():
            assert time.monotonic() < deadline, f"it never came; {self.state()}:\n{self.log()}"
            if self.state() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
                assert what(), f"{self.state()} before that:\n{self.log()}"
                return
            time.sleep(0.05)

    def ended(self, patience_s: float = PATIENCE_S) -> str:
        """Return its last state, once no process of it is left."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        deadline = time.monotonic() + patience_s
        while (state := self.state()) not in over:
            assert time.monotonic() < deadline, f"still {state}:\n{self.log()}"
            time.sleep(0.1)
        return state

    def all_ended(self) -> None:
        """Return once no job of an array waits or runs."""
        deadline = time.monotonic() + PATIENCE_S
        while self.slurm.run("squeue", "-h", "--job", self.number, "--state", "PD,R,CG,CF,S"):
            assert time.monotonic() < deadline, f"{self.name} does not end"
            time.sleep(0.1)

    def saves(self) -> None:
        """Return once it has a whole checkpoint, and still trains."""
        self.wait_for(lambda: any(self.run.glob("checkpoints/*/index.json")))

    def ask_to_save(self) -> None:
        """Do what Slurm does near the time limit."""
        self.slurm.run("scancel", "--batch", "--signal=USR1", self.number)

    def kill_rank(self, rank: int) -> None:
        """End the Python of a rank with SIGKILL."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = set((process / "environ").read_text(errors="replace").split("\0"))
                line = (process / "cmdline").read_text(errors="replace")
            except OSError:  # it has just ended
                continue
            # Another Slurm on this machine has a job of this number, too.
            mine = {f"SLURM_CONF={self.slurm.conf}", f"SLURM_JOB_ID={self.number}", f"SLURM_PROCID={rank}"}
            if mine <= variables and "mpi4py" in line:
                os.kill(int(process.name), signal.SIGKILL)
                return
        raise AssertionError(f"no process of rank {rank}:\n{self.log()}")

    def result(self) -> dict:
        """Return what the run of `hpctk train` came to."""
        return json.loads((self.run / "result.json").read_text())


def digest(result: dict) -> str:
    """Return the digest of the parameters of a run by one method."""
    (method,) = result["methods"].values()
    return method["parameters_sha256"]


def training(method: str = "saef", epochs: int = 12) -> tuple[str, ...]:
    """Return a command that trains for some seconds after its first checkpoint, long enough to disturb it."""
    words = ("hpctk", "train", "digits", "--epochs", str(epochs), "--method", method)
    return (*words, "--checkpoint-steps", "40")


def straight(folder: Path, method: str = "saef") -> str:
    """Return the digest that the training comes to on two ranks under mpirun, undisturbed and without checkpoints."""
    file = folder / "straight.json"
    words = (*training(method)[:-2], "--json", str(file))
    ended = run(
        mpirun(2, sys.executable, "-m", "mpi4py", "-m", *words), timeout_s=PATIENCE_S, OMPI_MCA_mpi_yield_when_idle="1"
    )  # fmt: skip
    assert ended.code == 0, ended.output
    return digest(json.loads(file.read_text()))


def bring_up(nodes: int = 4) -> tuple[str, Slurm]:
    """Start a Slurm; return its name, to take it down by, and the Slurm."""
    name = "t" + uuid.uuid4().hex[:12]
    done = slurm_local("up", "--nodes", str(nodes), "--name", name)
    assert done.returncode == 0, done.stderr
    return name, Slurm(re.search(r"export SLURM_CONF=(\S+)", done.stdout)[1])
