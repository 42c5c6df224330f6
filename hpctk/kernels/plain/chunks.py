"""`kernels.chunks` in numpy."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from hpctk.kernels.plain.magnitude import first_not_finite, magnitudes, sums, top

Array = NDArray[Any]


def pick(
    source: Array,
    other: Array | None,
    weight: Any,
    inf: Any,
    sizes: tuple[int, int],
    first: int,
    room: Array,
    indices: Array,
    values: Array,
) -> int:
    bad = first_not_finite(source, other, weight, inf)
    if bad >= 0:
        return bad
    (k, chunk), found = sizes, 0
    for start in range(0, len(source), chunk):
        summed = sums(source, other, weight, slice(start, start + chunk))
        places = top(magnitudes(summed), k if len(summed) == chunk else max(1, k * len(summed) // chunk))
        indices[found : found + len(places)] = first + start + places
        values[found : found + len(places)] = summed[places]
        found += len(places)
    return -1
