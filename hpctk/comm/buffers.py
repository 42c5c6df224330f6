"""The one way to MPI: tensors become flat, contiguous memory of a known type, or are refused.

MPI sees memory, not tensors. It sums bfloat16 as something else without a word, pairs up C- and
Fortran-ordered elements as they lie, and counts in 32 bits. So everything that travels passes here:

- a closed table of dtypes: what is not in it is refused, by name;
- one order of elements, C order, whatever the tensor's strides;
- explicit counts, in chunks below MPI's limit;
- device memory straight to an MPI that takes it, else through a reused pinned host buffer, with the
  device's stream synchronised before MPI looks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctk.errors import TensorError

#: The most elements one MPI call may carry: MPI before 4.0 counts in a C int. Tests lower it.
COUNT_LIMIT = 2**31 - 1
#: What is wrong with tensors that are only promised, and what to do.
NO_VALUES = (
    "is on the meta device and has no values: materialise the model with model.to_empty(device=...) and initialise it "
    "first"
)
UNINITIALISED = "belongs to a lazy module that has not seen an input yet: run one forward pass first"


@dataclass(frozen=True)
class Dtype:
    """How elements of one dtype travel.

    Attributes
    ----------
    name : str
        As torch and numpy spell it.
    itemsize : int
    unit : str
        The dtype in which its parts are summed; empty where a sum makes no sense.
    mpi : str
        The MPI datatype of one `unit`, in which MPI itself may sum.
    parts : int
        Units in one element: 2 for complex numbers.
    """

    name: str
    itemsize: int
    unit: str = ""
    mpi: str = ""
    parts: int = 1

    @property
    def widened(self) -> bool:
        """Whether sums are formed in a wider type than the one that travels."""
        return self.unit == "float32" and self.itemsize < 4


_TABLE = [
    Dtype("float32", 4, "float32", "FLOAT"),
    Dtype("float64", 8, "float64", "DOUBLE"),
    *(Dtype(f"int{8 * n}", n, f"int{8 * n}", f"INT{8 * n}_T") for n in (1, 2, 4, 8)),
    *(Dtype(f"uint{8 * n}", n, f"uint{8 * n}", f"UINT{8 * n}_T") for n in (1, 2, 4, 8)),
    Dtype("complex64", 8, "float32", "FLOAT", parts=2),
    Dtype("complex128", 16, "float64", "DOUBLE", parts=2),
    # Summed in float32 by hpctk, never by MPI, which has no such types.
    Dtype("float16", 2, "float32", "FLOAT"),
    Dtype("bfloat16", 2, "float32", "FLOAT"),
    *(Dtype(f"float8_{kind}", 1, "float32", "FLOAT") for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")),
    Dtype("bool", 1),
]
DTYPES = {dtype.name: dtype for dtype in _TABLE}


def dtype_of(tensor: Any) -> Dtype:
    """Return the table's entry for a tensor or array; TensorError where there is none."""
    dtype = getattr(tensor, "dtype", type(tensor).__name__)
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise TensorError(f"cannot send {dtype.str}: its bytes are swapped; use .astype(...)")
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TensorError(f"cannot send {name}: hpctk moves {', '.join(DTYPES)}. Convert the tensor first.")
    return DTYPES[name]


def describe(tensor: Any) -> list[tuple[str, object]]:
    """Return what all ranks must agree on before a tensor travels. Never raises: a list has a type too."""
    kind = type(tensor).__name__
    if is_uninitialised(tensor):
        # It has neither a shape nor a layout.
        return [("shape", "none"), ("dtype", tensor.dtype), ("kind", "uninitialised")]
    if is_torch(tensor):
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
    shape = tuple(getattr(tensor, "shape", ()))
    return [("shape", shape), ("dtype", getattr(tensor, "dtype", "none")), ("kind", kind)]


def summable(dtype: Dtype, op: str) -> Dtype:
    """Return `dtype` if `op` (sum, mean, max) is defined for it, else raise TensorError."""
    if not dtype.unit:
        raise TensorError(f"cannot form the {op} of {dtype.name}: convert it to an integer or float type first")
    if op == "mean" and "int" in dtype.unit:
        raise TensorError(f"the mean of {dtype.name} is not defined: use op='sum', or a float tensor")
    if op == "max" and dtype.parts > 1:
        raise TensorError(f"complex numbers have no order: cannot form the max of {dtype.name}")
    return dtype


def is_torch(tensor: Any) -> bool:
    """Return whether `tensor` is torch's, without importing torch for those who do not use it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def is_uninitialised(tensor: Any) -> bool:
    """Return whether `tensor` is a parameter or buffer of torch's that has no shape yet."""
    torch = sys.modules.get("torch")
    if torch is None or type(tensor) is torch.Tensor:
        return False
    return bool(torch.nn.parameter.is_lazy(tensor))


def check_values(tensor: Any) -> None:
    """Raise TensorError for a tensor that has no values: on the meta device, or of a lazy module."""
    if is_uninitialised(tensor):
        raise TensorError(f"the tensor {UNINITIALISED}")
    if is_torch(tensor) and tensor.is_meta:
        raise TensorError(f"the tensor {NO_VALUES}")


def on_device(tensor: Any) -> bool:
    """Return whether the memory is a device's: torch says so, or it wears __cuda_array_interface__."""
    if isinstance(tensor, np.ndarray):
        return False
    if not is_torch(tensor):
        return hasattr(tensor, "__cuda_array_interface__")
    torch = sys.modules["torch"]
    if type(tensor) is torch.Tensor:
        return not tensor.is_cpu
    # Every torch tensor has the property; only a subclass that defines it anew says something by it.
    worn = getattr(type(tensor), "__cuda_array_interface__", None)
    return tensor.device.type != "cpu" or worn is not torch.Tensor.__cuda_array_interface__


def native(tensor: Any) -> Any:
    """Return `tensor` as a torch tensor or numpy array over the same memory. TensorError where it has no values."""
    check_values(tensor)
    if is_torch(tensor) or isinstance(tensor, np.ndarray):
        return tensor
    if not hasattr(tensor, "__dlpack__"):
        raise TensorError(f"cannot send a {type(tensor).__name__}: give a torch tensor or a numpy array")
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(tensor)


def flatten(tensor: Any) -> Any:
    """Return the elements of a tensor in C order as one contiguous 1-D tensor; a view where they lie so."""
    tensor = native(tensor)
    dtype_of(tensor)
    if is_torch(tensor):
        return _flatten_torch(tensor)
    return np.ascontiguousarray(tensor).reshape(-1)


def _flatten_torch(tensor: Any) -> Any:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TensorError(f"cannot send a {kind} tensor: convert it to a dense one first (.to_dense())")
    # Conjugated and negated views say so in a flag only: write the values out.
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = plain.contiguous().reshape(-1)
    # One element may have any stride and still be contiguous to torch, but is then no view of bytes.
    return flat.as_strided(flat.shape, (1,))


def writable(tensor: Any) -> None:
    """Raise TensorError unless results can be written into `tensor`."""
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.writeable:
            raise TensorError("cannot write the result into a read-only array: give a copy")
    elif is_torch(tensor) and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        raise TensorError("cannot write the result into an expanded tensor: give .clone()")


def write_back(tensor: Any, flat: Any) -> None:
    """Write `flat`, elements in C order, into `tensor` in place; nothing to do where it is a view of it."""
    tensor = native(tensor)
    if is_torch(tensor):
        target = tensor.detach()
        if target.data_ptr() != flat.data_ptr():
            target.copy_(flat.reshape(tensor.shape))
    elif not np.shares_memory(tensor, flat):
        tensor[...] = np.asarray(flat).reshape(tensor.shape)


def as_bytes(flat: Any) -> Any:
    """Return flat memory as a 1-D view of bytes: a numpy array of uint8 on the host, else the device's own."""
    if is_torch(flat):
        import torch

        view = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        return view if on_device(flat) else view.numpy()
    return flat.view(np.uint8)


def plain_array(tensor: Any) -> Any:
    """Return a contiguous host tensor as the numpy array that shares its memory, None where it is not one."""
    if on_device(tensor):
        return None
    if is_torch(tensor):
        return None if not tensor.is_contiguous() or tensor.is_neg() else tensor.detach().numpy()
    return tensor if tensor.flags.c_contiguous and tensor.flags.writeable else None


def divide(values: Any, size: int) -> None:
    """Divide an array of floats by the number of ranks, in place."""
    if size & (size - 1):
        values /= size
    else:
        # The same bits as a division's, in a fraction of its time: the inverse is exact.
        np.multiply(values, values.dtype.type(1 / size), out=values)


def chunks(n: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) that cover n elements, none longer than COUNT_LIMIT."""
    for start in range(0, n, COUNT_LIMIT):
        yield start, min(start + COUNT_LIMIT, n)


def synchronize(tensor: Any) -> None:
    """Wait until the device's stream has written `tensor`: MPI does not know about streams."""
    import torch

    # torch.cuda, torch.xpu, or whatever a backend of another package is called.
    module = getattr(torch, tensor.device.type)
    module.current_stream(tensor.device).synchronize()


class Staging:
    """Host buffers that device tensors go through, pinned, and reused once given back."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def take(self, nbytes: int) -> Any:
        """Return at least `nbytes` bytes of host memory as a torch tensor of uint8."""
        import torch

        for position, kept in enumerate(self._free):
            if kept.numel() >= nbytes:
                return self._free.pop(position)
        # None is large enough: let the largest go rather than keep every size that ever occurred.
        if self._free:
            self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def give(self, buffer: Any) -> None:
        """Take a buffer back for the next tensor."""
        self._free.append(buffer)
        self._free.sort(key=lambda kept: kept.numel())


class Stager:
    """Brings tensors to where MPI may touch them, and back.

    Parameters
    ----------
    gpu_aware : bool
        Whether MPI takes device memory.
    note : callable
        Told of every tensor that is staged.
    """

    def __init__(self, gpu_aware: bool, note: Callable[[Any], None] = lambda tensor: None) -> None:
        self.gpu_aware, self._note = gpu_aware, note
        self.staging = Staging()
        self._staged: dict[int, Any] = {}

    def to_comm(self, tensor: Any, *, stage: bool = False) -> Any:
        """Return flat memory with the tensor's elements that MPI may read and write.

        A view of the tensor where it is contiguous and MPI may touch it there. `stage` brings
        device tensors to the host in any case: for MPI's own non-blocking reductions, which crash
        on device memory in Open MPI. Give what is returned to `from_comm`.
        """
        flat = flatten(tensor)
        if not on_device(tensor):
            return flat
        synchronize(flat)
        if self.gpu_aware and not stage:
            return flat
        self._note(tensor)
        nbytes = flat.numel() * flat.element_size()
        buffer = self.staging.take(nbytes)
        host = buffer[:nbytes].view(flat.dtype)
        self._staged[host.data_ptr()] = buffer
        host.copy_(flat)
        return host

    def from_comm(self, tensor: Any, flat: Any) -> None:
        """Write what MPI left in `flat` into the tensor, in place."""
        write_back(tensor, flat)
        if is_torch(flat):
            buffer = self._staged.pop(flat.data_ptr(), None)
            if buffer is not None:
                self.staging.give(buffer)
