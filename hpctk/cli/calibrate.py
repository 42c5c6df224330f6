"""Measure these ranks and their network, so that schedule="auto" knows what is best here.

Takes less than a minute on an idle machine. Run it the way your jobs run: the same nodes, the same
number of ranks.

Examples:
  hpctk mpirun -n 4 hpctk calibrate
  srun --mpi=pmix python -m mpi4py -m hpctk calibrate --output calibration.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.comm import environment
from hpctk.errors import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"where to keep it [{environment.calibration_file()}]"
    )
    parser.add_argument("--json", action="store_true", help="print the calibration as JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Measure, keep, and print on rank 0. Collective over COMM_WORLD."""
    from hpctk.collectives.tuning.calibrate import calibrate
    from hpctk.comm.world import world

    here = world()
    if here.size == 1:
        raise SettingError("one rank has nobody to talk to: start it with mpirun -n 2 or more")

    def report(line: str) -> None:
        if here.rank == 0:
            print(f"calibrate: {line}", file=sys.stderr, flush=True)

    found = calibrate(here, report)
    target: Path = options.output or environment.calibration_file()
    here.run_on_root("keeping the calibration", lambda: keep(target, found.to_json()))
    if here.rank == 0 and options.json:
        print(found.to_json(), end="")
    elif here.rank == 0:
        times = [dict(points) for points in found.measured.values()]
        rows = [[bytes_text(n), *(seconds_text(of_size[n]) for of_size in times)] for n in times[0]]
        print(f"{table(['all-reduce of', *found.measured], rows)}\nkept in {target}")
    return 0


def keep(target: Path, text: str) -> None:
    """Write a file, whole or not at all, and the folders it is in."""
    from hpctk.stats.paths import atomic_write

    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as file:
        file.write(text)
