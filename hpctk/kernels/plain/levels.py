"""`kernels.levels` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.in_order import add_pairwise
from hpctk.kernels.plain.ordered import PIECE
from hpctk.kernels.plain.packing import _pack, _unpack

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


def _measure(source: Array, gradient: Array, feeds: bool, norms: Array, sums: Any, order: Any, limit: Any) -> bool:
    bucket = len(sums[0]) - 1
    # Some buckets at a time.
    step = max(1, PIECE // bucket) * bucket
    for begin in range(0, len(source), step):
        totals = _totals(source[begin : begin + step], gradient[begin : begin + step], feeds, bucket)
        if not np.isfinite(totals).all():
            return False
        norms[begin // bucket : begin // bucket + len(totals)] = _norms(totals, limit)
    return True


def _write(
    source: Array,
    gradient: Array,
    feeds: bool,
    norms: Array,
    words: Array,
    randomness: Any,
    totals: Array,
    sizes: Any,
    one: Any,
) -> None:
    key, counter, _, draws, first_word, block_words = randomness
    bits, bucket, block, _ = sizes
    codes = np.empty(len(source), np.uint8)
    for number, begin in enumerate(range(0, len(source), block)):
        kept = source[begin : begin + block]
        sums = _totals(kept, gradient[begin : begin + block], feeds, bucket)
        of_block = norms[begin // bucket : begin // bucket + len(sums)]
        word = first_word + number * block_words
        drawn = _words_from(key, counter, word, block_words).view(draws.dtype)[: len(kept)]
        norm = np.repeat(of_block, bucket)[: len(kept)]
        codes[begin : begin + block], missed = _levels(sums.reshape(-1)[: len(kept)], drawn, norm, one, bits)
        if feeds:
            kept[:] = missed
    room = np.empty(-(-len(codes) // 64) * bits, np.uint64)
    _pack(codes, bits, room)
    words[:] = room[: len(words)]


def _totals(kept: Array, given: Array, feeds: bool, bucket: int) -> Array:
    """Return what is written, bucket by bucket, with zeros after the last."""
    totals = np.zeros((-(-len(kept) // bucket), bucket), kept.dtype)
    totals.reshape(-1)[: len(kept)] = kept + given if feeds else kept
    return totals


def _words_from(key: Array, counter: Array, first: int, count: int) -> Array:
    """Return words of the stream from number `first` on."""
    moved = counter.copy()
    moved[0] += np.uint64(first // 4)
    words: Array = np.random.Philox(key=key, counter=moved).random_raw(first % 4 + count)
    return words[first % 4 :]


def _norms(totals: Array, limit: Any) -> Array:
    peaks = np.abs(totals).max(axis=1).astype(np.float64)
    scaled = totals / np.where(peaks > 0, peaks, 1.0)[:, None]
    norms: Array = np.minimum(peaks * np.sqrt(add_pairwise(scaled * scaled)), np.float64(limit))
    return norms


def _levels(totals: Array, drawn: Array, norm: Array, one: Any, bits: int) -> tuple[Array, Array]:
    """Return the codes, and what they miss."""
    digits = np.finfo(totals.dtype).nmant + 1
    chances = (drawn >> drawn.dtype.type(8 * totals.itemsize - digits)).astype(totals.dtype)
    levels = totals.dtype.type((1 << (bits - 1)) - 1)
    exact = np.abs(totals) / np.where(norm > 0, norm, one) * levels
    level = np.floor(exact)
    level += np.ldexp(chances, -digits) < exact - level
    below = totals < 0
    codes = level.astype(np.uint8) | ((below & (level > 0)).astype(np.uint8) << np.uint8(bits - 1))
    part = level / levels * norm
    return codes, np.where(below, totals + part, totals - part)


def _read(norms: Array, data: Bytes, bits: int, bucket: int, one: Any, out: Array) -> bool:
    words = np.zeros(-(-len(out) // 64) * bits, np.uint64)
    words.view(np.uint8)[: len(data)] = data
    codes = np.empty(len(out), np.uint8)
    _unpack(words, bits, codes)
    top = np.uint8(1 << (bits - 1))
    out[:] = codes & (top - np.uint8(1))
    out /= one * np.float32(top - 1)
    out *= np.repeat(norms, bucket)[: len(out)]
    np.negative(out, out=out, where=codes > top)
    return not bool((codes == top).any())
