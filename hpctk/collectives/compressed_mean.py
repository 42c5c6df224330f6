"""The mean over all ranks of what a compressor carries of their tensors; the rest stays in the residuals.

All tensors travel together: those that are left alone as they are, in one all-reduce; the others by the way that the
compressor's `combines` names (`EXCHANGES`):

- "summed" (Identity, Half, RandomK): one all-reduce of the packets' values;
- "gathered", "signs" (QSGD, Sign): one message of each rank, which every rank decodes in rank order;
- "pairs" (TopK): the chosen elements of all tensors as one sparse vector, in one sparse all-reduce;
- "own" (PowerSGD): the compressor says what to all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_messages import gather_messages
from hpctk.collectives.sparse_allreduce import reduce_pairs
from hpctk.comm import buffers
from hpctk.comm.collective import collective
from hpctk.comm.world import World
from hpctk.compressors.core import finite
from hpctk.compressors.core.compressor import Aggregating, Compressor, Residuals, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.compressors.core.sparse import SparseCompressor
from hpctk.kernels.packing import index_dtype
from hpctk.schedules import ring
from hpctk.telemetry.recorder import Span

Tensors = Mapping[str, torch.Tensor]

#: From this size on a tensor is reduced where it lies: it fills the network by itself, and copying it costs more.
LARGE_BYTES = 2**20


@collective
def compressed_mean(
    here: World,
    tensors: Tensors,
    compressor: Compressor,
    residuals: Residuals | None,
    schedule: str = "auto",
    *,
    checked: bool = False,
) -> None:
    """Replace tensors by the mean over all ranks of what the compressor carries of them.

    In place. All ranks must give the same names, shapes and dtypes.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Contiguous, by parameter name.
    residuals : Residuals or None
        What was not carried before is added first, what is not carried now is left there. None: it is dropped.
    schedule : str
        Of dense all-reduces.
    checked : bool
        Whether all ranks know that `refuse_bad_sums` refuses nothing on any of them: then they need not ask each other.
    """
    excluded = {name: tensor for name, tensor in tensors.items() if compressor.is_excluded(name, tensor)}
    chosen = {name: tensor for name, tensor in tensors.items() if name not in excluded}
    if excluded:
        dense_mean(here, excluded, schedule)
    if not chosen:
        return
    if not checked:
        with here.shared_errors("compressing"):
            refuse_bad_sums(chosen, residuals)
    with engine_of(here).span(
        label(chosen),
        type(compressor).__name__,
        elements=sum(tensor.numel() for tensor in chosen.values()),
        dense_bytes=sum(tensor.numel() * tensor.element_size() for tensor in chosen.values()),
    ) as span:
        EXCHANGES[compressor.combines](Exchange(here, chosen, compressor, residuals, schedule, span))


def label(names: Collection[str], what: str = "tensors") -> str:
    """Return what statistics call some tensors that travel together."""
    return next(iter(names)) if len(names) == 1 else f"{len(names)} {what}"


@collective
def dense_mean(here: World, tensors: Tensors, schedule: str = "auto", what: str = "tensors") -> None:
    """Replace tensors by their mean over all ranks. In place.

    `what` they are, in the plural: for the statistics.
    """
    _dense(here, tensors, "mean", schedule, what)


@collective
def dense_sum(here: World, tensors: Tensors, schedule: str = "auto", what: str = "tensors") -> None:
    """Replace tensors by their sum over all ranks; as `dense_mean`. In place."""
    _dense(here, tensors, "sum", schedule, what)


def _dense(here: World, tensors: Tensors, op: str, schedule: str, what: str) -> None:
    by_dtype: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    engine = engine_of(here)
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() >= LARGE_BYTES and tensor.is_contiguous():
            with engine.span(name):
                reduce_in_place(here, tensor.view(-1), buffers.dtype_of(tensor), op, schedule)
        else:
            by_dtype.setdefault(tensor.dtype, {})[name] = tensor
    for named in by_dtype.values():
        alike = list(named.values())
        with engine.span(label(named, what)) as span:
            with span.staging():
                flat = torch.cat([tensor.reshape(-1) for tensor in alike], out=_scratch(here, alike))
            reduce_in_place(here, flat, buffers.dtype_of(flat), op, schedule)
            parts = flat.split([tensor.numel() for tensor in alike])
            with span.staging():
                torch_private.foreach_copy_(alike, [part.view_as(one) for part, one in zip(parts, alike, strict=True)])


def _scratch(here: World, alike: list[torch.Tensor]) -> torch.Tensor:
    """Return memory to lay tensors of one dtype in; on the host the same in every step, new pages are slow."""
    n = sum(tensor.numel() for tensor in alike)
    if buffers.on_device(alike[0]):
        return alike[0].new_empty(n)
    memory = engine_of(here).workspace("dense_mean", n * alike[0].element_size())
    return torch.from_numpy(memory).view(alike[0].dtype)


def refuse_bad_sums(tensors: Tensors, residuals: Residuals | None) -> None:
    """Raise TensorError where a tensor, or its sum with its residual, is not finite. Changes nothing.

    For all tensors, and shared by all ranks, before anything is taken out of a residual: otherwise what the healthy
    ranks have taken would never be sent.
    """
    for name, tensor in tensors.items():
        if residuals is None or name not in residuals:
            bad = finite.first_bad(tensor.reshape(-1))
        else:
            bad = finite.first_bad_sum(residuals.of(name, tensor).view(-1), tensor.reshape(-1))
        refuse(bad, tensor.numel(), name)


@dataclass(frozen=True)
class Exchange:
    """One mean of what a compressor carries: the arguments of `compressed_mean`, and the span of its calls."""

    here: World
    tensors: Tensors
    compressor: Any
    residuals: Residuals | None
    schedule: str
    span: Span

    def packets(self) -> dict[str, Packet]:
        """Return this rank's packets, by parameter name; residuals are changed in place."""
        compressor, residuals = self.compressor, self.residuals
        with self.span.compressing():
            if residuals is None:
                return {name: compressor.compress(tensor, name) for name, tensor in self.tensors.items()}
            return {name: residuals.feed(compressor, name, tensor) for name, tensor in self.tensors.items()}


def _summed(exchange: Exchange) -> None:
    packets = exchange.packets()
    dense_mean(exchange.here, {name: packet.data for name, packet in packets.items()}, exchange.schedule)
    with exchange.span.decompressing():
        for name, tensor in exchange.tensors.items():
            tensor.copy_(exchange.compressor.decompress(packets[name]))


def _gathered(exchange: Exchange) -> None:
    here, tensors, packets = exchange.here, exchange.tensors, exchange.packets()
    mine = torch.cat([packet.data for packet in packets.values()]).cpu().numpy()
    edges = np.cumsum([0, *(packet.nbytes for packet in packets.values())])
    messages = gather_messages(here, ring.allgather(here.size), mine)
    with exchange.span.decompressing():
        for tensor in tensors.values():
            tensor.zero_()
        for data in messages:
            for (lo, hi), (name, tensor) in zip(pairwise(edges), tensors.items(), strict=True):
                part = torch.from_numpy(data[lo:hi]).to(tensor.device)
                tensor += exchange.compressor.decompress(replace(packets[name], data=part))
        for tensor in tensors.values():
            tensor /= here.size


def _pairs(exchange: Exchange) -> None:
    here, tensors, residuals = exchange.here, exchange.tensors, exchange.residuals
    compressor: SparseCompressor = exchange.compressor
    edges = np.cumsum([0, *(tensor.numel() for tensor in tensors.values())])
    with exchange.span.compressing():
        indices, values = selected(tensors, compressor, residuals, edges)
    counts = [compressor.k(tensor.numel()) for tensor in tensors.values()]
    known = [count for count in counts if count is not None]
    keep = sum(known) if compressor.keep else None
    as_many = len(known) == len(counts)
    found, total, dropped = reduce_pairs(here, indices, values, int(edges[-1]), keep, as_many=as_many)
    with exchange.span.decompressing():
        total /= here.size
        for tensor in tensors.values():
            tensor.zero_()
        _put(list(tensors.values()), edges, found, total)
        if residuals is not None and dropped.any():
            kept_back = [residuals.of(name, tensor) for name, tensor in tensors.items()]
            _put(kept_back, edges, indices[dropped], values[dropped])


def selected(
    tensors: Tensors, compressor: SparseCompressor, residuals: Residuals | None, edges: Any
) -> tuple[Any, Any]:
    """Return the elements that are sent, of all tensors laid one after the other, as host arrays.

    Local. What is returned is taken out of the residuals, in place. `edges` are the bounds of the tensors.
    """
    indices, values = [], []
    dtype = index_dtype(int(edges[-1]))
    for start, (name, tensor) in zip(edges, tensors.items(), strict=False):
        residual = None if residuals is None else residuals.of(name, tensor)
        found, taken = compressor.select(tensor, residual, name)
        indices.append(_host(found).astype(dtype) + dtype.type(start))
        values.append(_wide(_host(taken), tensor.dtype))
    return np.concatenate(indices), np.concatenate(values)


def _host(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array


def _wide(values: Any, dtype: torch.dtype) -> Any:
    """Return values as float32 or float64: half precision is summed in float32."""
    if values.itemsize > 2:
        return values
    return torch.from_numpy(values).view(dtype).float().numpy()


def _put(tensors: list[torch.Tensor], edges: Any, indices: Any, values: Any) -> None:
    """Write the elements of a sparse vector into tensors, laid one after the other."""
    cuts = np.searchsorted(indices, edges)
    for tensor, start, (lo, hi) in zip(tensors, edges, pairwise(cuts), strict=False):
        if lo == hi:
            continue
        where = indices[lo:hi].astype(np.int64) - int(start)
        if tensor.is_cpu and tensor.element_size() > 2:
            tensor.view(-1).numpy()[where] = values[lo:hi]
        else:
            tensor.view(-1)[torch.from_numpy(where).to(tensor.device)] = torch.from_numpy(values[lo:hi]).to(tensor)


def _own(exchange: Exchange) -> None:
    here, tensors, residuals = exchange.here, exchange.tensors, exchange.residuals
    compressor: Aggregating = exchange.compressor
    inputs = {name: tensor.clone() for name, tensor in tensors.items()}
    if residuals is not None:
        kept = {name: residuals.of(name, tensor) for name, tensor in tensors.items()}
        torch_private.foreach_add_(list(inputs.values()), list(kept.values()))
    began, exchanging = time.perf_counter(), 0.0

    def mean(flat: torch.Tensor) -> torch.Tensor:
        nonlocal exchanging
        start = time.perf_counter()
        reduce_in_place(here, flat, buffers.dtype_of(flat), "mean", exchange.schedule)
        exchanging += time.perf_counter() - start
        return flat

    means = compressor.aggregate(inputs, mean)
    exchange.span.spent("compressing_s", time.perf_counter() - began - exchanging)
    # Only now: an aggregate that refuses must leave the residuals as they were.
    for name, tensor in tensors.items():
        tensor.copy_(means[name])
        if residuals is not None:
            kept[name].copy_(inputs[name])


#: How packets combine -> what exchanges them. Each replaces tensors in place and is collective.
EXCHANGES: Mapping[str, Callable[[Exchange], None]] = {
    "summed": _summed,
    "gathered": _gathered,
    "signs": _gathered,
    "pairs": _pairs,
    "own": _own,
}
