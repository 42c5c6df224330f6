"""Run a Python script as a rank of an MPI job: an error or exit on one rank ends the whole job.

Like `python -m mpi4py SCRIPT`, and a rank that calls sys.exit with an error also names itself and
shows where it left.

Examples:
  hpctk mpirun -n 4 hpctk run train.py --epochs 3
  mpirun -n 4 python -m hpctk run -m mypackage.train
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec

from hpctk.errors import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after `run` belongs to the script."""
    parser.usage = "hpctk run [-m MODULE | -c CODE | SCRIPT] [ARGUMENT ...]"
    # argparse would take the script's own options for ours unless each of these takes all that follows.
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, metavar="MODULE", help="run a module as a script")
    parser.add_argument("-c", dest="code", nargs=rest, metavar="CODE", help="run a program given as text")
    parser.add_argument("script", nargs=rest, metavar="SCRIPT", help="what to run, and its arguments")


def run(options: argparse.Namespace) -> int:
    """Run the script; abort the MPI job if it fails here."""
    from hpctk.comm.mpi.library import run_script

    words = list(options.script)
    for flag, given in (("-m", options.module), ("-c", options.code)):
        words = [flag, *given, *words] if given else words
    if not words:
        raise SettingError("which script? (hpctk run --help)")
    if not words[0].startswith("-") and not os.path.exists(words[0]):
        raise SettingError(f"{words[0]}: no such file; a module is run by hpctk run -m MODULE")
    if words[0] == "-m":
        # As for `python -m`, modules of this folder come first; the command's own script has put its folder there.
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        if not _is_module(words[1]):
            raise SettingError(f"-m {words[1]}: no such module here; a file is run by hpctk run SCRIPT")
    return run_script(words)


def _is_module(name: str) -> bool:
    """Return whether there is a module of that name. One of a package imports the package."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError as error:
        # A package that misses something of its own is there: running it says what.
        return not f"{name}.".startswith(f"{error.name}.")
    except ValueError:
        return False
