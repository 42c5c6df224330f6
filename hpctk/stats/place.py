"""Where a run's statistics are, from what one types, and how a report gets to where it belongs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hpctk.errors import HpctkError
from hpctk.telemetry.names import STATS


def statistics_of(path: Path) -> Path:
    """Return the folder of statistics: the one given, or the one inside the folder of a run.

    Raises
    ------
    HpctkError
        Where a run has several, one for each method: which they are.
    """
    if (path / STATS).is_dir():
        return path / STATS
    several = sorted(one.parent for one in path.glob(f"*/{STATS}") if one.is_dir()) if path.is_dir() else []
    if len(several) == 1:
        return several[0] / STATS
    if several:
        shown = shlex.join(str(one) for one in several)
        raise HpctkError(f"{path}: holds several runs: report on one, or on all with: --compare {shown}")
    return path


@contextmanager
def whole(path: Path) -> Iterator[IO[str]]:
    """Give a file to write to, which takes the place of `path` when it is whole; HpctkError where it cannot."""
    if not path.name or path.is_dir():
        raise HpctkError(f"{path}: is a folder: give the name of a file")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        beside.replace(path)
    except OSError as error:
        raise HpctkError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            beside.unlink()
