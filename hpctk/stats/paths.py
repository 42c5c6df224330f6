"""Where a run's statistics are, from what one types, and how a report is written in full or not at all."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hpctk.errors import HpctkError
from hpctk.telemetry.names import STATS


def stats_folder(path: Path) -> Path:
    """Return the folder of statistics: the one given, or the one inside the folder of a run.

    Raise HpctkError where a run has several, one for each method: it names them.
    """
    if (path / STATS).is_dir():
        return path / STATS
    runs = sorted(stats.parent for stats in path.glob(f"*/{STATS}") if stats.is_dir()) if path.is_dir() else []
    if len(runs) == 1:
        return runs[0] / STATS
    if runs:
        shown = shlex.join(str(run) for run in runs)
        raise HpctkError(f"{path}: holds several runs: report on one, or on all with: --compare {shown}")
    return path


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """Open a text file that replaces `path` once it is complete. Raise HpctkError where it cannot."""
    if not path.name or path.is_dir():
        raise HpctkError(f"{path}: is a folder: give the name of a file")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        unfinished.replace(path)
    except OSError as error:
        raise HpctkError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            unfinished.unlink()
