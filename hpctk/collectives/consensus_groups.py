"""Which groups of tensors, that share AdaCons's weights, some elements belong to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def groups_within(groups: Sequence[int], lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Return (group, start, stop) for each group that reaches into elements lo .. hi-1."""
    found = []
    g = bisect_right(groups, lo) - 1
    while g < len(groups) - 1 and groups[g] < hi:
        start, stop = max(groups[g], lo), min(groups[g + 1], hi)
        if start < stop:
            found.append((g, start, stop))
        g += 1
    return found
