"""Say what a run's statistics show: what was sent, who waited for whom, what compression saved.

RUN is the folder of a run (hpctk train --run) or of its statistics (stats=DIR, HPCTK_STATS). It works while the
run goes on, and on what is left of one that was killed; it says what is missing.

Examples:
  hpctk report runs/7                                    in this terminal
  hpctk report runs/7 --html report.html                 one page with pictures, for any browser
  hpctk report runs/7 --html report.html --steps 100:104 with these steps in its timeline
  hpctk report runs/7 --json | jq .per_step              for programs; --json FILE writes a file
  hpctk report --compare runs/mean runs/saef             runs side by side; also with --html and --json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hpctk.cli.trace import steps_of
from hpctk.errors import SettingError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="folder of a run, or of its statistics")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="print JSON instead, or write it to FILE")
    parser.add_argument("--compare", action="store_true", help="put two or more runs side by side")
    parser.add_argument("--steps", metavar="A:B", help="the steps of the page's timeline [a few in the middle]")


def run(options: argparse.Namespace) -> int:
    """Print or write what was asked for."""
    if not options.runs and options.json not in (None, "-"):
        raise SettingError(f"--json {options.json}: write RUN before --json, which takes what follows for its FILE")
    if options.compare and len(options.runs) < 2:
        raise SettingError(f"--compare: needs two runs or more, got {len(options.runs)}")
    if not options.compare and len(options.runs) != 1:
        raise SettingError(f"RUN: one folder is needed, got {len(options.runs)}; --compare takes several")
    from hpctk.stats.paths import stats_folder
    from hpctk.stats.read import load
    from hpctk.stats.report import compare
    from hpctk.stats.report.account import TABLES, account
    from hpctk.stats.report.document import document
    from hpctk.stats.report.text import text

    if options.compare:
        documents = [document(account(load(stats_folder(path), checked=TABLES))) for path in options.runs]
        shown = compare.comparison(documents)
        if options.html:
            _write(options.html, compare.page(shown, documents))
        _out(options, shown, compare.text(shown))
        return 0
    steps = steps_of(options.steps)
    loaded = load(stats_folder(options.runs[0]), checked=TABLES)
    found = account(loaded)
    shown = document(found)
    if options.html:
        from hpctk.stats.report.figures import Material
        from hpctk.stats.report.page import page
        from hpctk.stats.report.timeline import lanes

        least = min(shown["ranks"], key=lambda one: one["waiting_share"] or 0.0, default={"rank": None})
        _write(options.html, page(Material(shown, found, lanes(loaded, *steps, least["rank"]))))
    _out(options, shown, text(shown))
    return 0


def _out(options: argparse.Namespace, shown: dict[str, Any], text: str) -> None:
    """Print JSON where it was asked for; else the text, unless something was written to a file instead."""
    if options.json == "-":
        print(json.dumps(shown, indent=2, allow_nan=False))
        return
    if options.json:
        _write(Path(options.json), json.dumps(shown, indent=2, allow_nan=False) + "\n")
    for path in filter(None, (options.html, options.json)):
        print(path, file=sys.stderr)
    if not options.html and not options.json:
        print(text, end="")


def _write(path: Path, content: str) -> None:
    from hpctk.stats.paths import atomic_write

    with atomic_write(path) as file:
        file.write(content)
