"""What every compressor does: write a tensor down in fewer bytes, read it back, remember the rest.

Arithmetic only: a compressor knows neither ranks nor MPI. The contract of error feedback in one
sentence: `decompress(feed(tensor, residual)) + residual after == residual before + tensor`.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from hpctk.comm import buffers
from hpctk.compressors.core import arrays, finite
from hpctk.compressors.core.packet import Packet
from hpctk.errors import HpctkError, TensorError
from hpctk.settings import check, documented, setting

Setting = str | int | float | bool | list[str]
Shape = tuple[int, ...]
State = dict[str, dict[str, torch.Tensor | int]]

#: How packets of several ranks combine: the words that a compressor's `combines` may be.
COMBINES = {
    "summed": "their data are added, element by element",
    "gathered": "every rank decodes those of all ranks, and adds",
    "signs": "gathered; one scale and packed signs, as Sign writes them, which a server may compress again",
    "pairs": "indices and values of some elements, summed by a sparse all-reduce: a SparseCompressor",
    "lists": "gathered; a few elements of each rank, and their `places`",
    "own": "the compressor has an `aggregate` that says what is all-reduced: an Aggregating",
}


@documented
@dataclass(eq=False, repr=False, kw_only=True)
class Compressor(ABC):
    """How a tensor is written down."""

    #: How packets of several ranks combine, a word of `COMBINES`.
    combines: ClassVar[str]
    #: Whether `decompress` of a packet is always the tensor itself.
    lossless: ClassVar[bool] = False
    #: Whether `tensor - decompress(compress(tensor))` is always shorter than the tensor.
    contracts: ClassVar[bool] = True
    #: Whether `feed` never leaves more of an element than the sum had, in magnitude: then residuals grow no faster
    #: than gradients come in.
    shrinks: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if getattr(cls, "combines", None) not in COMBINES:
            raise TypeError(f"{cls.__name__}.combines must be one of {', '.join(COMBINES)}")

    exclude: Sequence[str] = setting(
        (), 'parameters to spare: exact names or patterns as of the shell, such as ["*.bias"]'
    )
    min_elements: int = setting(0, "tensors with fewer elements are spared", at_least=0)

    def __post_init__(self) -> None:
        vars(self).update(check(self))
        self._seat = 0

    def is_excluded(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is left alone and travels as it is.

        By its name (`exclude`), its size (`min_elements`), or its dtype: only float16, bfloat16, float32
        and float64 are compressed.
        """
        if tensor.dtype not in arrays.DTYPES or tensor.numel() < self.min_elements:
            return True
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.exclude)

    def compress(self, tensor: torch.Tensor, name: str = "") -> Packet:
        """Return the tensor as a packet. Not in place; any shape and any layout in memory.

        Raises
        ------
        TensorError
            For a dtype that is not compressed, or an element that is NaN or infinite; the text names the
            parameter and the element's index in C order.
        """
        stamp = self._stamp(name)
        flat = checked_flat(tensor, name)
        refuse(finite.first_bad(flat), flat.numel(), name)
        return self._pack(flat, tuple(tensor.shape), name, stamp)

    def decompress(self, packet: Packet) -> torch.Tensor:
        """Return the packet's tensor, a new one on the device of its data. Not in place.

        Raises
        ------
        HpctkError
            For data that no tensor of this shape and dtype can have been written as.
        """
        if packet.dtype not in arrays.DTYPES:
            raise TensorError(f"a packet of {arrays.dtype_name(packet.dtype)}: {_allowed()}")
        if packet.data.dim() != 1 or not packet.data.is_contiguous():
            raise HpctkError("a packet's data must be one-dimensional and contiguous")
        return self._decode(packet).reshape(packet.shape)

    def add_to(self, flat: torch.Tensor, packet: Packet) -> None:
        """Add what a packet stands for to a flat tensor, in place."""
        flat += self.decompress(packet).view(-1)

    def feed(self, tensor: torch.Tensor, residual: torch.Tensor, name: str = "") -> Packet:
        """Add tensor to residual in place, compress the sum, leave in residual what the packet does not carry.

        Parameters
        ----------
        tensor : torch.Tensor
            Is not changed.
        residual : torch.Tensor
            Of the same shape, dtype and device. Unchanged, to the last bit, when this raises.

        Raises
        ------
        TensorError
            As for `compress`, about the sum.
        """
        stamp = self._stamp(name)
        flat, memory = checked_pair(tensor, residual, name)
        refuse(finite.first_bad_sum(memory, flat), flat.numel(), name)
        memory += flat
        packet = self._pack(memory, tuple(tensor.shape), name, stamp)
        self._withdraw(memory, packet)
        buffers.write_back(residual, memory)
        return packet

    def settings(self) -> dict[str, Setting]:
        """Return all settings with the compressor's name, ready for JSON: for handshakes and checkpoints."""
        names = inspect.signature(type(self)).parameters
        values = {name: getattr(self, name) for name in names}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        return {"compressor": type(self).__name__, **values, **lists}

    def set_rank(self, rank: int) -> None:
        """Set the rank that the compressor works on, once: those that draw random numbers of each rank's own use it."""
        self._seat = rank

    def state_dict(self) -> State:
        """Return what the compressor remembers, by parameter name; empty for most."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor | int]]) -> None:
        """Replace what the compressor remembers by what `state_dict` returned, copied."""
        if state:
            raise HpctkError(f"{self!r} remembers nothing, but the state has {', '.join(sorted(state))}")

    def __repr__(self) -> str:
        parts = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            if parameter.default is parameter.empty:
                parts.append(repr(value))
            elif value != parameter.default:
                parts.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    @abstractmethod
    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        """Return the data for a flat, contiguous, finite tensor, in memory of their own."""

    @abstractmethod
    def _decode(self, packet: Packet) -> torch.Tensor:
        """Return the flat tensor that a packet stands for, a new one; HpctkError for wrong data."""

    def _pack(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> Packet:
        return Packet(self._encode(flat, shape, name, stamp), shape, flat.dtype, stamp)

    def _withdraw(self, memory: torch.Tensor, packet: Packet) -> None:
        """Subtract what a packet of this rank carries from a flat tensor, in place."""
        memory -= self._decode(packet)

    def _stamp(self, name: str) -> int:
        """Return the stamp of the next packet of a parameter, for those that draw; counts the draw."""
        return 0


class Aggregating(Protocol):
    """A compressor that aggregates by itself, by means of all-reduces ("own")."""

    def aggregate(
        self, tensors: Mapping[str, torch.Tensor], allreduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the means over all ranks; leave in each tensor, in place, what this rank did not send."""


def expect_length(packet: Packet, length: int, dtype: torch.dtype, what: str) -> None:
    """Raise HpctkError unless a packet's data are `length` elements of a dtype."""
    data = packet.data
    if data.numel() != length or data.dtype != dtype:
        raise HpctkError(
            f"a packet of {data.numel()} x {arrays.dtype_name(data.dtype)}: {what} of {packet.n} elements "
            f"takes {length} x {arrays.dtype_name(dtype)}"
        )


def checked_pair(tensor: torch.Tensor, residual: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensor and residual as flat tensors, views where they are contiguous."""
    if is_plain(tensor) and is_plain(residual) and tensor.shape == residual.shape and tensor.dtype == residual.dtype:
        return tensor.detach().view(-1), residual.view(-1)
    flat, memory = checked_flat(tensor, name), checked_flat(residual, name)
    for what in ("shape", "dtype", "device"):
        given, kept = getattr(tensor, what), getattr(residual, what)
        if given != kept:
            raise TensorError(f"{_called(name)} has {what} {given}, but its residual {kept}")
    buffers.writable(residual)
    return flat, memory


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one row of host memory in single or double precision, as most are."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_cpu
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def checked_flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{_called(name)} is a {type(tensor).__name__}, not a torch tensor")
    if tensor.dtype not in arrays.DTYPES:
        raise TensorError(f"{_called(name)} is of {arrays.dtype_name(tensor.dtype)}: {_allowed()}")
    flat: torch.Tensor = buffers.flatten(tensor)
    return flat


def refuse(index: int | None, n: int, name: str) -> None:
    if index is not None:
        raise TensorError(
            f"{_called(name)}: element {index} of {n} is NaN or infinite, or the sum with its residual is; "
            "nothing was compressed"
        )


def _called(name: str) -> str:
    return f"parameter {name!r}" if name else "the tensor"


def _allowed() -> str:
    known = ", ".join(arrays.dtype_name(dtype) for dtype in arrays.DTYPES)
    return f"only {known} are compressed; `is_excluded` tells"


class Taken(NamedTuple):
    """Elements that were taken out of residuals, of the named ones laid one after the other with these bounds."""

    names: list[str]
    edges: Any
    indices: Any
    values: Any


class Residuals:
    """A store of residuals, by parameter name; at first those of `given`, which are changed in place.

    Attributes
    ----------
    keeps_taken : bool
        Whether what is taken out may have to be put back.
    taken : Taken or None
        What was taken out last, then, where that is known element by element.
    """

    def __init__(self, given: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._kept = dict(given)
        self.keeps_taken = False
        self.taken: Taken | None = None

    def of(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the residual of a parameter, to be changed in place: contiguous zeros at first.

        Moves to the device of `like` where it is on another, as after loading a checkpoint. Raise TensorError if shape
        or dtype are no longer those of `like`.
        """
        kept = self._kept.get(name)
        if kept is None:
            kept = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if kept.shape != like.shape or kept.dtype != like.dtype:
            raise TensorError(
                f"parameter {name!r} is {_described(like)}, but its residual {_described(kept)}: "
                "a residual does not outlive a change of the model"
            )
        self._kept[name] = kept.to(like.device)
        return self._kept[name]

    def feed(self, compressor: Compressor, name: str, tensor: torch.Tensor) -> Packet:
        """Return `compressor.feed` of a tensor and its residual, which is changed in place."""
        return compressor.feed(tensor, self.of(name, tensor), name)

    def swap(self, other: Residuals, names: Iterable[str]) -> None:
        """Exchange some residuals with those of another store, which has them all. Local, without copies."""
        for name in names:
            mine, theirs = self._kept.get(name), other._kept.pop(name)
            self._kept[name] = theirs
            if mine is not None:
                other._kept[name] = mine

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def names(self) -> list[str]:
        """Return the names of all parameters that have a residual, in the order they came."""
        return list(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(kept.numel() * kept.element_size() for kept in self._kept.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals by name: themselves, not copies."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all residuals by copies of the given ones."""
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in arrays.DTYPES:
                kind = _described(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise TensorError(f"the residual of {name!r} is {kind}: need a tensor of floating point numbers")
        self._kept = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
        }


def _described(tensor: torch.Tensor) -> str:
    return f"{arrays.dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def kept_elements(density: float, n: int) -> int:
    """Return max(1, floor(density * n + 1e-9)), and 0 of an empty tensor.

    The 1e-9 is for densities that binary fractions miss by a hair: 0.29 of 100 elements is 29, although
    0.29 * 100 is 28.999999999999996 in floating point.
    """
    return min(n, max(1, math.floor(density * n + 1e-9)))
