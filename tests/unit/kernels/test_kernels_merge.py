"""Sparse vectors: their sum, and the way to and from dense ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctk.kernels.merge import merge, not_in, scatter, scatter_add, take

few = settings(deadline=None, max_examples=60)
floats = st.sampled_from([0.0, -0.0, 1.0, -1.5, 3e38, -3e38, 1e-45, 7.25])
sparse = st.dictionaries(st.integers(0, 40), floats, max_size=30)
dtypes = st.sampled_from(["float32", "float64"])


def lists(vector, dtype="float32", index="int32"):
    indices = sorted(vector)
    return np.array(indices, index), np.array([vector[i] for i in indices], dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@few
@given(sparse, sparse, dtypes, st.sampled_from(["int32", "int64"]))
def test_a_merge_is_the_sum(a, b, dtype, index):
    kind = np.dtype(dtype).type
    with np.errstate(over="ignore"):
        expected = {
            i: kind(a[i]) + kind(b[i]) if i in a and i in b else a.get(i, b.get(i)) for i in a.keys() | b.keys()
        }
    indices, values = merge(*lists(a, dtype, index), *lists(b, dtype, index))
    assert same_bits(indices, lists(expected, dtype, index)[0])
    assert same_bits(values, lists(expected, dtype, index)[1])


def test_a_merge_leaves_its_arguments_alone_and_keeps_the_sign_of_zero():
    a = np.array([1, 3], np.int32), np.array([-0.0, 2], np.float32)
    b = np.array([2], np.int32), np.array([-0.0], np.float32)
    before = [array.copy() for array in (*a, *b)]
    _, values = merge(*a, *b)
    assert np.signbit(values).tolist() == [True, True, False]
    assert all(same_bits(x, y) for x, y in zip(before, (*a, *b), strict=True))


def test_lists_that_do_not_belong_together_are_refused():
    index, value = np.arange(2, dtype=np.int32), np.ones(2, np.float32)
    with pytest.raises(ValueError, match="2 indices, but 1 values"):
        merge(index, value[:1], index, value)
    with pytest.raises(ValueError, match="2 indices, but 1 values"):
        merge(index, value, index, value[:1])
    with pytest.raises(ValueError, match="float32 with int32/float64"):
        merge(index, value, index, value.astype(np.float64))
    with pytest.raises(ValueError, match="int32/float32 with int64"):
        merge(index, value, index.astype(np.int64), value)
    for operation in (scatter, scatter_add):
        with pytest.raises(ValueError, match="2 indices, but 1 values"):
            operation(np.zeros(3, np.float32), index, value[:1])


@few
@given(sparse, sparse)
def test_not_in(a, b):
    indices, kept = lists(a)[0], lists(b)[0]
    mask = not_in(indices, kept)
    assert mask.dtype == np.bool_
    assert mask.tolist() == [i not in b for i in indices]


@few
@given(sparse, st.integers(41, 50), dtypes)
def test_scatter_and_take(vector, n, dtype):
    indices, values = lists(vector, dtype)
    dense = np.full(n, 1.25, dtype)
    expected = dense.copy()
    expected[indices] += values
    scatter_add(dense, indices, values)
    assert same_bits(dense, expected)
    scatter(dense, indices, values)
    expected[indices] = values
    assert same_bits(dense, expected)
    assert same_bits(take(dense, indices), values)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64", "float32", "float64"])
def test_scatter_and_take_move_any_bits(kind):
    dense = np.zeros(5, kind)
    indices = np.array([1, 4], np.int64)
    scatter(dense, indices, np.array([7, 9], kind))
    assert dense.tolist() == [0, 7, 0, 0, 9]
    assert take(dense, indices).tolist() == [7, 9]


def test_a_duplicate_index_adds_twice():
    dense = np.zeros(2, np.float32)
    scatter_add(dense, np.array([1, 1], np.int32), np.array([1, 2], np.float32))
    assert dense.tolist() == [0, 3]


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1, -(2**31)])
def test_an_index_outside_is_named_and_nothing_is_written(bad, index):
    around = np.zeros(12, np.float32)
    dense = around[4:8]
    indices, values = np.array([0, bad], index), np.ones(2, np.float32)
    for operation in (lambda: scatter(dense, indices, values), lambda: scatter_add(dense, indices, values)):
        with pytest.raises(IndexError, match=f"index {bad} is outside an array of length 4"):
            operation()
        assert not around.any()
    with pytest.raises(IndexError, match=f"index {bad} is outside an array of length 4"):
        take(dense, indices)


def test_nothing_into_nothing():
    nothing, index = np.empty(0, np.float32), np.empty(0, np.int32)
    scatter(nothing, index, nothing)
    scatter_add(nothing, index, nothing)
    assert len(take(nothing, index)) == len(not_in(index, index)) == 0
    assert [len(part) for part in merge(index, nothing, index, nothing)] == [0, 0]
    with pytest.raises(IndexError, match="index 0 is outside an array of length 0"):
        take(nothing, np.zeros(1, np.int32))
