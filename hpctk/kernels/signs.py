"""Sign with error feedback in two passes over gradient and residual: the 1-norm of their sum, then its signs.

The sum is formed twice and never stored: reading both arrays again costs less than writing it. The first pass changes
nothing, so a sum that is not finite is found before anything is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled
from hpctk.kernels.packing import packed_length
from hpctk.kernels.threads import WORTH_A_THREAD, share, spans
from hpctk.kernels.updates import BLOCK

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

#: Elements whose signs are found together: these stay in the fastest cache.
TILE = 2048
#: Eight bytes of 0 or 1 times this have their lowest bits, in order, in the highest byte.
GATHER = np.uint64(0x0102040810204080)


def sum_of_magnitudes(residual: Array, gradient: Array, *, threads: int | None = None) -> float:
    """Return ||residual + gradient||_1 as `updates.sum_of_magnitudes` of that sum would, to the bit. Not in place.

    Arrays of one float dtype, flat, contiguous and of one length. Not finite where an element of the sum is not; of
    float64 also where the norm itself is beyond the range.
    """
    n = _same_length(residual, gradient)
    sums = np.zeros(-(-n // BLOCK))
    if n < WORTH_A_THREAD:
        _block_sums(residual, gradient, sums, 0, len(sums))
    else:
        parts = spans(n, threads, align=BLOCK)
        share(_block_sums, [(residual, gradient, sums, lo // BLOCK, -(-hi // BLOCK)) for lo, hi in parts])
    return float(sums.sum())


def take_signs(residual: Array, gradient: Array, scale: float, packed: Bytes, *, threads: int | None = None) -> None:
    """Write the signs of residual + gradient, and leave in the residual what +scale or -scale miss; in place.

    `packed` takes one bit per element, 1 where the sum is below zero, as `packing.pack_signs` writes them.
    """
    n = _same_length(residual, gradient)
    if len(packed) != packed_length(n, 1):
        raise ValueError(f"{n} signs fill {packed_length(n, 1)} bytes, not {len(packed)}")
    step = residual.dtype.type(scale)
    if n < WORTH_A_THREAD:
        _take_signs(residual, gradient, step, packed)
        return
    parts = spans(n, threads, align=TILE)
    calls = [(residual[lo:hi], gradient[lo:hi], step, packed[lo // 8 : (hi + 7) // 8]) for lo, hi in parts]
    share(_take_signs, calls)


def _same_length(residual: Array, gradient: Array) -> int:
    if len(residual) != len(gradient) or residual.dtype != gradient.dtype:
        raise ValueError(
            f"a gradient of {len(gradient)} x {gradient.dtype} does not fit a residual of "
            f"{len(residual)} x {residual.dtype}"
        )
    return len(residual)


@compiled
def _block_sums(residual: Array, gradient: Array, sums: Array, first: int, last: int) -> None:
    block = first
    # A sum in a fixed order waits for each addition: four blocks side by side keep the processor busy.
    while block + 4 <= last and (block + 4) * BLOCK <= len(residual):
        lo = block * BLOCK
        r0, g0 = residual[lo : lo + BLOCK], gradient[lo : lo + BLOCK]
        r1, g1 = residual[lo + BLOCK : lo + 2 * BLOCK], gradient[lo + BLOCK : lo + 2 * BLOCK]
        r2, g2 = residual[lo + 2 * BLOCK : lo + 3 * BLOCK], gradient[lo + 2 * BLOCK : lo + 3 * BLOCK]
        r3, g3 = residual[lo + 3 * BLOCK : lo + 4 * BLOCK], gradient[lo + 3 * BLOCK : lo + 4 * BLOCK]
        s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
        for i in range(BLOCK):
            s0 += abs(np.float64(r0[i] + g0[i]))
            s1 += abs(np.float64(r1[i] + g1[i]))
            s2 += abs(np.float64(r2[i] + g2[i]))
            s3 += abs(np.float64(r3[i] + g3[i]))
        sums[block], sums[block + 1], sums[block + 2], sums[block + 3] = s0, s1, s2, s3
        block += 4
    while block < last:
        total = 0.0
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(residual))):
            total += abs(np.float64(residual[i] + gradient[i]))
        sums[block] = total
        block += 1


@compiled
def _take_signs(residual: Array, gradient: Array, scale: Any, packed: Bytes) -> None:
    flags = np.zeros(TILE, np.uint8)
    words = flags.view(np.uint64)
    for start in range(0, len(residual), TILE):
        kept, given = residual[start : start + TILE], gradient[start : start + TILE]
        for i in range(len(kept)):
            total = kept[i] + given[i]
            below = total < 0
            flags[i] = below
            kept[i] = total + (scale if below else -scale)
        if len(kept) < TILE:
            flags[len(kept) :] = 0
        data = packed[start // 8 : start // 8 + TILE // 8]
        for j in range(len(data)):
            data[j] = (words[j] * GATHER) >> np.uint64(56)
