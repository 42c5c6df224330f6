"""Kernels of Sign, Half, QSGD and PowerSGD, which go through whole tensors: the same for any number of threads."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import ROOT, clean_environment

from hpctk.kernels import halves, levels, packing, select, signs, sums, thin, updates
from hpctk.kernels.in_order import add_pairwise

FLOATS = [np.float32, np.float64]
SIZES = [0, 1, 7, 2048, 2049, 65_537, 300_001, 700_000]
WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def pair(n, dtype):
    source = np.random.default_rng(n)
    return source.standard_normal(n).astype(dtype), source.standard_normal(n).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", SIZES)
def test_signs_of_a_sum(n, dtype):
    residual, gradient = pair(n, dtype)
    total = residual + gradient
    norm = updates.sum_of_magnitudes(total)
    for threads in (1, 2, 3):
        assert signs.sum_of_magnitudes(residual, gradient, threads=threads) == norm
        left, packed = residual.copy(), np.full(packing.packed_length(n, 1), 255, np.uint8)
        signs.take_signs(left, gradient, 0.3, packed, threads=threads)
        assert packed.tobytes() == packing.pack_signs(total).tobytes()
        expected = total.copy()
        packing.add_signs(packed, n, -0.3, expected)
        assert left.tobytes() == expected.tobytes()


def test_a_sum_that_is_not_finite_has_no_finite_norm():
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 250_000, 299_999):
            residual, gradient = pair(300_000, np.float32)
            gradient[place] = bad
            assert not np.isfinite(signs.sum_of_magnitudes(residual, gradient))


def test_lengths_that_do_not_fit_are_refused():
    a, b = np.ones(8, np.float32), np.ones(9, np.float32)
    with pytest.raises(ValueError, match="a gradient of 9 x float32"):
        signs.sum_of_magnitudes(a, b)
    with pytest.raises(ValueError, match="8 signs fill 1 bytes, not 2"):
        signs.take_signs(a, a.copy(), 1.0, np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="arrays of 8 and 9 and 8 elements"):
        halves.feed(a, b, "float16", 1.0)
    stream = np.zeros(2, np.uint64), np.zeros(4, np.uint64)
    with pytest.raises(ValueError, match="a gradient of 9 x float32"):
        levels.write(a, b, 4, 8, 8, 1.0, *stream)
    with pytest.raises(ValueError, match="1 x float32 norms for 9 x float32"):
        levels.read(a[:1], np.zeros(5, np.uint8), 4, 8, b)


def every_exponent(dtype):
    """Finite float32 of every exponent and of many fractions, those half way between two halves too."""
    some = np.arange(0, 2**32, 4093, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(2**19, dtype=np.uint64) << np.uint64(13)).astype(np.uint32)
    with np.errstate(all="ignore"):
        values = np.concatenate([some, ties, ties | np.uint32(0x1000), ties | np.uint32(0x1001)]).view(np.float32)
        values = values[np.isfinite(values)].astype(dtype)
        if dtype is np.float64:
            values = np.concatenate([values, values * (1 + 1e-9), values * (1 - 1e-9)])
    return values


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wire", WIRES)
def test_halves_round_as_torch_does(wire, dtype):
    values = every_exponent(dtype)
    limit = torch.finfo(WIRES[wire]).max
    expected = torch.from_numpy(values).clamp(-limit, limit).to(WIRES[wire])
    for threads in (1, 2, 3):
        written = halves.write(values, wire, limit, threads=threads)
        assert written.tobytes() == expected.view(torch.uint16).numpy().tobytes()
        left = values.copy()
        zeros = np.full_like(values, -0.0)
        assert halves.feed(left, zeros, wire, limit, threads=threads).tobytes() == written.tobytes()
        back = np.empty_like(values)
        halves.read(written, wire, back, threads=threads)
        assert back.tobytes() == expected.to(torch.from_numpy(values).dtype).numpy().tobytes()
        assert left.tobytes() == (values + zeros - back).tobytes()


def by_instructions():
    """Return a digest of what kernels compute by instructions that not every processor has."""
    values = every_exponent(np.float32)
    left = values.copy()
    arrays = [halves.write(values, "float16", 65504), halves.feed(left, values, "float16", 65504), left]
    stream = np.array([1, 2], np.uint64), np.zeros(4, np.uint64)
    for bits in (2, 4, 8):
        residual, gradient = pair(10_001, np.float32)
        arrays += [levels.write(residual, gradient, bits, 300, 6000, 1e30, *stream), residual]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def test_processors_without_these_instructions_come_to_the_same_bits():
    program = f"import {Path(__file__).stem} as test; print(test.by_instructions())"
    path = f"{Path(__file__).parent}:{ROOT}:{ROOT}/tests/support"
    environment = clean_environment(PYTHONPATH=path, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == by_instructions(), done.stderr[-3000:]


@pytest.mark.parametrize("wire", WIRES)
def test_all_halves_are_read(wire):
    patterns, values = np.arange(2**16, dtype=np.uint16), np.empty(2**16, np.float32)
    halves.read(patterns, wire, values)
    np.testing.assert_array_equal(values, torch.from_numpy(patterns).view(WIRES[wire]).float().numpy())


@pytest.mark.parametrize("n", [1, 7, 8, 9, 128, 129, 136, 512, 1000, 4096, 70_001])
def test_leaves_are_summed_in_numpys_order(n):
    squares = np.random.default_rng(n).random(n)
    lengths, joined = levels.leaves(n)
    assert lengths.sum() == n
    assert levels._pairwise(squares, lengths, joined, np.empty(len(lengths) + 1)) == add_pairwise(squares[None])[0]


@pytest.mark.parametrize("first", [0, 2, 1000])
def test_random_words_are_philoxs(first):
    key, counter = np.array([2**64 - 1, 12345], np.uint64), np.array([0, 0, 7, 3], np.uint64)
    words = np.empty(32, np.uint64)
    levels._random_words(key, counter, first, words)
    stream = np.random.Philox(counter=counter, key=key)
    stream.random_raw(4 * first, output=False)
    assert words.tolist() == stream.random_raw(32).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("bits", "bucket"), [(2, 7), (4, 512), (5, 100), (8, 1), (8, 70_000)])
def test_levels_do_not_depend_on_threads(bits, bucket, dtype):
    n, block = 600_001, max(1, 65_536 // bucket) * bucket
    residual, gradient = pair(n, dtype)
    stream = np.array([1, 2], np.uint64), np.array([0, 0, 3, 4], np.uint64)
    seen = set()
    for threads in (1, 2, 3):
        left = residual.copy()
        data = levels.write(left, gradient, bits, bucket, block, 1e30, *stream, threads=threads)
        assert levels.write(residual + gradient, None, bits, bucket, block, 1e30, *stream).tobytes() == data.tobytes()
        head = -(-n // bucket) * residual.itemsize
        out = np.empty(n, dtype)
        levels.read(data[:head].copy().view(dtype), data[head:], bits, bucket, out, threads=threads)
        assert left.tobytes() == (residual + gradient - out).tobytes()
        seen.add((data.tobytes(), left.tobytes()))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_every_level_is_that_of_a_division(bits, dtype):
    n, top = 4000, (1 << (bits - 1)) - 1
    residual = np.linspace(-1, 1, n).astype(dtype)
    total, stream = residual.copy(), (np.array([1, 2], np.uint64), np.zeros(4, np.uint64))
    # A norm of at most 1, so that the largest reaches the highest level.
    data = levels.write(residual, np.zeros(n, dtype), bits, n, n, 1.0, *stream)
    codes = np.empty(n, np.uint8)
    packing.unpack(data[residual.itemsize :], bits, codes)
    assert sorted(set(codes & top)) == list(range(top + 1))
    values = (codes & top).astype(dtype) / dtype(top)
    assert residual.tobytes() == (total - np.where(codes > top, -values, values)).tobytes()


@pytest.mark.parametrize("place", [0, 777, 400_000])
def test_levels_of_what_is_not_finite_are_refused(place):
    residual, gradient = pair(400_001, np.float32)
    gradient[place] = np.inf
    before = residual.copy()
    with pytest.raises(select.NotFinite, match=f"element {place} "):
        levels.write(residual, gradient, 4, 512, 1 << 16, 1.0, np.zeros(2, np.uint64), np.zeros(4, np.uint64))
    assert residual.tobytes() == before.tobytes()


@pytest.mark.parametrize("place", [0, 5, 400_000])
def test_minus_zero_is_found_wherever_it_is(place):
    codes = np.zeros(400_001, np.uint8)
    codes[place] = 0b1000
    with pytest.raises(ValueError, match="minus zero"):
        levels.read(np.ones(782, np.float32), packing.pack(codes, 4), 4, 512, np.empty(len(codes), np.float32))


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (8, 5), (9, 2050), (701, 523)], ids=str)
def test_thin_products_are_summed_one_after_the_other(shape, columns):
    source = np.random.default_rng(1)
    matrix = source.standard_normal(shape).astype(np.float32)
    right, left = (source.standard_normal((length, columns)).astype(np.float32) for length in shape[::-1])
    product, other = np.zeros((shape[0], columns), np.float32), np.zeros((shape[1], columns), np.float32)
    for j in range(shape[1]):
        product += matrix[:, j, None] * right[j]
    for i in range(shape[0]):
        other += matrix[i, :, None] * left[i]
    for threads in (1, 2, 3):
        assert thin.times(matrix, right, threads=threads).tobytes() == product.tobytes()
        assert thin.transposed_times(matrix, left, threads=threads).tobytes() == other.tobytes()


def test_sums_below_a_limit():
    a, b = pair(500_000, np.float32)
    limit = float(np.abs(a + b).max())
    assert not sums.all_below(a, b, limit)
    assert sums.all_below(a, b, float(np.nextafter(np.float32(limit), np.float32(np.inf))))
    total = a + b
    sums.add(a, b)
    assert a.tobytes() == total.tobytes()
    a[499_999] = np.nan
    assert not sums.all_below(a, b, np.inf)
