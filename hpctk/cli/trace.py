"""Write a run's calls and steps as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Examples:
  hpctk trace runs/7 -o trace.json                       all of it
  hpctk trace runs/7 -o trace.json --steps 100:120       steps 100 to 119
  hpctk trace runs/7 -o trace.json --ranks 0,8-11        five ranks
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpctk.cli.core.typed_ranges import ranks_of, steps_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run, or of its statistics")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", required=True, help="where the trace goes"
    )
    parser.add_argument(
        "--steps", metavar="A:B", help="only steps from A to before B; either may be left out"
    )
    parser.add_argument("--ranks", metavar="LIST", help="only these ranks: 0,3 or 0-7,12")


def run(options: argparse.Namespace) -> int:
    """Write the trace."""
    from hpctk.stats.paths import atomic_write, stats_folder
    from hpctk.stats.read import load
    from hpctk.stats.trace import Cut, write

    first, last = steps_of(options.steps)
    cut = Cut(first, last, ranks_of(options.ranks))
    loaded = load(stats_folder(options.folder))
    with atomic_write(options.output) as file:
        events, problems = write(loaded, file, cut)
    for problem in problems:
        print(f"hpctk trace: left out: {problem}", file=sys.stderr)
    print(f"{options.output}: {events} calls and steps; open it at ui.perfetto.dev")
    return 0
