"""Nested values in HDF5 without pickle: tensors as datasets under their own names, the rest as JSON.

A tree is made of dicts, lists, tuples, numbers, strings, None, torch tensors and numpy arrays. Its tensors lie in the
file where their keys lead, `method/residuals/0.weight`, so that any HDF5 tool finds them. What they hang on is one
JSON text beside them (dataset `structure`): keys keep their types and order, tuples stay tuples, and floats come back
bit for bit. A tensor that is in a tree twice, as tied weights are, is stored once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpctk.errors import HpctkError, SettingError

STRUCTURE = "structure"
#: Deeper trees are nobody's training state.
DEPTH = 64

#: How torch's dtypes that HDF5 does not know are stored: as whole numbers of the same width.
_RAW = {1: torch.uint8, 2: torch.int16}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Writer:
    """Turns a tree into a structure and the arrays to write."""

    def __init__(self) -> None:
        #: Path in the file: (array, torch dtype's name, empty for a numpy array).
        self.arrays: dict[str, tuple[Any, str]] = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Return a value as JSON can hold it; SettingError names what cannot be kept."""
        if len(path) > DEPTH:
            raise SettingError(f"{'.'.join(path[:4])}...: nested more than {DEPTH} deep, or in itself")
        if value is None or isinstance(value, bool | str):
            return value
        # numpy's float64 is a float, too; a plain one is what comes back.
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            return float(value)
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path), **_strides(value)}
        if isinstance(value, np.ndarray):
            return {"array": self._array(value, path)}
        if isinstance(value, Mapping):
            return {"counter" if isinstance(value, Counter) else "dict": self._items(value, path)}
        if isinstance(value, list | tuple):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.encode(x, (*path, str(i))) for i, x in enumerate(value)]}
        raise SettingError(
            f"{_called(path)} is a {type(value).__name__}: a checkpoint keeps tensors, arrays, numbers, strings, "
            "None, and lists, tuples and dicts of them"
        )

    def _items(self, mapping: Mapping[Any, Any], path: tuple[str, ...]) -> list[list[Any]]:
        for key in mapping:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise SettingError(f"{_called(path)} has the key {key!r}: keys must be strings or whole numbers")
        if len({str(key) for key in mapping}) < len(mapping):
            raise SettingError(f"{_called(path)} has a number and the same number as a string for keys")
        return [[key, self.encode(value, (*path, str(key)))] for key, value in mapping.items()]

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise SettingError(f"{_called(path)} is {tensor.layout}: a checkpoint keeps dense tensors")
        tensor = tensor.detach()
        memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        # Empty tensors share the address 0.
        if tensor.numel() and memory in self._seen:
            return self._seen[memory]
        host = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        try:
            array = host.numpy()
        except TypeError:
            array = host.view(_RAW[host.element_size()]).numpy()
        self._seen[memory] = place = _place(path)
        self.arrays[place] = array, str(tensor.dtype).removeprefix("torch.")
        return place

    def _array(self, array: Any, path: tuple[str, ...]) -> str:
        if array.dtype.kind not in "biufc":
            raise SettingError(f"{_called(path)} is an array of {array.dtype}: a checkpoint keeps numbers")
        place = _place(path)
        self.arrays[place] = np.ascontiguousarray(array).reshape(array.shape), ""
        return place


def put(file: Any, structure: str, arrays: Mapping[str, tuple[Any, str]]) -> None:
    """Write what a Writer has made of a tree into an open HDF5 file."""
    file.create_dataset(STRUCTURE, data=np.frombuffer(structure.encode(), np.uint8))
    for place, (array, dtype) in arrays.items():
        dataset = file.create_dataset(place, data=array)
        if dtype:
            dataset.attrs["torch_dtype"] = dtype


def read(file: Any, *path: str) -> Any:
    """Return the tree of an open HDF5 file, or what is under some of its keys; only that is read.

    Raises
    ------
    HpctkError
        Where the file holds no tree.
    """
    try:
        node = json.loads(file[STRUCTURE][...].tobytes())
        for key in path:
            node = {str(name): x for name, x in _parts(node["dict"])}[key]
        return _decoded(file, node)
    except (KeyError, ValueError, TypeError, AttributeError, OSError, RecursionError, RuntimeError) as error:
        raise HpctkError(f"what it holds cannot be read ({type(error).__name__}: {error})") from None


def _decoded(file: Any, node: Any) -> Any:
    if isinstance(node, list):
        raise ValueError("a list that is not said to be one")
    if not isinstance(node, dict):
        return node
    (kind, value), *more = node.items()
    if more and kind != "tensor":
        raise ValueError(f"{len(node)} entries where one kind is wanted")
    if kind in ("dict", "counter"):
        items = {key: _decoded(file, x) for key, x in _parts(value)}
        return Counter(items) if kind == "counter" else items
    if kind in ("list", "tuple"):
        parts = [_decoded(file, x) for x in _parts(value)]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "array":
        return file[value][...]
    if kind == "tensor":
        return _laid_out(_tensor(file[value]), node.get("stride"))
    raise ValueError(f"unknown kind {kind!r}")


def _parts(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} where a list is wanted")
    return value


def _tensor(dataset: Any) -> torch.Tensor:
    # [()] of a dataset without dimensions is a number; [...] is always an array.
    tensor = torch.from_numpy(dataset[...])
    dtype = _DTYPES[str(dataset.attrs["torch_dtype"])]
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _strides(tensor: torch.Tensor) -> dict[str, list[int]]:
    """Return how a tensor lies in memory, where that is dense and not in C order, such as channels-last.

    Optimizers that walk through memory (fused ones) need a parameter's state to lie as the parameter does.
    """
    dense = not tensor.is_contiguous() and torch.empty_like(tensor).stride() == tensor.stride()
    return {"stride": list(tensor.stride())} if dense else {}


def _laid_out(tensor: torch.Tensor, stride: list[int] | None) -> torch.Tensor:
    if stride is None:
        return tensor
    # Strides of a dense tensor are those of a permutation: nothing a file says makes it reach further.
    out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
    if out.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
        raise ValueError(f"strides {stride} for a tensor of {tuple(tensor.shape)}")
    return out.copy_(tensor)


def _place(path: tuple[str, ...]) -> str:
    return "/".join(_escaped(part) for part in path)


def _escaped(part: str) -> str:
    """Return a key as HDF5 can name it: not empty, no slash, which would start a group, not "." alone."""
    part = part.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return part.replace(".", "%2E") if part.strip(".") == "" and part else part or "%"


def _called(path: tuple[str, ...]) -> str:
    return repr(".".join(path)) if path else "what is to be kept"
