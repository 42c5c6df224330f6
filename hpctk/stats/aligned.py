"""When things happened on one clock for all ranks."""

from __future__ import annotations

from typing import Any

from hpctk.stats.read import RecordingStats


def shifts(recording: RecordingStats) -> dict[int, float]:
    """Return what is added to each rank's seconds to have them since rank 0's recording began; 0 where it is not known.

    Where rank 0 left no file, since that of the lowest rank that did.
    """
    offsets = {rank: stats.attributes.get("clock_offset_s") for rank, stats in recording.ranks.items()}
    origin = offsets.get(min(offsets, default=0))
    return {rank: _between(origin, offset) for rank, offset in offsets.items()}


def _between(origin: Any, offset: Any) -> float:
    if not isinstance(origin, int | float) or not isinstance(offset, int | float):
        return 0.0
    between = float(offset) - float(origin)
    # Ranks start within a day of each other: what is farther away is no clock, and NaN is not even that.
    return between if abs(between) < 86400 else 0.0
