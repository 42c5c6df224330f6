"""What a job of horovodrun needs: it writes a line for mpirun itself, with flags of Open MPI 4."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctk.errors import SettingError
from hpctk.launch.command_line import HOROVODRUN, CommandLine, options
from hpctk.launch.mpirun import ALLOCATIONS, intel_variables
from hpctk.log import log

KINDS = ("openmpi5", "openmpi4", "mpich", "intel")
#: Options that make horovodrun start gloo, whatever it was built with.
GLOO_OPTIONS = options("gloo host-discovery-script min-np min-num-proc")
#: Seconds for `mpirun --version`; it takes a tenth of one, except on a cold network file system.
VERSION_S = 30
#: Files that launch/setup leaves in an environment: what it was made from and for which MPI, and what about Horovod.
STAMP, STATE = "hpctk-setup", "hpctk-horovod"
LEFT_OUT = "left out"


def horovodrun_job(
    kind: str, typed: Sequence[str], environ: Mapping[str, str], *, cores: int, plain: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a job needs, and the words after horovodrun; without a program nothing is added.

    horovodrun itself allows root, forwards the environment and gives this machine as many slots as there
    are ranks. What it says about binding is what Open MPI 5 does not understand: `-bind-to none` is an
    option with one dash, and `none` passes for the program.
    """
    line = CommandLine(typed, HOROVODRUN, colons=False)
    if line.names & GLOO_OPTIONS:
        raise SettingError(
            f"--{min(line.names & GLOO_OPTIONS)}: that is gloo, and hpctk's collectives run over MPI "
            "(hpctk setup horovod builds it without gloo): leave it out"
        )
    if not line.starts_program:
        return {}, list(typed)
    away = line.names & {"H", "hosts", "hostfile"} or any(name in environ for name in ALLOCATIONS)
    added = intel_variables(line.ranks(), cores, list(environ)) if kind == "intel" and not away else {}
    # First, so that a --config-file still decides.
    binding = ["--binding-args=--bind-to none --map-by slot"]
    needed = kind == "openmpi5" and "binding-args" not in line.names
    return added, (binding if needed else []) + line.words(plain)


def mpi_kind(mpirun: str) -> str:
    """Return which MPI an mpirun belongs to: one of KINDS. Raise SettingError if that cannot be told."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, timeout=VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingError(f"{mpirun} --version: {error}; --mpi KIND does without it") from None
    return kind_of((done.stdout + done.stderr).decode(errors="replace"))


def kind_of(version: str) -> str:
    """Return the kind of the MPI whose `mpirun --version` printed this."""
    found = re.search(r"\(Open ?MPI\)\s+v?(\d+)", version)
    if found:
        # Before 5.0 mpirun was Open MPI's own; since then it is PRRTE's, which reads options differently.
        return "openmpi5" if int(found[1]) >= 5 else "openmpi4"
    for words, kind in (("PRRTE", "openmpi5"), ("Intel(R) MPI Library", "intel"), ("HYDRA", "mpich")):
        if words in version:
            return kind
    first = (version.strip().splitlines() or ["nothing"])[0]
    raise SettingError(
        f"no MPI that is known here: `mpirun --version` says '{first}'. Say which one it is like: "
        f"--mpi {', '.join(KINDS)}"
    )


def build_horovod(venv: Path) -> None:
    """Build Horovod if launch/setup made this environment and was not told to do without. What it says is on stderr."""
    made_for = _lines(venv / STAMP)[1:2]
    if made_for not in (["openmpi"], ["openmpi4"]) or _lines(venv / STATE) == [LEFT_OUT]:
        return
    log.warning("no Horovod here yet")
    command = [str(venv / "bin" / "python"), "-m", "hpctk", "setup", "horovod"]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []
