"""The way to MPI: which tensors pass, in which order their elements lie, and how they come back."""

import numpy as np
import pytest
import torch
from fake_gpu import FakeCupyArray, fake_cuda, recorded_synchronisation
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hpctk.comm import buffers
from hpctk.errors import TensorError

TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
NUMPY_DTYPES = sorted({np.dtype(kind) for kind in np.sctypeDict.values()}, key=str)


def refused(tensor, *words):
    with pytest.raises(TensorError) as caught:
        buffers.flatten(tensor)
    for word in words:
        assert word in str(caught.value)


# What passes: the table of dtypes.


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_is_in_the_table_or_refused_by_name(dtype):
    name = str(dtype).removeprefix("torch.")
    tensor = torch.empty(3, dtype=dtype)
    if name in buffers.DTYPES:
        assert buffers.dtype_of(tensor).itemsize == tensor.element_size()
        assert len(buffers.as_bytes(buffers.flatten(tensor))) == 3 * tensor.element_size()
    else:
        refused(tensor, f"cannot send {name}:", "float32", "Convert")


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_every_numpy_dtype_is_in_the_table_or_refused_by_name(dtype):
    array = np.empty(3, dtype)
    if str(dtype) in buffers.DTYPES:
        entry = buffers.dtype_of(array)
        assert entry.itemsize == dtype.itemsize
        if entry.unit and not entry.widened:
            assert np.dtype(entry.unit).itemsize * entry.parts == dtype.itemsize
    else:
        refused(array, f"cannot send {array.dtype}:", "float32")


def test_the_table_is_what_the_documentation_promises():
    # A new entry needs a thought about how MPI and the engine sum it: change this list together with them.
    assert sorted(buffers.DTYPES) == [
        "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "int16", "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_short_floats_are_summed_wider(name):
    assert buffers.DTYPES[name].widened


@pytest.mark.parametrize("name", ["float32", "complex64", "int8", "bool", "float64"])
def test_the_others_are_summed_as_they_are(name):
    assert not buffers.DTYPES[name].widened


def test_swapped_bytes_are_refused():
    swapped = np.dtype(np.float32).newbyteorder()
    refused(np.zeros(3, swapped), swapped.str, "swapped")


@pytest.mark.parametrize("thing", [[1.0, 2.0], 1.0, None, "text", (1,)], ids=repr)
def test_what_is_no_tensor_is_refused_by_its_type(thing):
    refused(thing, type(thing).__name__, "torch tensor or a numpy array")
    with pytest.raises(TensorError, match=type(thing).__name__):
        buffers.dtype_of(thing)
    assert ("kind", type(thing).__name__) in buffers.describe(thing)


@pytest.mark.parametrize(
    ("convert", "word", "advice"),
    [
        (torch.Tensor.to_sparse, "sparse_coo", "dense"),
        (torch.Tensor.to_sparse_csr, "sparse_csr", "dense"),
        (lambda tensor: tensor.to("meta"), "meta", "to_empty"),
    ],
    ids=["coo", "csr", "meta"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_plain_memory_are_refused(convert, word, advice):
    refused(convert(torch.eye(3)), word, advice)


@pytest.mark.parametrize(
    ("name", "op", "defined"),
    [
        ("float32", "mean", True),
        ("bfloat16", "mean", True),
        ("complex64", "mean", True),
        ("complex64", "max", False),
        ("int32", "sum", True),
        ("int32", "max", True),
        ("int32", "mean", False),
        ("uint8", "mean", False),
        ("bool", "sum", False),
        ("bool", "max", False),
    ],
)
def test_which_sums_are_defined(name, op, defined):
    if defined:
        assert buffers.summable(buffers.DTYPES[name], op).name == name
    else:
        with pytest.raises(TensorError, match=name) as caught:
            buffers.summable(buffers.DTYPES[name], op)
        assert op in str(caught.value)


def test_tensors_that_would_not_fit_together_are_described_differently():
    tensor = torch.zeros(2, 3)
    tensors = [tensor, tensor.reshape(3, 2), tensor.reshape(6), tensor.double(), tensor.to_sparse()]
    assert len({str(buffers.describe(tensor)) for tensor in tensors}) == len(tensors)
    # But not by their strides: those may differ, only the elements travel.
    assert buffers.describe(torch.zeros(3, 2).t()) == buffers.describe(tensor)


# In which order: C, whatever the strides.

BASE = torch.arange(24.0)
TORCH_VIEWS = {
    "contiguous": BASE.clone().reshape(2, 3, 4),
    "permuted": BASE.clone().reshape(2, 3, 4).permute(2, 0, 1),
    "transposed": BASE.clone().reshape(4, 6).t(),
    "sliced": BASE.clone().reshape(4, 6)[::2, 1::3],
    "channels_last": BASE.clone().reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "offset": BASE.clone()[5:9],
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0),
    "empty_3d": torch.empty(2, 0, 3),
    "bfloat16_transposed": BASE.bfloat16().reshape(4, 6).t(),
    "bool_sliced": (BASE > 7).reshape(4, 6)[:, ::2],
    "complex_transposed": torch.complex(BASE, -BASE).reshape(4, 6).t(),
    "conjugated": torch.complex(BASE, -BASE).conj(),
    "negated": torch.complex(BASE, -BASE).conj().imag,
    "parameter": torch.nn.Parameter(BASE.clone().reshape(4, 6)),
}
NUMPY_BASE = np.arange(24.0)
NUMPY_VIEWS = {
    "contiguous": NUMPY_BASE.copy().reshape(2, 3, 4),
    "fortran": np.asfortranarray(NUMPY_BASE.reshape(4, 6)),
    "permuted": NUMPY_BASE.copy().reshape(2, 3, 4).transpose(2, 0, 1),
    "reversed": NUMPY_BASE.copy()[::-1],
    "reversed_rows": NUMPY_BASE.copy().reshape(4, 6)[::-1, ::-2],
    "scalar": np.array(3.0),
    "empty": np.empty((2, 0, 3)),
    "field": np.zeros(4, [("a", "u1"), ("b", "<f4")])["b"],
}


def listed(tensor):
    """The elements in C order, found by counting through the indices."""
    return [tensor[index].item() for index in np.ndindex(*tensor.shape)]


@pytest.mark.parametrize("view", [*TORCH_VIEWS.values(), *NUMPY_VIEWS.values()], ids=[*TORCH_VIEWS, *NUMPY_VIEWS])
def test_flat_means_c_order(view):
    flat = buffers.flatten(view)
    assert flat.ndim == 1
    assert flat.dtype == view.dtype
    assert [element.item() for element in flat] == listed(view)
    assert len(buffers.as_bytes(flat)) == len(flat) * buffers.dtype_of(view).itemsize


@pytest.mark.parametrize("kind", ["contiguous", "offset", "parameter", "scalar"])
def test_no_copy_where_torch_elements_lie_so(kind):
    assert buffers.flatten(TORCH_VIEWS[kind]).data_ptr() == TORCH_VIEWS[kind].data_ptr()


@pytest.mark.parametrize("kind", ["contiguous", "scalar"])
def test_no_copy_where_numpy_elements_lie_so(kind):
    assert np.shares_memory(buffers.flatten(NUMPY_VIEWS[kind]), NUMPY_VIEWS[kind])


@settings(max_examples=100, deadline=None)
@given(npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4), st.data())
def test_any_view_of_an_array(shape, data):
    base = np.arange(np.prod(shape)).reshape(shape)
    base = base.transpose(data.draw(st.permutations(range(len(shape)))))
    view = np.asarray(base[data.draw(npst.basic_indices(base.shape, allow_newaxis=True))])
    flat = buffers.flatten(view)
    assert flat.tolist() == list(view.flat)
    flat, before = flat.copy(), base.copy()
    buffers.write_back(view, flat + 1000)
    # The view has changed everywhere, and nothing beside it.
    assert view.tolist() == (flat + 1000).reshape(view.shape).tolist()
    changed = base != before
    assert changed.sum() == (view.size if np.shares_memory(view, base) else 0)
    assert (base[changed] == before[changed] + 1000).all()


def test_bytes_are_the_elements_own_memory():
    flat = torch.zeros(4, dtype=torch.bfloat16)
    buffers.as_bytes(flat)[2:4] = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy()
    assert flat.tolist() == [0, 1, 0, 0]
    array = np.zeros(2, np.int16)
    buffers.as_bytes(array)[:] = 255
    assert array.tolist() == [-1, -1]


# And back.


@pytest.mark.parametrize("kind", [kind for kind in TORCH_VIEWS if kind not in ("negated", "bool_sliced")])
def test_torch_results_are_written_in_place(kind):
    target = TORCH_VIEWS[kind].detach().clone(memory_format=torch.preserve_format)
    wanted = [element + 1 for element in listed(target)]
    strides, address = target.stride(), target.data_ptr()
    flat = buffers.flatten(target)
    buffers.write_back(target, flat + 1)
    assert listed(target) == wanted
    assert (target.stride(), target.data_ptr()) == (strides, address)


def test_a_result_in_a_parameter_leaves_autograd_alone():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    buffers.write_back(weight, torch.ones(6))
    assert weight.is_leaf
    assert weight.grad_fn is None
    assert weight.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_only_the_view_is_written():
    whole = torch.zeros(4, 4)
    buffers.write_back(whole[1:3, ::2], torch.arange(1.0, 5.0))
    assert whole.tolist() == [[0, 0, 0, 0], [1, 0, 2, 0], [3, 0, 4, 0], [0, 0, 0, 0]]


def test_a_result_that_is_already_there_is_left():
    array = np.arange(6.0).reshape(2, 3)
    flat = buffers.flatten(array)
    flat += 1
    buffers.write_back(array, flat)
    assert array.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_where_results_cannot_be_written():
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(TensorError, match="read-only"):
        buffers.writable(frozen)
    with pytest.raises(TensorError, match="read-only"):
        buffers.writable(np.broadcast_to(np.zeros(1), 3))
    with pytest.raises(TensorError, match="expanded"):
        buffers.writable(torch.zeros(1, 3).expand(2, 3))


@pytest.mark.parametrize("view", [*TORCH_VIEWS.values(), *NUMPY_VIEWS.values()], ids=[*TORCH_VIEWS, *NUMPY_VIEWS])
def test_where_results_can_be_written(view):
    buffers.writable(view)


def test_an_expanded_dimension_of_one_can_be_written():
    buffers.writable(torch.zeros(3).expand(1, 3))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 70))
def test_chunks_cover_everything_once(n, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "COUNT_LIMIT", limit)
        chunks = list(buffers.chunks(n))
    assert [index for start, stop in chunks for index in range(start, stop)] == list(range(n))
    assert all(0 < stop - start <= limit for start, stop in chunks)


def test_chunks_fit_a_c_int():
    n = 3 * 2**31 + 5
    chunks = list(buffers.chunks(n))
    assert all(stop - start < 2**31 for start, stop in chunks)
    assert (chunks[0][0], chunks[-1][1]) == (0, n)


# Device memory.


def test_staging_hands_out_the_smallest_that_is_large_enough():
    staging = buffers.Staging()
    large, small = staging.take(1000), staging.take(10)
    staging.give(large)
    staging.give(small)
    assert staging.take(5).data_ptr() == small.data_ptr()
    assert staging.take(5).data_ptr() == large.data_ptr()
    assert staging.take(5).data_ptr() not in (small.data_ptr(), large.data_ptr())


def test_staging_does_not_hoard_every_size():
    staging = buffers.Staging()
    for nbytes in range(1, 100):
        buffer = staging.take(nbytes)
        assert buffer.numel() >= nbytes
        staging.give(buffer)
    assert len(staging._free) == 1


@pytest.fixture
def synchronised(monkeypatch):
    with recorded_synchronisation(monkeypatch) as calls:
        yield calls


@pytest.mark.parametrize("gpu_aware", [False, True])
def test_host_memory_passes_as_it_is(synchronised, gpu_aware):
    stager, tensor, array = buffers.Stager(gpu_aware), torch.zeros(3), np.zeros(3)
    assert stager.to_comm(tensor, stage=True).data_ptr() == tensor.data_ptr()
    assert np.shares_memory(stager.to_comm(array), array)
    assert synchronised == []


def test_device_memory_goes_straight_to_an_mpi_that_takes_it(synchronised):
    stager, tensor = buffers.Stager(gpu_aware=True), fake_cuda(torch.arange(6.0).reshape(2, 3))
    flat = stager.to_comm(tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    assert buffers.on_device(flat)
    assert buffers.as_bytes(flat).data_ptr() == tensor.data_ptr()
    # MPI does not know about streams: the values must be there before it looks.
    assert synchronised == [tensor.data_ptr()]
    flat += 1
    stager.from_comm(tensor, flat)
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(("gpu_aware", "stage"), [(False, False), (False, True), (True, True)])
def test_device_memory_is_staged_otherwise(synchronised, gpu_aware, stage):
    stager, tensor = buffers.Stager(gpu_aware), fake_cuda(torch.arange(6.0).reshape(2, 3))
    flat = stager.to_comm(tensor, stage=stage)
    assert not buffers.on_device(flat)
    assert isinstance(buffers.as_bytes(flat), np.ndarray)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert synchronised == [tensor.data_ptr()]
    flat += 1
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    stager.from_comm(tensor, flat)
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("gpu_aware", [False, True])
def test_device_memory_in_another_order(synchronised, gpu_aware):
    stager, tensor = buffers.Stager(gpu_aware), fake_cuda(torch.arange(6.0).reshape(2, 3).t())
    flat = stager.to_comm(tensor)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5]
    flat += 1
    stager.from_comm(tensor, flat)
    assert tensor.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_a_contiguous_copy_is_what_gets_synchronised(synchronised):
    # The copy is the device's work too: waiting for the original alone would send half a copy.
    flat = buffers.Stager(gpu_aware=True).to_comm(fake_cuda(torch.arange(6.0).reshape(2, 3).t()))
    assert synchronised == [flat.data_ptr()]


@pytest.mark.parametrize("gpu_aware", [False, True])
def test_foreign_device_arrays(synchronised, gpu_aware):
    stager, array = buffers.Stager(gpu_aware), FakeCupyArray(np.arange(4.0))
    flat = stager.to_comm(array)
    assert len(synchronised) == 1
    flat += 1
    stager.from_comm(array, flat)
    assert array.array.tolist() == [1, 2, 3, 4]


def test_tensors_under_way_at_once_do_not_share_a_buffer(synchronised):
    stager = buffers.Stager(gpu_aware=False)
    tensors = [fake_cuda(torch.full((n,), float(n), dtype=torch.float16)) for n in (5, 3, 7)]
    flats = [stager.to_comm(tensor) for tensor in tensors]
    for tensor, flat in reversed(list(zip(tensors, flats, strict=True))):
        flat *= 10
        stager.from_comm(tensor, flat)
    assert [tensor.tolist() for tensor in tensors] == [[50.0] * 5, [30.0] * 3, [70.0] * 7]


def test_buffers_are_used_again(synchronised):
    stager, addresses = buffers.Stager(gpu_aware=False), set()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.bool):
        tensor = fake_cuda(torch.zeros(100, dtype=dtype))
        flat = stager.to_comm(tensor)
        addresses.add(flat.data_ptr())
        stager.from_comm(tensor, flat)
    assert len(addresses) == 1


def test_empty_device_tensors(synchronised):
    stager = buffers.Stager(gpu_aware=False)
    full, empties = fake_cuda(torch.ones(4)), [fake_cuda(torch.empty(0)), fake_cuda(torch.empty(2, 0))]
    staged = stager.to_comm(full)
    flats = [stager.to_comm(tensor) for tensor in empties]
    assert [len(flat) for flat in flats] == [0, 0]
    for tensor, flat in zip(empties, flats, strict=True):
        stager.from_comm(tensor, flat)
    staged += 1
    stager.from_comm(full, staged)
    assert full.tolist() == [2, 2, 2, 2]


def test_refusals_come_before_the_device_is_touched(synchronised):
    with pytest.raises(TensorError):
        buffers.Stager(gpu_aware=False).to_comm(fake_cuda(torch.zeros(3, dtype=torch.complex32)))
    assert synchronised == []


def test_one_element_of_any_stride_becomes_bytes():
    odd = torch.zeros(1, 2)[:, 0]
    assert odd.is_contiguous()
    assert len(buffers.as_bytes(buffers.flatten(odd))) == 4
