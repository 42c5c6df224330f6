"""Trees in HDF5: everything comes back as it was, bit for bit; what cannot is refused by name."""

import json
import math
import random
from collections import Counter, OrderedDict

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctk.checkpoint import tree
from hpctk.errors import HpctkError, SettingError


def back(value, *path):
    """Write a tree into a file in memory and read it again."""
    writer = tree.Writer()
    structure = json.dumps(writer.encode({"root": value}))
    with h5py.File("tree.h5", "w", driver="core", backing_store=False) as file:
        tree.put(file, structure, writer.arrays)
        return tree.read(file, "root", *path)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors(dtype, shape):
    tensor = (torch.arange(math.prod(shape)).reshape(shape) - 2).to(dtype)
    found = back(tensor)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert bytes(found.untyped_storage()) == bytes(tensor.untyped_storage())


def test_tensors_of_any_layout():
    whole = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (whole.transpose(0, 2), whole[:, ::2], whole[..., 1], torch.ones(1).expand(5)):
        assert torch.equal(back(tensor), tensor)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not back(parameter).requires_grad
    complex_view = torch.complex(whole, whole).conj()
    assert torch.equal(back(complex_view), complex_view.resolve_conj())


def test_dense_tensors_lie_as_they_did():
    """Fused optimizers walk through memory: momenta must lie as their parameters do."""
    for tensor in (
        torch.arange(48.0).reshape(2, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(2, 3).T,
    ):
        found = back(tensor)
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()
    # What has gaps, or elements in one place, is not worth them.
    assert back(torch.arange(24.0).reshape(4, 6)[:, ::2]).is_contiguous()


def test_nan_payloads_and_signed_zeros_survive():
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, 1], dtype=torch.int64).to(torch.int32)
    assert torch.equal(back(bits.view(torch.float32)).view(torch.int32), bits)


def test_containers_keep_types_and_order():
    value = {
        "b": 1, "a": [1, (2, None), {"x": True}], 3: "number", "": {}, "nested": {"": torch.ones(1)},
        "counter": Counter(rounds=3), "big": 2**70, "text": "ü\n\0/%", "list": [], "tuple": (),
    }  # fmt: skip
    found = back(value)
    assert list(found) == list(value)
    assert isinstance(found["counter"], Counter)
    assert found["counter"]["absent"] == 0
    assert found["a"][1] == (2, None)
    assert found["a"][2]["x"] is True
    assert torch.equal(found.pop("nested")[""], torch.ones(1))
    value.pop("nested")
    assert found == value
    assert type(back(OrderedDict(a=1))) is dict


def test_generators_states():
    state = random.getstate()
    assert back(state) == state
    kind, keys, *rest = back(np.random.get_state())
    wanted = np.random.get_state()
    assert [kind, *rest] == [wanted[0], *wanted[2:]]
    np.testing.assert_array_equal(keys, wanted[1])


@given(st.floats(allow_nan=False))
@settings(max_examples=50, deadline=None)
def test_floats_come_back_bit_for_bit(x):
    assert math.copysign(1, back(x)) == math.copysign(1, x)
    assert back(x) == x


def test_nan_comes_back():
    assert math.isnan(back(math.nan))


@pytest.mark.parametrize("name", ["a/b", "a.b", ".", "..", "%", "%2F", "structure", " ", "\0", "ä"])
def test_names(name):
    found = back({name: torch.ones(2), "other": torch.zeros(2)})
    assert torch.equal(found[name], torch.ones(2))
    assert torch.equal(found["other"], torch.zeros(2))


def test_tied_tensors_are_stored_once():
    writer = tree.Writer()
    shared = torch.ones(3)
    writer.encode({"a": shared, "b": shared.view(3), "c": shared[:2], "d": torch.ones(3)})
    assert list(writer.arrays) == ["a", "c", "d"]
    found = back({"a": shared, "b": shared})
    assert torch.equal(found["b"], shared)


def test_a_part_is_read_alone():
    assert back({"x": {"y": 1, "z": torch.ones(2)}}, "x", "y") == 1
    with pytest.raises(HpctkError, match="KeyError"):
        back({"x": {"y": 1}}, "x", "w")


def nested_in_itself():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"f": print}, "'root.f' is a builtin_function_or_method: a checkpoint keeps tensors"),
        ([1, {2, 3}], "'root.1' is a set"),
        (b"bytes", "'root' is a bytes"),
        ({1.5: 0}, "'root' has the key 1.5: keys must be strings or whole numbers"),
        ({True: 0}, "has the key True"),
        ({1: 0, "1": 0}, "a number and the same number as a string"),
        (np.array(["text"]), "an array of <U4"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo: a checkpoint keeps dense tensors"),
        (nested_in_itself(), "nested more than 64 deep"),
    ],
    ids=["function", "set", "bytes", "float key", "bool key", "two keys", "strings", "sparse", "itself"],
)
def test_what_cannot_be_kept_is_named(value, wanted):
    with pytest.raises(SettingError) as caught:
        back(value)
    assert wanted in str(caught.value)


@pytest.mark.parametrize(
    "structure",
    [
        b"", b"not json", b'{"unknown": 1}', b'{"dict": 3}', b'{"dict": [[1]]}', b'{"tensor": "nowhere"}',
        b'{"tensor": "structure"}', b'{"tensor": 5}', b'{"a": 1, "b": 2}', b'{"list": ' * 3000 + b"1" + b"}" * 3000,
        b'{"dict": [[[], 1]]}', b'{"tensor": "t", "stride": [5]}', b'{"tensor": "t", "stride": [-1]}',
        b'{"tensor": "t", "stride": "x"}', b'{"tensor": "t", "stride": [1, 1]}', b'{"list": [], "stride": [1]}',
        b'{"list": ["", ' * 3000 + b"1" + b"]}" * 3000, b'{"list": {"list": 1}}', b'{"list": "ab"}', b"[1]",
        b'{"dict": {"ab": 1}}',
    ],
)  # fmt: skip
def test_a_hostile_structure_is_an_error(structure):
    with h5py.File("tree.h5", "w", driver="core", backing_store=False) as file:
        file.create_dataset("structure", data=np.frombuffer(structure, np.uint8))
        file.create_dataset("t", data=np.zeros(3, np.float32)).attrs["torch_dtype"] = "float32"
        with pytest.raises(HpctkError, match="cannot be read"):
            tree.read(file)
