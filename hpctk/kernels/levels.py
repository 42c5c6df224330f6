"""QSGD's rounding to a few levels of each bucket's norm, with its random numbers, from values to packed bits and back.

Two passes: the norm of every bucket, which finds what is not finite before anything is written; then block by block, in
a core's cache: the random words of the block, levels and what they miss, and the block's codes into bits. Values and
gradient are summed in both: adding again costs less than writing down. The same bits as the steps in numpy that
`compressors.qsgd` takes for half precision:

- random words are those of `numpy.random.Philox`, which any counter gives without those before it: number w is word
  w % 4 of counter w // 4 + 1. A float64 takes one word, two float32 share one, the lower half first; each block of
  buckets starts at a new word;
- squares are summed in numpy's order, pairwise: a sequence of leaves of at most 128, as `leaves` writes it down;
- quotients are those of a division. Where the processor multiplies and adds in one rounding, that gives them sooner.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctk.kernels.compiled import compiled, intrinsic, ir, types
from hpctk.kernels.packing import check_packed, packed_length
from hpctk.kernels.select import INFINITY, NotFinite, first_not_finite
from hpctk.kernels.threads import WORTH_A_THREAD, share, spans

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

#: Elements read or written together: a multiple of 8 that stays in the fastest cache.
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
    it stays in the source, in place. Raise NotFinite if a value is inf or NaN; nothing is changed then.

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
    per_word = 8 // kind.itemsize
    block_words = -(-block // per_word)
    together = max(1, TILE // bucket) * bucket
    # From a multiple of four on, and eight counters at once.
    random_words = -(-(together // per_word + 5) // 32) * 32
    given = source if gradient is None else gradient
    measured, written = [], []
    for lo, hi in _parts(n, block, threads):
        random = np.empty(random_words, np.uint64)
        totals = np.empty(bucket + 1, kind)
        # Constants are of the values' own dtype: with any other, numba would compute in float64.
        shares = source[lo:hi], given[lo:hi], gradient is not None, norms[lo // bucket : -(-hi // bucket)]
        sums = totals, totals.view(unsigned), unsigned.type(np.iinfo(unsigned).max >> 1), INFINITY[kind.char]
        measured.append((*shares, sums, leaves(bucket), kind.type(limit)))
        words_here = words[lo * bits // 64 : (hi * bits + 63) // 64]
        randomness = key, counter, random, random.view(unsigned), lo // block * block_words, block_words
        written.append((*shares, words_here, randomness, totals, (bits, bucket, block, together), kind.type(1)))
    if not all(share(_measure, measured)):
        raise NotFinite(first_not_finite(source, gradient, threads=threads))
    share(_write, written)
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

    def _fuses() -> bool: ...
    def _fused(a: Any, b: Any, c: Any) -> Any: ...

else:

    @intrinsic
    def _fuses(typing):
        """Return whether the processor that is compiled for has `_fused`: a constant."""

        def build(context, builder, signature, arguments):
            machine, _, features = context.codegen().magic_tuple()
            return ir.Constant(ir.IntType(1), machine.startswith(("aarch64", "arm64")) or "+fma" in features)

        return types.boolean(), build

    @intrinsic
    def _fused(typing, a, b, c):
        """Return a * b + c, rounded once."""

        def build(context, builder, signature, arguments):
            return builder.fma(*arguments)

        return a(a, a, a), build


@compiled
def _random_words(key: Array, counter: Array, first: int, words: Array) -> None:
    """Fill `words`, a multiple of four, with the stream's from number 4 * first on."""
    m0, m1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
    w0, w1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
    c0, c1, c2, c3 = counter[0], counter[1], counter[2], counter[3]
    k0, k1 = key[0], key[1]
    for i in range(len(words) // 4):
        a, b, c, d = c0 + np.uint64(first + i + 1), c1, c2, c3
        # Written out, so that the compiler makes several counters at once, as vectors.
        a, b, c, d = _round(a, b, c, d, k0, k1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + w0, k1 + w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(2) * w0, k1 + np.uint64(2) * w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(3) * w0, k1 + np.uint64(3) * w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(4) * w0, k1 + np.uint64(4) * w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(5) * w0, k1 + np.uint64(5) * w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(6) * w0, k1 + np.uint64(6) * w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(7) * w0, k1 + np.uint64(7) * w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(8) * w0, k1 + np.uint64(8) * w1, m0, m1)
        a, b, c, d = _round(a, b, c, d, k0 + np.uint64(9) * w0, k1 + np.uint64(9) * w1, m0, m1)
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = a, b, c, d


@compiled
def _round(a: Any, b: Any, c: Any, d: Any, k0: Any, k1: Any, m0: Any, m1: Any) -> Any:
    """Return a counter after one of Philox's ten rounds."""
    high0, low0 = _product(m0, a)
    high1, low1 = _product(m1, c)
    return high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0


@compiled
def _product(a: Any, b: Any) -> Any:
    """Return the upper and the lower 64 of the 128 bits of a product: of halves, which vectors can multiply."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    lowest = (a & low) * (b & low)
    middle = (a >> half) * (b & low) + (lowest >> half)
    other = (a & low) * (b >> half) + (middle & low)
    return (a >> half) * (b >> half) + (middle >> half) + (other >> half), (other << half) | (lowest & low)


@compiled
def _pairwise(squares: Array, lengths: Array, sums: Array, stack: Array) -> float:
    """Return the sum of squares in the order that `leaves` tells."""
    start, top = 0, 0
    # Unsigned: what might be negative would be looked up from the end, one by one.
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    five, six, seven = np.uint64(5), np.uint64(6), np.uint64(7)
    for leaf in range(len(lengths)):
        part = squares[start : start + lengths[leaf]]
        start += lengths[leaf]
        whole = len(part) // 8 * 8
        total = 0.0
        if whole:
            s0, s1, s2, s3, s4, s5, s6, s7 = part[0], part[1], part[2], part[3], part[4], part[5], part[6], part[7]
            for begin in range(8, whole, 8):
                at = np.uint64(begin)
                s0 += part[at]
                s1 += part[at + one]
                s2 += part[at + two]
                s3 += part[at + three]
                s4 += part[at + four]
                s5 += part[at + five]
                s6 += part[at + six]
                s7 += part[at + seven]
            total = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
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
def _measure(source: Array, gradient: Array, feeds: bool, norms: Array, sums: Any, order: Any, limit: Any) -> bool:
    """Write the 2-norm of each bucket, at most `limit`; return whether all values are finite, else stop.

    Scaled by the largest magnitude, so that no square overflows or vanishes. That is found by its bits, because the
    compiler vectorises a largest integer, not a largest float; the last total, a place to spare, makes a float of it.
    """
    totals, patterns, mask, infinity = sums
    bucket = len(totals) - 1
    squares, stack = np.empty(bucket), np.empty(len(order[0]) + 1)
    for number in range(len(norms)):
        kept = source[number * bucket : (number + 1) * bucket]
        given = gradient[number * bucket : (number + 1) * bucket]
        for i in range(len(kept)):
            totals[i] = kept[i] + given[i] if feeds else kept[i]
        for i in range(len(kept), bucket):
            totals[i] = 0
        top = patterns[0] & mask
        for i in range(bucket):
            top = max(top, patterns[i] & mask)
        if top >= infinity:
            return False
        patterns[bucket] = top
        peak = np.float64(totals[bucket])
        divisor = peak if peak > 0 else 1.0
        if totals.itemsize == 4 and _fuses():
            # Correctly rounded. The remainder of the first quotient is exact. The second misses the true one by 2^-104
            # of it at most, and that of two float32 is at least 2^-78 of itself away from where rounding changes.
            inverse = 1.0 / divisor
            for i in range(bucket):
                total = np.float64(totals[i])
                scaled = total * inverse
                scaled = _fused(_fused(-scaled, divisor, total), inverse, scaled)
                squares[i] = scaled * scaled
        else:
            for i in range(bucket):
                scaled = np.float64(totals[i]) / divisor
                squares[i] = scaled * scaled
        norms[number] = min(peak * np.sqrt(_pairwise(squares, order[0], order[1], stack)), np.float64(limit))
    return True


@compiled
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
    key, counter, random, draws, first_word, block_words = randomness
    bits, bucket, size, together = sizes
    per_word = 8 // draws.itemsize
    chances = np.empty(bucket, source.dtype)
    # Codes wait here until eight are together, so there is room for seven of the buckets before.
    codes = np.zeros(together // 8 * 8 + 16, np.uint8)
    eights = codes.view(np.uint64)
    waiting, number = 0, 0
    word, filled, position = np.uint64(0), 0, 0
    for begin in range(0, len(source), size):
        limit = min(begin + size, len(source))
        for lo in range(begin, limit, together):
            hi = min(lo + together, limit)
            next_draw = first_word * per_word + lo - begin
            counted = next_draw // per_word // 4
            _random_words(key, counter, counted, random)
            next_draw -= 4 * counted * per_word
            for start in range(lo, hi, bucket):
                stop = min(start + bucket, hi)
                kept = source[start:stop]
                given = gradient[start:stop]
                for i in range(len(kept)):
                    totals[i] = kept[i] + given[i] if feeds else kept[i]
                drawn = draws[next_draw : next_draw + len(kept)]
                into = codes[waiting + start - lo : waiting + stop - lo]
                _levels(totals, drawn, chances, norms[number], one, bits, into)
                if feeds:
                    for i in range(len(kept)):
                        kept[i] = totals[i]
                next_draw += bucket
                number += 1
            ready = waiting + hi - lo
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
        first_word += block_words
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
def _levels(totals: Array, drawn: Array, chances: Array, norm: Any, one: Any, bits: int, codes: Bytes) -> None:
    """Write the codes of one bucket, and leave in `totals` what they miss."""
    zero = one - one
    unit = one * np.float32(2.0**-24) if totals.itemsize == 4 else one * np.float32(2.0**-53)
    unused = totals.itemsize * 8 - (24 if totals.itemsize == 4 else 53)
    levels = one * np.float32((1 << (bits - 1)) - 1)
    inverse = one / levels
    scale = norm if norm > zero else one
    minus = np.uint8(1 << (bits - 1))
    for i in range(len(codes)):
        # 24 bits are few enough for the quicker conversion.
        chances[i] = np.int32(drawn[i] >> unused) if totals.itemsize == 4 else drawn[i] >> unused
    for i in range(len(codes)):
        total = totals[i]
        exact = abs(total) / scale * levels
        level = np.floor(exact)
        # Compared, not added and cut off: a level that is exact stays exact.
        level += one if chances[i] * unit < exact - level else zero
        # Zero has one code: a minus without a level would be a second one.
        codes[i] = np.uint8(level) | (minus if (total < zero) & (level > zero) else np.uint8(0))
        share = level * inverse if _fuses() else level / levels
        if _fuses():
            # The quotient, correctly rounded: so it is for all numbers of levels that there are.
            share = _fused(_fused(-share, levels, level), inverse, share)
        part = share * norm
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
