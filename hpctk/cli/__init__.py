"""The `hpctk` command. A subcommand is a module here with `add_arguments(parser)` and `run(options)`.

Modules are imported only when their command is used: `hpctk --help` starts nothing. What is typed after mpirun,
horovodrun, cluster and quickstart is, at least in part, for others: their modules have `main(name, words)` instead.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from hpctk._version import __version__
from hpctk.comm import environment, launcher
from hpctk.errors import HpctkError, SettingError
from hpctk.nearest import hint

#: Seconds for which other ranks leave it to rank 0 to say what is wrong with the words all were given.
GIVE_WAY_S = 10.0

#: Name of the command: (module here, what it does in one line).
COMMANDS = {
    "quickstart": ("quickstart", "train a small job on this machine by every method, and compare them"),
    "doctor": ("doctor", "say what this installation has, what it lacks and how to get it"),
    "mpirun": ("launch", "start ranks with mpirun, and with what the installed MPI needs"),
    "horovodrun": ("launch", "the same for a job that uses Horovod"),
    "setup": ("setup", "build Horovod for this environment"),
    "cluster": ("cluster", "emulate a cluster with slow links on this machine"),
    "run": ("run", "run a script as a rank, like python -m mpi4py, and say where a rank left"),
    "calibrate": ("calibrate", "measure these ranks, so that schedule='auto' knows what is best here"),
    "schedule": ("schedule", "list, draw and price the collective schedules"),
    "advise": ("advise", "predict a step by every method on a network, and say which to take, if any"),
    "checkpoint": ("checkpoint", "show what a checkpoint holds, and whether it is whole"),
    "merge": ("merge", "put all ranks' statistics of a run into one HDF5 file"),
    "report": ("report", "say what a run's statistics show, as text, as a page or as JSON; compare runs"),
    "trace": ("trace", "write a run's calls for Perfetto or chrome://tracing"),
    "slurm": ("slurm", "write a job script for Slurm, or submit it"),
    "train": ("train", "run a bundled training job on this communicator's ranks"),
}


#: Commands that get their words as they were typed.
RAW = ("quickstart", "mpirun", "horovodrun", "cluster")
NO_MPI4PY = (
    'needs mpi4py and an MPI: pip install "hpctk[mpi]" (on a cluster: load its MPI module, then pip install mpi4py). '
    "Jobs of torchrun need neither: see hpctk.ddp"
)

EXAMPLES = """examples:
  hpctk doctor
  hpctk quickstart
  hpctk mpirun -n 4 python train.py --epochs 3
  hpctk mpirun -n 4 hpctk train digits
"""


def variables() -> str:
    """Return the environment variables, two lines each."""
    lines = [f"  {name}\n      {one.meaning} [{one.default_text}]" for name, one in environment.VARIABLES.items()]
    return "\n".join(["", "environment variables:", *lines])


class Parser(argparse.ArgumentParser):
    """A parser whose complaints come from one rank, in one line, with the word that was meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read the words; end with status 2 where one is left over."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            flags = [flag for action in self._actions for flag in action.option_strings if flag != "-h"]
            self.error(
                f"unknown: {' '.join(left)}; {hint(left[0].partition('=')[0], flags)}known are {', '.join(flags)}"
            )
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(None, f"{value!r}: {hint(str(value), known)}known are {', '.join(known)}")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and how to learn more; exit with 2."""
        give_way()
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help)\n")


def give_way() -> None:
    """Let rank 0 speak first where the ranks have not met yet: its exit ends the job, and all would say the same."""
    if launcher.rank(os.environ) > 0 and "mpi4py.MPI" not in sys.modules:
        time.sleep(GIVE_WAY_S)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; only `command` gets its arguments, the others stand there by name."""
    parser = Parser(
        prog="hpctk",
        description="Data-parallel training that needs less network.",
        epilog=EXAMPLES + variables(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hpctk {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        if name == command:
            loaded = importlib.import_module(f"hpctk.cli.{module}")
            sub = commands.add_parser(
                name, help=summary, description=loaded.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            loaded.add_arguments(sub)
            sub.set_defaults(run=loaded.run)
        else:
            commands.add_parser(name, help=summary, add_help=False)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in words if word in COMMANDS), None)
    status = 0
    try:
        if words and words[0] in RAW:
            status = importlib.import_module(f"hpctk.cli.{COMMANDS[words[0]][0]}").main(words[0], words[1:])
        else:
            parser = build_parser(command)
            options = parser.parse_args(words)
            # Not by argparse, which would ask for it before it looks at a misspelt option.
            if options.command is None:
                parser.error(f"which command? Known are {', '.join(COMMANDS)}")
            status = options.run(options)
        # Here, not at the interpreter's exit, where a closed pipe would be an error message.
        sys.stdout.flush()
    except HpctkError as error:
        if isinstance(error, SettingError):
            give_way()
        # The traceback would only show hpctk's own inside: the message says what to do.
        print(f"hpctk {command}: {NO_MPI4PY if lacks_mpi(error.__cause__) else error}", file=sys.stderr)
        return 2
    except (ImportError, RuntimeError) as error:
        if not lacks_mpi(error):
            raise
        give_way()
        print(f"hpctk {command}: {NO_MPI4PY}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # A rank's is for mpi4py, which ends the job.
        if launcher.variables(os.environ):
            raise
        print(f"\nhpctk {command}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `hpctk ... | head` is not an error: what is left to print goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        # A rank's is for mpi4py, which ends the job.
        if error.filename is None or launcher.variables(os.environ):
            raise
        print(f"hpctk {command}: {error.filename}: {error.strerror}; give another path", file=sys.stderr)
        return 2
    return status


def lacks_mpi(error: BaseException | None) -> bool:
    """Return whether an error comes of mpi4py that is not installed, or finds no MPI library."""
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] == "mpi4py"
    return isinstance(error, RuntimeError) and "cannot load MPI library" in str(error)
