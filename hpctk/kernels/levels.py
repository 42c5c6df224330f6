"""QSGD's rounding to a few levels of each bucket's norm, with its random numbers, from values to packed bits and back.

Block by block, in a core's cache: the random words of the block, then bucket by bucket norm, levels and what they miss,
then the block's codes into bits. The same bits as the steps in numpy that `compressors.qsgd` takes for half precision:

- random words are those of `numpy.random.Philox`, which any counter gives without those before it: number w is word
  w % 4 of counter w // 4 + 1. A float64 takes one word, two float32 share one, the lower half first; each block of
  buckets starts at a new word;
- squares are summed in numpy's order, pairwise: a sequence of leaves of at most 128, as `leaves` writes it down.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled, intrinsic, types
from hpctk.kernels.packing import check_packed, packed_length
from hpctk.kernels.threads import WORTH_A_THREAD, share, spans

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

#: Elements read together: a multiple of 8 that stays in the fastest cache.
TILE = 4096
#: The longest run that numpy sums without splitting it.
LEAF = 128


def write(
    source: Array,
    gradient: Array | None,
    bits: int,
    bucket: int,
    block: int,
    limit: float,
    key: Array,
    counter: Array,
    *,
    threads: int | None = None,
) -> Bytes:
    """Return the norms of all buckets, in the source's dtype, and the packed codes of all elements, as bytes.

    Without a gradient nothing is changed. With one, what is written is source + gradient, and what the codes miss of
    it stays in the source, in place. Values must be finite, which is not checked.

    Parameters
    ----------
    source, gradient : arrays
        float32 or float64, flat, contiguous, of one length and dtype.
    block : int
        Elements quantised together, a multiple of the bucket.
    limit : float
        No norm is larger.
    key, counter : arrays of 2 and 4 uint64
        Of the Philox stream, at its start.
    """
    if gradient is not None and (len(gradient) != len(source) or gradient.dtype != source.dtype):
        raise ValueError(
            f"a gradient of {len(gradient)} x {gradient.dtype} does not fit {len(source)} x {source.dtype}"
        )
    n, kind = len(source), source.dtype
    norm_bytes = -(-n // bucket) * kind.itemsize
    # The norms end, and the codes' words begin, at a multiple of 8 bytes.
    start = -norm_bytes % 8
    room = np.empty(start + norm_bytes + (n * bits + 63) // 64 * 8, np.uint8)
    norms, words = room[start : start + norm_bytes].view(kind), room[start + norm_bytes :].view(np.uint64)
    unsigned = np.dtype(f"u{kind.itemsize}")
    # A float64 takes a random word, two float32 share one.
    random_words = (block + 1) // 2 if kind.itemsize == 4 else block
    calls = []
    for lo, hi in _parts(n, block, threads):
        random = np.empty(random_words // 8 * 8 + 16, np.uint64)
        totals = np.empty(bucket + 1, kind)
        calls.append(
            (
                source[lo:hi],
                (source if gradient is None else gradient)[lo:hi],
                gradient is not None,
                norms[lo // bucket : -(-hi // bucket)],
                words[lo * bits // 64 : (hi * bits + 63) // 64],
                (key, counter, random, random.view(unsigned), lo // block * random_words, random_words),
                (totals, totals.view(unsigned), unsigned.type(np.iinfo(unsigned).max >> 1)),
                leaves(bucket),
                (bits, bucket, block),
                kind.type(limit),
                # Constants are of the values' own dtype: with any other, numba would compute in float64.
                kind.type(1),
            )
        )
    share(_write, calls)
    return room[start : start + norm_bytes + packed_length(n, bits)]


def read(norms: Array, data: Bytes, bits: int, bucket: int, out: Array, *, threads: int | None = None) -> None:
    """Write what norms and packed codes stand for into `out`, of the norms' dtype.

    Raise ValueError if the codes are not as many as `out` has elements, or one of them is minus zero, which is never
    written.
    """
    n = len(out)
    check_packed(data, bits, n)
    if norms.dtype != out.dtype or len(norms) != -(-n // bucket):
        raise ValueError(f"{len(norms)} x {norms.dtype} norms for {n} x {out.dtype} in buckets of {bucket}")
    one = out.dtype.type(1)
    calls = []
    for lo, hi in _parts(n, bucket, threads):
        shares = norms[lo // bucket : -(-hi // bucket)], data[lo * bits // 8 : (hi * bits + 7) // 8]
        calls.append((*shares, bits, bucket, one, out[lo:hi]))
    if not all(share(_read, calls)):
        raise ValueError("the code of minus zero, which is never written")


def _parts(n: int, step: int, threads: int | None) -> list[tuple[int, int]]:
    # 64 codes fill whole words: parts share neither a bucket nor a word.
    return [(0, n)] if n < WORTH_A_THREAD else spans(n, threads, align=lcm(step, 64))


@lru_cache(maxsize=16)
def leaves(n: int) -> tuple[Array, Array]:
    """Return how numpy sums n numbers pairwise: the leaves' lengths, and how many sums to form after each.

    Sums stand on a stack; forming one takes the two on top.
    """
    lengths: list[int] = []
    sums: list[int] = []

    def split(count: int) -> None:
        if count <= LEAF:
            lengths.append(count)
            sums.append(0)
            return
        left = count // 2 - count // 2 % 8
        split(left)
        split(count - left)
        sums[-1] += 1

    split(n)
    return np.array(lengths), np.array(sums)


if TYPE_CHECKING:

    def _product(a: Any, b: Any) -> Any: ...

else:

    @intrinsic
    def _product(typing, a, b):
        """Return the upper and the lower 64 of the 128 bits of a product of two uint64: one instruction."""

        def build(context, builder, signature, arguments):
            narrow = arguments[0].type
            wide = type(narrow)(128)
            product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
            halves = builder.trunc(builder.lshr(product, wide(64)), narrow), builder.trunc(product, narrow)
            return context.make_tuple(builder, signature.return_type, halves)

        return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), build


@compiled
def _random_words(key: Array, counter: Array, first: int, words: Array) -> None:
    """Fill `words`, a multiple of eight, with the stream's from number 4 * first on."""
    m0, m1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
    w0, w1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
    for i in range(0, len(words) // 4, 2):
        # Two counters at once: each round waits for the products of the one before.
        a0, a1, a2, a3 = counter[0] + np.uint64(first + i + 1), counter[1], counter[2], counter[3]
        b0, b1, b2, b3 = counter[0] + np.uint64(first + i + 2), counter[1], counter[2], counter[3]
        k0, k1 = key[0], key[1]
        for _ in range(10):
            (p, q), (r, s) = _product(m0, a0), _product(m1, a2)
            a0, a1, a2, a3 = r ^ a1 ^ k0, s, p ^ a3 ^ k1, q
            (p, q), (r, s) = _product(m0, b0), _product(m1, b2)
            b0, b1, b2, b3 = r ^ b1 ^ k0, s, p ^ b3 ^ k1, q
            k0 += w0
            k1 += w1
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = a0, a1, a2, a3
        words[4 * i + 4], words[4 * i + 5], words[4 * i + 6], words[4 * i + 7] = b0, b1, b2, b3


@compiled
def _pairwise(squares: Array, lengths: Array, sums: Array, stack: Array, lanes: Array) -> float:
    """Return the sum of squares in the order that `leaves` tells."""
    start, top = 0, 0
    for leaf in range(len(lengths)):
        part = squares[start : start + lengths[leaf]]
        start += lengths[leaf]
        whole = len(part) // 8 * 8
        total = 0.0
        if whole:
            for lane in range(8):
                lanes[lane] = part[lane]
            for i in range(8, whole, 8):
                for lane in range(8):
                    lanes[lane] += part[i + lane]
            total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
        for i in range(whole, len(part)):
            total += part[i]
        stack[top] = total
        top += 1
        for _ in range(sums[leaf]):
            top -= 1
            stack[top - 1] += stack[top]
    return float(stack[0])


@compiled
def _squeezed(eight: Any, bits: int) -> Any:
    """Return the lowest `bits` bits of each of eight bytes, one after the other."""
    gap = np.uint64(8 - bits)
    eight = (eight & np.uint64(0x00FF00FF00FF00FF)) | ((eight & np.uint64(0xFF00FF00FF00FF00)) >> gap)
    eight = (eight & np.uint64(0x0000FFFF0000FFFF)) | ((eight & np.uint64(0xFFFF0000FFFF0000)) >> np.uint64(2) * gap)
    return (eight & np.uint64(0x00000000FFFFFFFF)) | ((eight & np.uint64(0xFFFFFFFF00000000)) >> np.uint64(4) * gap)


@compiled
def _spread(eight: Any, bits: int) -> Any:
    """Return eight bytes of which each has the next `bits` bits."""
    gap, mask = np.uint64(8 - bits), np.uint64((1 << bits) - 1)
    half, quarter = np.uint64((1 << 4 * bits) - 1), np.uint64((1 << 2 * bits) - 1) * np.uint64(0x0000000100000001)
    eight = (eight & half) | ((eight & ~half) << np.uint64(4) * gap)
    eight = (eight & quarter) | ((eight & ~quarter) << np.uint64(2) * gap)
    mask *= np.uint64(0x0001000100010001)
    return (eight & mask) | ((eight & ~mask) << gap)


@compiled
def _write(
    source: Array,
    gradient: Array,
    feeds: bool,
    norms: Array,
    words: Array,
    randomness: Any,
    sums: Any,
    order: Any,
    sizes: Any,
    limit: Any,
    one: Any,
) -> None:
    key, counter, random, draws, first_word, block_words = randomness
    bits, bucket, size = sizes
    totals, patterns, mask = sums
    per_word = 8 // draws.itemsize
    chances, squares, stack = np.empty(bucket, source.dtype), np.empty(bucket), np.empty(len(order[0]) + 9)
    # Codes wait here until eight are together, so there is room for seven of the block before.
    codes = np.zeros(size // 8 * 8 + 16, np.uint8)
    eights = codes.view(np.uint64)
    waiting, number = 0, 0
    word, filled, position = np.uint64(0), 0, 0
    for begin in range(0, len(source), size):
        end = min(begin + size, len(source))
        _random_words(key, counter, first_word // 4, random)
        next_draw = first_word % 4 * per_word
        first_word += block_words
        for start in range(begin, end, bucket):
            stop = min(start + bucket, end)
            kept = source[start:stop]
            given = gradient[start:stop]
            for i in range(len(kept)):
                totals[i] = kept[i] + given[i] if feeds else kept[i]
            for i in range(len(kept), bucket):
                totals[i] = 0
            norms[number] = _norm(totals, patterns, mask, squares, order, stack, limit)
            drawn = draws[next_draw : next_draw + len(kept)]
            into = codes[waiting + start - begin : waiting + stop - begin]
            _levels(totals, drawn, chances, norms[number], one, bits, into)
            if feeds:
                for i in range(len(kept)):
                    kept[i] = totals[i]
            next_draw += bucket
            number += 1
        ready = waiting + end - begin
        for j in range(ready // 8):
            eight = _squeezed(eights[j], bits)
            word |= eight << np.uint64(filled)
            filled += 8 * bits
            if filled >= 64:
                words[position] = word
                position += 1
                filled -= 64
                word = eight >> np.uint64(8 * bits - filled) if filled else np.uint64(0)
        waiting = ready % 8
        for i in range(8):
            codes[i] = codes[ready - waiting + i] if i < waiting else np.uint8(0)
    if waiting:
        eight = _squeezed(eights[0], bits)
        word |= eight << np.uint64(filled)
        if filled + waiting * bits > 64:
            words[position] = word
            position += 1
            word = eight >> np.uint64(64 - filled)
            filled -= 64
        filled += waiting * bits
    if filled:
        words[position] = word


@compiled
def _norm(totals: Array, patterns: Array, mask: Any, squares: Array, order: Any, stack: Array, limit: Any) -> float:
    """Return the 2-norm of all totals but the last, at most `limit`.

    Scaled by the largest magnitude, so that no square overflows or vanishes. That is found by its bits, because the
    compiler vectorises a largest integer, not a largest float; the last total, a place to spare, makes a float of it.
    """
    top = patterns[0] & mask
    for i in range(len(squares)):
        top = max(top, patterns[i] & mask)
    patterns[len(squares)] = top
    peak = np.float64(totals[len(squares)])
    divisor = peak if peak > 0 else 1.0
    for i in range(len(squares)):
        scaled = np.float64(totals[i]) / divisor
        squares[i] = scaled * scaled
    norm = peak * np.sqrt(_pairwise(squares, order[0], order[1], stack[8:], stack[:8]))
    return float(min(norm, np.float64(limit)))


@compiled
def _levels(totals: Array, drawn: Array, chances: Array, norm: Any, one: Any, bits: int, codes: Bytes) -> None:
    """Write the codes of one bucket, and leave in `totals` what they miss."""
    zero = one - one
    unit = one * np.float32(2.0**-24) if totals.itemsize == 4 else one * np.float32(2.0**-53)
    unused = totals.itemsize * 8 - (24 if totals.itemsize == 4 else 53)
    levels = one * np.float32((1 << (bits - 1)) - 1)
    scale = norm if norm > zero else one
    minus = np.uint8(1 << (bits - 1))
    for i in range(len(codes)):
        chances[i] = drawn[i] >> unused
    for i in range(len(codes)):
        total = totals[i]
        exact = abs(total) / scale * levels
        level = np.floor(exact)
        # Compared, not added and cut off: a level that is exact stays exact.
        level += one if chances[i] * unit < exact - level else zero
        # Zero has one code: a minus without a level would be a second one.
        codes[i] = np.uint8(level) | (minus if (total < zero) & (level > zero) else np.uint8(0))
        part = level / levels * norm
        totals[i] = total + part if total < zero else total - part


@compiled
def _read(norms: Array, data: Bytes, bits: int, bucket: int, one: Any, out: Array) -> bool:
    """Return whether no code was minus zero."""
    codes = np.empty(TILE, np.uint8)
    eights = codes.view(np.uint64)
    top = np.uint8(1 << (bits - 1))
    found = np.uint8(0)
    number, left = 0, 0
    for start in range(0, len(out), TILE):
        stop = min(start + TILE, len(out))
        for j in range(-(-(stop - start) // 8)):
            at = (start // 8 + j) * bits
            eight = np.uint64(0)
            for b in range(min(bits, len(data) - at)):
                eight |= np.uint64(data[at + b]) << np.uint64(8 * b)
            eights[j] = _spread(eight, bits)
        begin = start
        while begin < stop:
            if left == 0:
                left = bucket
                number += 1
            end = min(begin + left, stop)
            found |= _values(codes[begin - start : end - start], norms[number - 1], one, top, out[begin:end])
            left -= end - begin
            begin = end
    return bool(found == 0)


@compiled
def _values(codes: Bytes, norm: Any, one: Any, top: Any, out: Array) -> Any:
    """Write the values of some codes of one bucket; return 1 if one of them is minus zero."""
    levels = one * np.float32(top - 1)
    found = np.uint8(0)
    for i in range(len(out)):
        level = codes[i] & (top - np.uint8(1))
        out[i] = level
        found |= codes[i] == top
    for i in range(len(out)):
        value = out[i] / levels * norm
        out[i] = -value if codes[i] > top else value
    return found
