"""Write a run's calls and steps as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Examples:
  hpctk trace runs/7 -o trace.json                       all of it
  hpctk trace runs/7 -o trace.json --steps 100:120       steps 100 to 119
  hpctk trace runs/7 -o trace.json --ranks 0,8-11        five ranks
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from hpctk.errors import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a run, or of its statistics")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="where the trace goes")
    parser.add_argument("--steps", metavar="A:B", help="only steps from A to before B; either may be left out")
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


def steps_of(typed: str | None) -> tuple[int | None, int | None]:
    """Return the first step and the one after the last, None where it is left open."""
    if typed is None:
        return None, None
    found = re.fullmatch(r"(\d{0,15}):(\d{0,15})", typed)
    if not found:
        raise SettingError(f"--steps {typed}: allowed is A:B, whole numbers of which either may be left out")
    first, last = (int(text) if text else None for text in found.groups())
    if first is not None and last is not None and last <= first:
        raise SettingError(f"--steps {typed}: there is no step from {first} to before {last}")
    return first, last


def ranks_of(typed: str | None) -> frozenset[int] | None:
    """Return the ranks of a list such as 0,8-11; None for none given."""
    if typed is None:
        return None
    ranks: set[int] = set()
    for part in typed.split(","):
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise SettingError(f"--ranks {typed}: allowed are ranks and ranges with commas between: 0,8-11")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
