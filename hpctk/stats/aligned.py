"""When things happened on one clock for all ranks."""

from __future__ import annotations

import math
from typing import Any

from hpctk.stats.read import RankStats, RecordingStats


def shifts(recording: RecordingStats) -> dict[int, float]:
    """Return what is added to each rank's seconds to have them on rank 0's clock; 0 where nobody measured it."""
    return {rank: _sound(stats.attributes.get("clock_offset_s")) for rank, stats in recording.ranks.items()}


def error_s(stats: RankStats) -> float | None:
    """Return by how much a rank's shift may be wrong, None where nobody knows."""
    value = stats.attributes.get("clock_error_s")
    return value if isinstance(value, float) and math.isfinite(value) and value >= 0 else None


def _sound(offset: Any) -> float:
    return float(offset) if isinstance(offset, int | float) and abs(offset) < 1e9 else 0.0
