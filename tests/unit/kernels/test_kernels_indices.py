"""Ascending indices in few bits: there and back, the promised size, and bytes nobody wrote."""

from math import comb, log2

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctk.kernels.packing import index_dtype, pack_indices, packed_bytes, unpack_indices

few = settings(deadline=None, max_examples=100)


def there_and_back(indices, n):
    data = pack_indices(indices, n)
    assert data.dtype == np.uint8
    assert len(data) == packed_bytes(len(indices), n)
    back = unpack_indices(data, len(indices), n)
    assert back.dtype == index_dtype(n)
    assert back.tolist() == indices.tolist()
    return data


@few
@given(st.data(), st.integers(0, 200), st.sampled_from(["int32", "int64"]))
def test_there_and_back(data, n, dtype):
    chosen = data.draw(st.sets(st.integers(0, n - 1))) if n else set()
    there_and_back(np.array(sorted(chosen), dtype), n)


@few
@given(st.sampled_from([2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**62]), st.data())
def test_there_and_back_in_huge_tensors(n, data):
    chosen = data.draw(st.sets(st.integers(0, n - 1) | st.integers(n - 5, n - 1), max_size=20))
    there_and_back(np.array(sorted(chosen), np.int64), n)


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 1000])
def test_none_all_first_and_last(n):
    for indices in ([], range(n), [0], [n - 1]):
        there_and_back(np.array(indices, np.int32), n)


def test_every_choice_of_a_small_tensor_has_its_own_bytes():
    n = 9
    for k in range(n + 1):
        written = set()
        for number in range(2**n):
            indices = np.flatnonzero([number >> i & 1 for i in range(n)]).astype(np.int32)
            if len(indices) == k:
                written.add(there_and_back(indices, n).tobytes())
        assert len(written) == comb(n, k)


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01, 0.001])
def test_the_size_is_near_the_limit_of_information(density):
    n = 1_000_000
    k = int(n * density)
    bits = 8 * packed_bytes(k, n) / k
    limit = -log2(density) - (1 - density) / density * log2(1 - density)
    assert limit < bits < limit + 1.1
    if density == 0.01:
        assert bits / 8 < 1.08
    indices = np.sort(np.random.default_rng(0).choice(n, k, replace=False)).astype(np.int32)
    there_and_back(indices, n)


@few
@given(st.integers(1, 40), st.data())
def test_bytes_that_nobody_wrote_are_refused(n, data):
    k = data.draw(st.integers(0, n))
    noise = np.frombuffer(data.draw(st.binary(min_size=packed_bytes(k, n), max_size=packed_bytes(k, n))), np.uint8)
    try:
        indices = unpack_indices(noise, k, n)
    except ValueError:
        return
    assert pack_indices(indices, n).tobytes() == noise.tobytes()


@few
@given(st.integers(2, 200), st.data())
def test_every_flipped_bit_gives_other_indices_or_an_error(n, data):
    chosen = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    indices = np.array(sorted(chosen), np.int32)
    packed = pack_indices(indices, n)
    assume(len(packed))
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[bit // 8] ^= 1 << bit % 8
    try:
        back = unpack_indices(packed, len(indices), n)
    except ValueError:
        return
    assert back.tolist() != indices.tolist()
    assert (np.diff(back) > 0).all()
    assert 0 <= back[0] <= back[-1] < n


def test_what_is_wrong_is_an_error():
    n, indices = 100, np.array([3, 40, 41, 99], np.int32)
    packed = pack_indices(indices, n)
    # l = 4: two bytes of low parts; then 4 + (99 >> 4) = 10 bits, six of padding.
    assert len(packed) == 4
    for wrong, words in [
        (packed[:-1], "4 bytes, not 3"),
        (np.append(packed, np.uint8(0)), "4 bytes, not 5"),
        (packed | np.array([0, 0, 0, 128], np.uint8), "not zero"),
        (packed | np.array([0, 0, 255, 0], np.uint8), "not 4 ascending"),
        (packed & np.array([255, 255, 0, 255], np.uint8), "not 4 ascending"),
    ]:
        with pytest.raises(ValueError, match=words):
            unpack_indices(wrong, 4, n)
    same_twice = packed.copy()
    same_twice[1] = (same_twice[1] & 0xF0) | 8  # 40 = 2*16 + 8 and now 41 is 2*16 + 8 too
    with pytest.raises(ValueError, match="ascending"):
        unpack_indices(same_twice, 4, n)
    too_large = packed.copy()
    too_large[1] |= 0xF0  # 6*16 + 15 = 111
    with pytest.raises(ValueError, match="below 100"):
        unpack_indices(too_large, 4, n)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([1, 1], "number 1 is 1 after 1"),
        ([2, 1], "number 1 is 1 after 2"),
        ([-1, 1], "number 0 is -1"),
        ([1, 10], "number 1 is 10 after 1"),
    ],
)
def test_indices_that_cannot_be_written_are_refused(indices, words):
    with pytest.raises(ValueError, match=words):
        pack_indices(np.array(indices, np.int32), 10)


def test_more_indices_than_elements():
    for call in (
        lambda: pack_indices(np.arange(3, dtype=np.int32), 2),
        lambda: packed_bytes(3, 2),
        lambda: packed_bytes(-1, 2),
        lambda: unpack_indices(np.zeros(1, np.uint8), 3, 2),
    ):
        with pytest.raises(ValueError, match="different indices below 2"):
            call()


def test_int64_only_where_it_is_needed():
    assert index_dtype(2**31) == np.int32
    assert index_dtype(2**31 + 1) == np.int64
