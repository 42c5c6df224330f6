"""Start MPI and torchrun jobs in subprocesses, as a user would from a clean shell, and never wait forever for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from hpctk.launch.mpirun import mpirun_job

ROOT = Path(__file__).parents[2]
#: For PYTHONPATH: lets jobs start sooner, see there.
QUICK_START = str(Path(__file__).parent / "quick_start")
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_", "MASTER_")


@dataclass(frozen=True)
class Ended:
    """A job that ended, or was ended."""

    code: int
    output: str
    seconds: float


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment without what an outer MPI job or Slurm left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    kept["OMP_NUM_THREADS"] = "1"
    paths = extra.get("PYTHONPATH", kept.get("PYTHONPATH"))
    # Empty where a test wants nothing of ours.
    if paths != "":
        extra["PYTHONPATH"] = os.pathsep.join([QUICK_START, *([paths] if paths else [])])
    return {**kept, **extra}


def mpirun(ranks: int, *command: str, tolerant: bool = False) -> list[str]:
    """Return the command line that starts `ranks` ranks here, whichever MPI this environment holds.

    `tolerant`: with fault tolerance, so that the job outlives a rank; Open MPI 5 has that.
    """
    typed = [*(["--with-ft"] if tolerant else []), "-n", str(ranks), *command]
    # A test says itself what its ranks run under: some are about plain `python`.
    added, words = mpirun_job(typed, {}, root=os.geteuid() == 0, cores=1, plain=True)
    settings = [f"{name}={value}" for name, value in added.items()]
    # An earlier one of the same process number that was killed has left a folder that keeps Open MPI 5 from starting.
    fresh = 'rm -rf "${TMPDIR:-/tmp}/ompi.$$"; exec env "$@"'
    return ["sh", "-c", fresh, "mpirun", *settings, str(Path(sys.executable).parent / "mpirun"), *words]


def run(command: list[str], timeout_s: float = 60, cwd: Path = ROOT, **environ: str) -> Ended:
    """Run a command in a process group of its own; a job over its time is killed and its code is None."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        stdin=subprocess.DEVNULL, env=clean_environment(**environ), cwd=cwd, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{' '.join(command)} did not end within {timeout_s} s:\n{output}") from None
    except KeyboardInterrupt:
        # The terminal's Ctrl-C does not reach a group of its own.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Ended(process.returncode, output, time.monotonic() - began)


def run_ranks(ranks: int, program: str, tmp_path: Path, *python: str, timeout_s: float = 60, **environ: str) -> Ended:
    """Run a Python program's text on `ranks` ranks; `python -m mpi4py` unless other words are given."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    words = python or ("-m", "mpi4py")
    return run(mpirun(ranks, sys.executable, *words, str(script)), timeout_s, **environ)


def torchrun(ranks: int, *command: str) -> list[str]:
    """Return the command line with which torchrun starts `ranks` processes here."""
    return [
        str(Path(sys.executable).parent / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", *command,
    ]  # fmt: skip


def run_without_launcher(
    ranks: int, program: str, tmp_path: Path, awaited: int, timeout_s: float = 60, **environ: str
) -> Ended:
    """Run a program's text as ranks of torch.distributed that nobody looks after; return how `awaited` ended.

    The others are ended then. The output is that of all.
    """
    script, log = tmp_path / "program.py", tmp_path / "output"
    script.write_text(textwrap.dedent(program))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began, processes = time.monotonic(), []
    with log.open("w") as output:
        for rank in range(ranks):
            places = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = clean_environment(**{name: str(value) for name, value in places.items()}, **environ)
            command = [sys.executable, "-u", str(script)]
            processes.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
            )
    try:
        code = processes[awaited].wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"rank {awaited} did not end within {timeout_s} s:\n{log.read_text()}") from None
    finally:
        seconds = time.monotonic() - began
        for process in processes:
            process.kill()
            process.wait()
    return Ended(code, log.read_text(errors="replace"), seconds)
