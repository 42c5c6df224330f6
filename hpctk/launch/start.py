"""Start ranks: find out what is here, make the command line, become it.

`launch/mpirun` and `launch/horovodrun` are this.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctk.comm import environment
from hpctk.errors import SettingError
from hpctk.launch import horovod_setup, horovodrun, typed
from hpctk.launch.facts import Facts, job_environment
from hpctk.launch.kinds import KINDS, TAGGING_OPTIONS, arity, check_kind, kind_of
from hpctk.launch.mpirun import mpirun_line

#: Seconds for `mpirun --version`; it takes a tenth of one, except on a cold network file system.
VERSION_S = 30

NO_HOROVOD = "no Horovod here: ./launch/setup --with-horovod builds it, with g++, cmake and make"

USAGE = """\
usage: launch/{name} [--print] [--plain] [--mpi KIND] ARGUMENT OF {name} ... PROGRAM [ARGUMENT ...]

Run {name} with what the installed MPI needs, and with all arguments as they are. Python programs run
under `python -m mpi4py`, so that an exception on one rank ends the job.

  --print     show the command line, ready to be pasted, and run nothing
  --plain     leave Python programs as they are, without `-m mpi4py`
  --mpi KIND  {kinds}  [what `mpirun --version` says]
  --help      this; `{name} --help` is its own

  HPCTK_VENV  the virtual environment it all comes from  [the active one, or .venv in the project, or PATH]

docs/launch.md tells what is added for which MPI, and why.

examples:
{examples}"""

EXAMPLES = {
    "mpirun": """\
  ./launch/mpirun -n 4 python train.py --epochs 3
  ./launch/mpirun -n 4 hpctk train digits --method saef
  ./launch/mpirun --print -n 8 --hostfile hosts python train.py
  ./launch/mpirun --print --mpi openmpi4 -n 2 --bind-to core ./train.py
""",
    "horovodrun": """\
  ./launch/horovodrun -np 4 python train.py --epochs 3
  ./launch/horovodrun -np 8 -H node1:4,node2:4 python train.py
  ./launch/horovodrun --print --mpi openmpi5 -np 4 python train.py
  ./launch/horovodrun --check-build
""",
}


def main(name: str, project: str, words: Sequence[str]) -> int:
    """Become mpirun or horovodrun; return only to print, or with what was wrong."""
    try:
        own, rest = typed.take_own(words, KINDS, flag_too=name == "horovodrun")
        if own.help or not rest:
            text = USAGE.format(name=name, kinds=", ".join(KINDS), examples=EXAMPLES[name])
            print(text, end="", file=sys.stdout if own.help else sys.stderr)
            return 0 if own.help else 2
        added, line = prepare(name, project, own, rest, os.environ)
    except SettingError as error:
        print(f"launch/{name}: {error}", file=sys.stderr)
        return 2
    if own.show:
        print(shown(added, line, os.environ.get("PATH", "")))
        return 0
    try:
        os.execve(line[0], line, {**os.environ, **added})
    except OSError as error:
        print(f"launch/{name}: cannot run {line[0]}: {error.strerror}", file=sys.stderr)
        return 126


def prepare(
    name: str, project: str, own: typed.Own, words: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to set and the command line to run."""
    venv = find_venv(project, environ)
    path = without_folder(environ.get("PATH", ""), f"{project}/launch")
    search = f"{venv}/bin{os.pathsep}{path}" if venv else path
    mpirun, kind = find_mpi(search, own.mpi)
    if name == "mpirun":
        launcher = mpirun
        tagged = bool(typed.names(typed.read_sections(words, arity(kind))) & TAGGING_OPTIONS)
    else:
        if not own.mpi:
            horovodrun.check_mpi(kind, mpirun)
        if venv is not None and not own.show and shutil.which("horovodrun", path=search) is None:
            horovod_setup.build(project, Path(venv), environ)
        launcher = find(search, "horovodrun", NO_HOROVOD)
        tagged = True
    columns = shutil.get_terminal_size().columns if os.isatty(2) else None
    added = {} if path == environ.get("PATH", "") else {"PATH": path}
    added |= job_environment({**environ, **added}, venv, columns, tagged)
    facts = Facts(launcher, os.geteuid() == 0, cores(), {**environ, **added})
    if name == "mpirun":
        return added, mpirun_line(kind, words, facts, own.plain)
    added |= horovodrun.horovodrun_environment(kind, words, facts)
    return added, horovodrun.horovodrun_line(kind, words, facts, own.plain)


def find_mpi(path: str, kind: str | None) -> tuple[str, str]:
    """Return mpirun and which MPI it belongs to; where the kind is given, it need not be here."""
    if kind is not None:
        return shutil.which("mpirun", path=path) or "mpirun", check_kind(kind)
    mpirun = find(path, "mpirun", "no mpirun here: ./launch/setup makes an environment that has one")
    return mpirun, kind_of(version_of(mpirun))


def find_venv(project: str, environ: Mapping[str, str]) -> str | None:
    """Return the virtual environment to use: the one named, the active one, the project's, or none."""
    named: str | None = environment.read("HPCTK_VENV", environ)
    if named:
        if not os.path.isfile(f"{named}/bin/python"):
            raise SettingError(
                f"HPCTK_VENV={named!r}: no virtual environment there; ./launch/setup makes one"
            )
        return os.path.abspath(named)
    for folder in (environ.get("VIRTUAL_ENV"), f"{project}/.venv"):
        if folder and os.path.isfile(f"{folder}/bin/python"):
            return folder
    return None


def find(path: str, program: str, otherwise: str) -> str:
    """Return where a program is."""
    found = shutil.which(program, path=path)
    if found is None:
        raise SettingError(otherwise)
    return os.path.abspath(found)


def version_of(mpirun: str) -> str:
    """Return what `mpirun --version` prints, on either channel."""
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingError(f"{mpirun} --version: {error}; --mpi KIND does without it") from None
    return done.stdout + done.stderr


def cores() -> int:
    """Return the cores this process may use, without their second hardware threads."""
    seen = set()
    for cpu in os.sched_getaffinity(0):
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        seen.add(siblings)
    return len(seen)


def shown(added: Mapping[str, str], line: Sequence[str], path: str) -> str:
    """Return the command line as one line for a shell, with the variables it needs."""
    settings = []
    for name, value in added.items():
        if name == "PATH" and path and value.endswith(f":{path}"):
            settings.append(f'PATH={shlex.quote(value[: -len(path)])}"$PATH"')
        else:
            settings.append(f"{name}={shlex.quote(value)}")
    return " ".join([*(["env", *settings] if settings else []), shlex.join(line)])


def without_folder(path: str, folder: str) -> str:
    """Return PATH without a folder: were launch/ on it, the wrappers would find themselves."""
    unwanted = os.path.realpath(folder)
    kept = [each for each in path.split(os.pathsep) if os.path.realpath(each) != unwanted]
    return os.pathsep.join(kept)
