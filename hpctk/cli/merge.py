"""Put all ranks' statistics of a run into one file, for h5py, pandas, xarray and others.

The file is a view on the ranks' own files (virtual datasets) and moves with their folder; a copy stands by itself.

Examples:
  hpctk merge runs/7                       makes runs/7/stats/merged.h5
  hpctk merge runs/7 --copy -o run7.h5     a compressed copy that needs nothing else
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hpctk.errors import HpctkError

#: Remarks that are printed; a thousand ranks may be missing.
SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("path", type=Path, metavar="RUN", help="folder of a run, or of its statistics")
    parser.add_argument(
        "-o", dest="output", type=Path, metavar="FILE", help="what to write [merged.h5 beside the statistics]"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--copy", action="store_true", help="copy the rows, compressed, instead of pointing to them")
    kind.add_argument(
        "--virtual", action="store_true", help="point to the ranks' files however many there are, and wherever"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it is there")


def run(options: argparse.Namespace) -> int:
    """Write the file and say what is in it, and what is missing."""
    from hpctk.stats.merge import merge, why_copy
    from hpctk.stats.paths import stats_folder
    from hpctk.stats.read import MERGED, load
    from hpctk.stats.report.numbers import bytes_text, plural

    if not options.path.is_dir():
        raise HpctkError(f"{options.path}: no such folder")
    folder = stats_folder(options.path)
    stats = load(folder)
    files = sum(len(recording.ranks) for recording in stats.recordings)
    target = options.output or folder / MERGED
    why = "" if options.copy or options.virtual else why_copy(stats, target)
    copy = options.copy or bool(why)
    merge(stats, target, copy=copy, force=options.force)
    remarks = [f"{why}: this is a copy"] if why else []
    for one in stats.recordings:
        problems = (*one.missing.values(), *one.foreign.values())
        remarks += [f"recording {one.number}: {problem}" for problem in problems]
    remarks += [f"recording {number}: {problem}" for number, problem in stats.unreadable.items()]
    if len(remarks) > SHOWN:
        remarks[SHOWN:] = [f"and {len(remarks) - SHOWN} more: the table ranks in {target} has all of them"]
    for remark in remarks:
        print(f"hpctk merge: {remark}", file=sys.stderr)
    missing = sum(len(one.missing) for one in stats.recordings)
    print(
        f"{target}: {'copy' if copy else 'view'} of {files} files, {plural(len(stats.recordings), 'recording')}, "
        f"{missing} ranks missing, {bytes_text(target.stat().st_size)}"
    )
    return 0
