"""`hpctk mpirun` and `hpctk horovodrun`: start ranks with what the installed MPI needs.

All words but the first few are another program's, so argparse does not see them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctk.errors import SettingError
from hpctk.launch import horovodrun, mpirun, respawn
from hpctk.launch.command_line import HOROVODRUN, MPIRUN, CommandLine
from hpctk.launch.horovodrun import KINDS
from hpctk.launch.python_program import RUNNER, TOLERANT, is_interpreter

NO_MPI = 'no mpirun here: pip install "hpctk[mpi]" brings one; on a cluster load its MPI module'
NO_MPI4PY = (
    'no mpi4py here, under which Python programs run: pip install "hpctk[mpi]" (on a cluster: load its module of MPI, '
    "then pip install mpi4py); --plain does without"
)
NO_HOROVOD = "no Horovod here: hpctk setup horovod builds it, with g++, cmake and make"

#: Options of jobs whose ranks all run here, in this folder.
HERE = frozenset({"n", "np", "num-proc", "c", "bind-to", "map-by", "oversubscribe", "with-ft", "x"})
#: The option that says how many ranks there are.
RANKS = {"mpirun": "n", "horovodrun": "np"}

USAGE = """\
usage: hpctk {name} [--print] [--plain] [--mpi KIND] {usage}ARGUMENT OF {name} ... PROGRAM [ARGUMENT ...]

Run {name} with what the installed MPI needs, and with all arguments as they are. Python programs run
under `python -m mpi4py`, so that an exception on one rank ends the job.

  --print     show the command line, ready to be pasted, and run nothing
  --plain     leave Python programs as they are, without `-m mpi4py`
  --mpi KIND  {mpi}
{more}  --help      this; `{name} --help` is its own

Programs come from the environment of this hpctk, then from PATH. The page "Setting up, and starting ranks" of the
documentation tells what is added, and why.

examples:
{examples}"""

MPI_HELP = {
    "mpirun": f"{', '.join(KINDS)}: for a line that is to run elsewhere; it is the same for all",
    "horovodrun": f"{', '.join(KINDS)}  [what `mpirun --version` says]",
}
#: What only one of the two has.
USAGE_MORE = {"mpirun": "[--respawn K] ", "horovodrun": ""}
MORE = {
    "mpirun": """\
  --respawn K go on without ranks that are lost (--with-ft, HPCTK_ON_LOST_RANK=shrink), save the next checkpoint,
              and begin anew from there with all ranks; at most K times
""",
    "horovodrun": "",
}
EXAMPLES = {
    "mpirun": """\
  hpctk mpirun -n 4 python train.py --epochs 3
  hpctk mpirun -n 4 hpctk train digits --method saef
  hpctk mpirun -n 2 --bind-to core ./train.py
  hpctk mpirun --respawn 3 -n 4 hpctk train digits --run runs/a --resume
  hpctk mpirun --print -n 8 --hostfile hosts python train.py
""",
    "horovodrun": """\
  hpctk horovodrun -np 4 python train.py --epochs 3
  hpctk horovodrun -np 8 -H node1:4,node2:4 python train.py
  hpctk horovodrun --print --mpi openmpi5 -np 4 python train.py
  hpctk horovodrun --check-build
""",
}


@dataclass
class Own:
    """The options of these commands themselves."""

    show: bool = False
    plain: bool = False
    help: bool = False
    mpi: str | None = None
    respawn: str | None = None


def main(name: str, words: Sequence[str]) -> int:
    """Become mpirun or horovodrun; return only if nothing is to be run. Raise SettingError if that is impossible."""
    own, rest = take_own(name, words)
    if own.help or not rest:
        text = USAGE.format(
            name=name, mpi=MPI_HELP[name], examples=EXAMPLES[name], usage=USAGE_MORE[name], more=MORE[name]
        )
        print(text, end="", file=sys.stdout if own.help else sys.stderr)
        return 0 if own.help else 2
    if own.respawn is not None:
        return run_and_respawn(name, own, own.respawn, rest)
    if not own.show:
        refuse_missing(name, rest, os.path.dirname(sys.executable))
    added, line = prepare(name, own, rest, os.environ, own_venv())
    if own.show:
        print(shown(added, line, os.environ.get("PATH", "")))
        return 0
    try:
        forget_namesake()
        os.execve(line[0], line, {**os.environ, **added})
    except OSError as error:
        print(f"hpctk {name}: cannot run {line[0]}: {error.strerror}", file=sys.stderr)
        return 126


def run_and_respawn(name: str, own: Own, typed: str, words: Sequence[str]) -> int:
    """Run mpirun, and anew with all ranks where it says so, `typed` times at most; return its exit status."""
    if own.show:
        raise SettingError("--print shows one line of mpirun's, and --respawn runs several: leave out one of them")
    times, rest = respawn.times(typed), respawn.tolerant(words, os.environ)
    # What is wrong is said once, and before the first of them.
    refuse_missing(name, rest, os.path.dirname(sys.executable))
    _, line = prepare(name, own, rest, os.environ, own_venv())
    if horovodrun.mpi_kind(line[0]) != "openmpi5":
        raise SettingError(f"--respawn needs Open MPI 5, on which a job outlives a rank; {line[0]} is another MPI")
    # This command once more, without --respawn: it becomes mpirun.
    before = [*(["--plain"] if own.plain else []), *(["--mpi", own.mpi] if own.mpi else [])]
    return respawn.run([sys.executable, "-m", "hpctk", name, *before, *rest], os.environ, times)


def forget_namesake() -> None:
    """Remove what an mpirun that was killed has left in the folder that this process is going to use.

    Open MPI 5 names that after the process, and ends with "The PMIx server's listener thread failed to start" where
    an earlier one of the same number was killed.
    """
    shutil.rmtree(os.path.join(tempfile.gettempdir(), f"ompi.{os.getpid()}"), ignore_errors=True)


def read(name: str, words: Sequence[str]) -> CommandLine:
    """Return what was typed after mpirun or horovodrun."""
    if name == "mpirun":
        return CommandLine(mpirun.with_fault_tolerance(words), MPIRUN)
    return CommandLine(words, HOROVODRUN, colons=False)


def refuse_missing(name: str, words: Sequence[str], folder: str) -> None:
    """Raise SettingError for a program, or a script of Python, that is not there: mpirun's own answers are pages long.

    `folder` is where programs are looked for, besides PATH. Nothing is said of jobs that may run elsewhere.
    """
    line = read(name, words)
    if not line.names <= HERE:
        return
    if not line.starts_program and line.names:
        raise SettingError(f"which program? Such as: hpctk {name} -{RANKS[name]} 4 python train.py")
    for section in line.sections:
        program, *arguments = section.program or ["true"]
        interpreted = is_interpreter(program)
        if interpreted and arguments[:1] in ([], ["-"]):
            raise SettingError(
                f"{program}: which script? Open MPI never tells ranks that standard input has ended. "
                f"Such as: hpctk {name} -{RANKS[name]} 4 python train.py"
            )
        script = arguments[0] if interpreted else program
        if program == "hpctk" and arguments[:1] == ["run"] and len(arguments) > 1:
            script = arguments[1]
        if script.endswith(".py") and not os.path.exists(script):
            raise SettingError(f"{script}: no such file in {os.getcwd()}")
        search = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
        if not program.endswith(".py") and shutil.which(program, path=search) is None:
            raise SettingError(
                f"{program}: no such program; a script runs by: hpctk {name} -{RANKS[name]} 4 python SCRIPT"
            )


def own_venv() -> str | None:
    """Return the virtual environment that this Python runs in, None where it is in none."""
    return os.path.abspath(sys.prefix) if sys.prefix != sys.base_prefix else None


def take_own(name: str, words: Sequence[str]) -> tuple[Own, list[str]]:
    """Return the command's own options, which come first, and all other words."""
    own, rest = Own(), list(words)
    while rest:
        if rest[0] == "--print":
            own.show = True
        elif rest[0] == "--plain":
            own.plain = True
        elif rest[0] in ("-h", "--help"):
            own.help = True
        elif name == "mpirun" and rest[0].partition("=")[0] == "--respawn":
            _, equals, value = rest[0].partition("=")
            own.respawn = value if equals else rest.pop(1) if len(rest) > 1 else ""
        elif rest[0].startswith("--mpi="):
            own.mpi = rest[0].removeprefix("--mpi=")
        # horovodrun has a --mpi of its own, without a value.
        elif rest[0] == "--mpi" and (name == "mpirun" or (len(rest) > 1 and rest[1] in KINDS)):
            if len(rest) < 2:
                raise SettingError(f"--mpi needs a kind: {', '.join(KINDS)}")
            own.mpi = rest.pop(1)
        else:
            break
        rest.pop(0)
    if own.mpi is not None and own.mpi not in KINDS:
        raise SettingError(f"--mpi '{own.mpi}': known are {', '.join(KINDS)}")
    return own, rest


def prepare(
    name: str, own: Own, words: Sequence[str], environ: Mapping[str, str], venv: str | None
) -> tuple[dict[str, str], list[str]]:
    """Return the variables to set and the command line to run."""
    named = environ.get("HPCTK_VENV")
    if named and not os.path.isfile(f"{named}/bin/python"):
        raise SettingError(f"HPCTK_VENV={named!r}: no virtual environment there: unset it, or name one")
    path = without_wrappers(environ.get("PATH", ""))
    search = f"{venv}/bin{os.pathsep}{path}" if venv else path
    tagged = name == "horovodrun" or mpirun.is_tagged(words)
    columns = shutil.get_terminal_size().columns if os.isatty(2) else None
    added = {} if path == environ.get("PATH", "") else {"PATH": path}
    added |= mpirun.job_environment({**environ, **added}, venv, columns, tagged)
    surroundings, cores = {**environ, **added}, len(os.sched_getaffinity(0))
    for value in read(name, words).first_values("n", "np", "num-proc"):
        # Their own answers are a page long; to 0 mpirun says nothing at all.
        if not value.isdecimal() or int(value) == 0:
            raise SettingError(f"-{RANKS[name]} {value}: need a number of ranks, such as -{RANKS[name]} 4")
    if name == "mpirun":
        program = "mpirun" if own.show and own.mpi else find(search, "mpirun", NO_MPI)
        variables, line = mpirun.mpirun_job(words, surroundings, root=os.geteuid() == 0, cores=cores, plain=own.plain)
        if {RUNNER, TOLERANT} & set(line) and not own.show and importlib.util.find_spec("mpi4py") is None:
            raise SettingError(NO_MPI4PY)
    else:
        kind = own.mpi or horovod_mpi(search)
        if venv is not None and not own.show and shutil.which("horovodrun", path=search) is None:
            horovodrun.build_horovod(Path(venv))
        program = find(search, "horovodrun", NO_HOROVOD)
        variables, line = horovodrun.horovodrun_job(kind, words, surroundings, cores=cores, plain=own.plain)
    return {**added, **variables}, [program, *line]


def horovod_mpi(path: str) -> str:
    """Return which MPI is on `path`. Raise SettingError if Horovod as it is built here cannot run on it."""
    program = find(path, "mpirun", NO_MPI)
    kind = horovodrun.mpi_kind(program)
    if kind == "mpich":
        raise SettingError(
            f"{program} is MPICH, and hpctk setup horovod builds it for Open MPI. Put Open MPI's mpirun first "
            "in PATH, or say --mpi mpich if your Horovod was built with MPICH"
        )
    return kind


def find(path: str, program: str, otherwise: str) -> str:
    """Return where a program is. Raise SettingError that says `otherwise` if it is nowhere."""
    found = shutil.which(program, path=path)
    if found is None:
        raise SettingError(otherwise)
    return os.path.abspath(found)


def without_wrappers(path: str) -> str:
    """Return PATH without launch/ of a checkout, whose mpirun is this command once more."""
    kept = [folder for folder in path.split(os.pathsep) if not os.path.isfile(f"{folder}/quickstart")]
    return os.pathsep.join(kept)


def shown(added: Mapping[str, str], line: Sequence[str], path: str) -> str:
    """Return the command line as one line for a shell, with the variables it needs."""
    settings = []
    for name, value in added.items():
        if name == "PATH" and path and value.endswith(f":{path}"):
            settings.append(f'PATH={shlex.quote(value[: -len(path)])}"$PATH"')
        else:
            settings.append(f"{name}={shlex.quote(value)}")
    return " ".join([*(["env", *settings] if settings else []), shlex.join(line)])
