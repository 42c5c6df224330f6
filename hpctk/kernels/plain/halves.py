"""`kernels.halves` in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.plain.ordered import pieces

Array = NDArray[Any]
Halves = NDArray[np.uint16]


def _to16(values: Array) -> Halves:
    return values.astype(np.float16).view(np.uint16)


def _from16(halves: Halves) -> Array:
    return halves.view(np.float16).astype(np.float32)


def _to_b16(values: Array) -> Halves:
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _from_b16(halves: Halves) -> Array:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _cut(values: Array, limit: Any) -> Array:
    return np.clip(values, -limit, limit).astype(np.float32)


def _write16(values: Array, halves: Halves, limit: Any) -> None:
    for lo, hi in pieces(0, len(values)):
        halves[lo:hi] = _to16(_cut(values[lo:hi], limit))


def _write_b16(values: Array, halves: Halves, limit: Any) -> None:
    for lo, hi in pieces(0, len(values)):
        halves[lo:hi] = _to_b16(_cut(values[lo:hi], limit))


def _read16(halves: Halves, values: Array) -> None:
    values[:] = _from16(halves)


def _read_b16(halves: Halves, values: Array) -> None:
    values[:] = _from_b16(halves)


def _feed16(residual: Array, gradient: Array, halves: Halves, limit: Any) -> None:
    _feed(residual, gradient, halves, limit, _to16, _from16)


def _feed_b16(residual: Array, gradient: Array, halves: Halves, limit: Any) -> None:
    _feed(residual, gradient, halves, limit, _to_b16, _from_b16)


def _feed(
    residual: Array,
    gradient: Array,
    halves: Halves,
    limit: Any,
    to_half: Callable[[Array], Halves],
    from_half: Callable[[Halves], Array],
) -> None:
    for lo, hi in pieces(0, len(residual)):
        total = residual[lo:hi] + gradient[lo:hi]
        halves[lo:hi] = to_half(_cut(total, limit))
        residual[lo:hi] = total - from_half(halves[lo:hi])
