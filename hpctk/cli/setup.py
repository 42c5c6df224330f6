"""Build what pip alone cannot install: Horovod over MPI, into the environment that this hpctk is in.

It takes some minutes, on all cores, and g++, cmake and make. The wheel is kept (HPCTK_CACHE) for the next environment
with the same versions of Python, torch and Open MPI.

Examples:
  hpctk setup horovod
  hpctk setup horovod --check && echo it is there
"""

from __future__ import annotations

import argparse

from hpctk.launch import horovod_build


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("what", choices=["horovod"], metavar="horovod", help="what to build")
    parser.add_argument("--check", action="store_true", help="only tell, by the exit status, whether it is there")


def run(options: argparse.Namespace) -> int:
    """Build, unless it is there."""
    there = horovod_build.fits()
    if options.check:
        return int(not there)
    if there:
        print(f"Horovod {horovod_build.VERSION} is there, and fits")
        return 0
    print(f"Horovod {horovod_build.VERSION}: some minutes, unless its wheel is in {horovod_build.cache()}", flush=True)
    horovod_build.install()
    print("done; start jobs that use it by hpctk horovodrun or hpctk mpirun")
    return 0
