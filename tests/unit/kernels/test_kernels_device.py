"""The torch operations for tensors on a device give what the compiled kernels give, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hpctk.kernels import device, merge, packing, select

few = settings(deadline=None, max_examples=60)
# All of them are numbers of float32, too: numpy 1 takes no other for its arrays.
values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0**-149, -(2.0**-149), 2.0**126, -(2.0**126), 7.0, -9.0])
arrays = npst.arrays(st.sampled_from(["float32", "float64"]), st.integers(0, 120), elements=values)
HALVES = [torch.float16, torch.bfloat16]


def same(tensor, array):
    return tensor.numpy().tobytes() == array.tobytes()


@few
@given(arrays, st.integers(0, 130))
def test_top_k(array, k):
    chosen = device.top_k(torch.from_numpy(array), k)
    expected = select.top_k(array.view(f"u{array.itemsize}"), k)
    assert chosen.dtype == torch.int32
    assert same(chosen, expected)


@few
@given(st.integers(0, 2**32 - 1), st.integers(0, 200), st.integers(0, 130), st.sampled_from(HALVES))
def test_top_k_of_halves(seed, n, k, dtype):
    tensor = torch.from_numpy(np.random.default_rng(seed).normal(size=n)).to(dtype)
    pattern = tensor.view(torch.int16).numpy().view(np.uint16)
    assert same(device.top_k(tensor, k), select.top_k(pattern, k))


def test_a_negative_k_is_refused():
    with pytest.raises(ValueError, match="k=-1"):
        device.top_k(torch.zeros(4), -1)


@few
@given(st.dictionaries(st.integers(0, 40), values, max_size=30), st.sampled_from(["int32", "int64"]))
def test_scatter_add(vector, index):
    indices = np.array(sorted(vector), index)
    numbers = np.array([vector[i] for i in sorted(vector)], np.float32)
    here, there = np.full(41, -0.0, np.float32), torch.full((41,), -0.0)
    merge.scatter_add(here, indices, numbers)
    device.scatter_add(there, torch.from_numpy(indices), torch.from_numpy(numbers))
    assert same(there, here)


def test_scatter_refuses_what_the_compiled_one_refuses():
    dense = torch.zeros(4)
    for bad in (-1, 4):
        with pytest.raises(IndexError, match=f"index {bad} is outside an array of length 4"):
            device.scatter_add(dense, torch.tensor([0, bad]), torch.ones(2))
    with pytest.raises(ValueError, match="2 indices, but 3 values"):
        device.scatter_add(dense, torch.tensor([0, 1]), torch.ones(3))
    assert not dense.any()


@few
@given(arrays, st.floats(0, 100))
def test_signs(array, scale):
    n = len(array)
    packed = device.pack_signs(torch.from_numpy(array))
    assert packed.dtype == torch.uint8
    assert same(packed, packing.pack_signs(array))
    dtype = torch.float32 if array.dtype == np.float32 else torch.float64
    assert same(
        device.unpack_signs(packed, n, scale, dtype), packing.unpack_signs(packed.numpy(), n, scale, array.dtype)
    )
    here, there = np.full(n, 0.3, array.dtype), torch.full((n,), 0.3, dtype=dtype)
    packing.add_signs(packed.numpy(), n, scale, here)
    device.add_signs(packed, n, scale, there)
    assert same(there, here)


@pytest.mark.parametrize("dtype", HALVES)
def test_signs_of_halves(dtype):
    tensor = torch.tensor([1, -2, 0.0, -0.0, 3, -4, -5, -6, -7], dtype=dtype)
    packed = device.pack_signs(tensor)
    assert packed.tolist() == [0b11100010, 1]
    assert device.unpack_signs(packed, 9, 2.0, dtype).tolist() == [2, -2, 2, 2, 2, -2, -2, -2, -2]


def test_signs_refused():
    byte = torch.zeros(1, dtype=torch.uint8)
    for call, words in [
        (lambda: device.unpack_signs(byte, 9, 1.0, torch.float32), "2 bytes, not 1"),
        (lambda: device.unpack_signs(byte + 128, 7, 1.0, torch.float32), "not zero"),
        (lambda: device.add_signs(byte, 8, 1.0, torch.zeros(7)), "8 signs cannot be added to 7"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
