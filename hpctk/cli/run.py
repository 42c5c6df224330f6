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
    return run_script(words)
