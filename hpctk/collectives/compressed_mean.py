"""The mean over all ranks of what a compressor carries of their tensors; the rest stays in the residuals.

All tensors travel together: those that are left alone as they are, in one all-reduce; the others by the way that the
compressor's `combines` names (`EXCHANGES`):

- "summed" (Identity, Half, RandomK): one all-reduce of the packets' values;
- "gathered", "signs", "lists" (QSGD, Sign, ChunkTopK): one message of each rank, which all decode in rank order;
- "pairs" (TopK): the chosen elements of all tensors as one sparse vector, in one sparse all-reduce;
- "own" (PowerSGD): the compressor says what to all-reduce.

With reduce="contributors" the sum of an element is divided by the number of ranks that sent it, not by that of all
(`BY_CONTRIBUTORS`): the same where every rank sends every element, or all ranks the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.dense_mean import Tensors, dense_mean
from hpctk.collectives.engine.call_recording import label
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.collectives.engine.gather_tensors import gather_tensors
from hpctk.collectives.sparse import packets
from hpctk.collectives.sparse_allreduce import reduce_pairs
from hpctk.comm import buffers
from hpctk.comm.collective import collective
from hpctk.comm.world import World
from hpctk.compressors.core import arrays, finite
from hpctk.compressors.core.compressor import Aggregating, Compressor, Residuals, Taken, refuse
from hpctk.compressors.core.packet import Packet
from hpctk.compressors.core.sparse import SparseCompressor
from hpctk.kernels import many, rows
from hpctk.kernels.packing import index_dtype
from hpctk.telemetry.recorder import Span


@collective
def compressed_mean(
    here: World,
    tensors: Tensors,
    compressor: Compressor,
    residuals: Residuals | None,
    schedule: str = "auto",
    *,
    checked: bool = False,
    reduce: str = "mean",
    into: Tensors | None = None,
) -> None:
    """Replace tensors by the mean over all ranks of what the compressor carries of them.

    In place, unless tensors `into` which to write are given. All ranks must give the same names, shapes and dtypes.

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
    reduce : str
        What the sum of an element is divided by: "mean", the number of ranks; "contributors", of those who sent it.
    into : mapping of str to torch.Tensor, optional
        Contiguous, of the same names, shapes and dtypes: takes the result, and the tensors stay as they are.
    """
    layout = layout_of(compressor, tensors)
    targets = tensors if into is None else into
    if layout.excluded:
        dense_mean(here, {name: tensors[name] for name in layout.excluded}, schedule, into=into)
    if not layout.chosen:
        return
    chosen = {name: tensors[name] for name in layout.chosen} if layout.excluded else tensors
    if not checked:
        with here.shared_errors("compressing"):
            refuse_bad_sums(chosen, residuals)
    with engine_of(here).span(
        label(chosen), type(compressor).__name__, elements=int(layout.edges[-1]), dense_bytes=layout.dense_bytes
    ) as span:
        ways = EXCHANGES if reduce == "mean" else BY_CONTRIBUTORS
        targets = {name: targets[name] for name in layout.chosen} if layout.excluded else targets
        ways[compressor.combines](Exchange(here, chosen, targets, compressor, residuals, schedule, span, layout))


class Layout:
    """What a compressor makes of tensors of these names, sizes and dtypes: worked out once, not in every step.

    Attributes
    ----------
    excluded, chosen : list of str
        Who travels as it is, and who is compressed.
    sizes, edges : array
        Of those that are compressed: how many elements, and their bounds where all are laid one after the other.
    counts : array or None
        How many elements are sent of each, where a sparse compressor says so for every size.
    places : array
        Where those of each begin, among all that are sent.
    small : array
        Numbers of the tensors that are short enough to be handled together.
    """

    def __init__(self, compressor: Compressor, tensors: Tensors, known: _Known) -> None:
        self.known = known
        self.excluded = [name for name, tensor in tensors.items() if compressor.is_excluded(name, tensor)]
        spared = set(self.excluded)
        self.chosen = [name for name in tensors if name not in spared]
        chosen = [tensors[name] for name in self.chosen]
        self.sizes = rows.sizes_of(chosen)
        self.edges = rows.edges_of(self.sizes)
        self.dense_bytes = sum(tensor.numel() * tensor.element_size() for tensor in chosen)
        self.small = np.flatnonzero(self.sizes <= rows.SMALL)
        self.large = np.flatnonzero(self.sizes > rows.SMALL)
        #: The residuals that were used last, known to be rows of memory like their tensors.
        self.kept: list[torch.Tensor] = []
        self.counts: Any = None
        if compressor.combines == "pairs":
            by_size = {n: cast(SparseCompressor, compressor).k(n) for n in set(self.sizes.tolist())}
            if None not in by_size.values():
                self.counts = np.array([by_size[n] for n in self.sizes.tolist()], np.int64)
        self.places = rows.edges_of(self.sizes if self.counts is None else self.counts)


#: What a layout goes by: names, sizes and dtypes.
_Known = tuple[list[str], list[int], set[torch.dtype]]
_layouts: WeakKeyDictionary[Compressor, list[Layout]] = WeakKeyDictionary()
#: Layouts that are kept of one compressor: not all parameters have a gradient in every step.
LAYOUTS = 32


def layout_of(compressor: Compressor, tensors: Tensors) -> Layout:
    held = tensors.values()
    known = list(tensors), [tensor.numel() for tensor in held], {tensor.dtype for tensor in held}
    kept = _layouts.setdefault(compressor, [])
    for layout in kept:
        if layout.known == known:
            return layout
    if len(known[2]) > 1:
        # One dtype for all is what optimizers have; others may be laid out otherwise with the same names and sizes.
        return Layout(compressor, tensors, known)
    kept[:] = [Layout(compressor, tensors, known), *kept[: LAYOUTS - 1]]
    return kept[0]


def refuse_bad_sums(tensors: Tensors, residuals: Residuals | None) -> None:
    """Raise TensorError where a tensor, or its sum with its residual, is not finite. Changes nothing.

    For all tensors, and shared by all ranks, before anything is taken out of a residual: otherwise what the healthy
    ranks have taken would never be sent.
    """
    kept = {} if residuals is None else residuals.state_dict()
    named = {name: tensor for name, tensor in tensors.items() if tensor.numel() <= rows.SMALL}
    held, mine = list(named.values()), [kept.get(name) for name in named]
    if held and rows.are_rows(held) and _fit(mine, held):
        bad = rows.first_bad_sum(mine, held, rows.sizes_of(held))
        if bad is not None:
            refuse(bad[1], held[bad[0]].numel(), list(named)[bad[0]])
        tensors = {name: tensor for name, tensor in tensors.items() if name not in named}
    for name, tensor in tensors.items():
        if residuals is None or name not in kept:
            element = finite.first_bad(tensor.reshape(-1))
        else:
            element = finite.first_bad_sum(residuals.of(name, tensor).view(-1), tensor.reshape(-1))
        refuse(element, tensor.numel(), name)


def _fit(residuals: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the residuals that are there are rows of memory just like their tensors."""
    pairs = [(one, like) for one, like in zip(residuals, tensors, strict=True) if one is not None]
    if not all(one.shape == like.shape for one, like in pairs):
        return False
    return rows.are_rows([*tensors[:1], *(one for one, _ in pairs)])


@dataclass(frozen=True)
class Exchange:
    """One mean of what a compressor carries: the arguments of `compressed_mean`, and the span of its calls."""

    here: World
    tensors: Tensors
    #: Where the result goes: the tensors themselves, unless the caller wants to keep those.
    targets: Tensors
    compressor: Any
    residuals: Residuals | None
    schedule: str
    span: Span
    layout: Layout

    def packets(self) -> dict[str, Packet]:
        """Return this rank's packets, by parameter name; residuals are changed in place."""
        compressor, residuals = self.compressor, self.residuals
        with self.span.compressing():
            if residuals is None:
                return {name: compressor.compress(tensor, name) for name, tensor in self.tensors.items()}
            return {name: residuals.feed(compressor, name, tensor) for name, tensor in self.tensors.items()}


def _summed(exchange: Exchange) -> None:
    mine = exchange.packets()
    dense_mean(exchange.here, {name: packet.data for name, packet in mine.items()}, exchange.schedule)
    with exchange.span.decompressing():
        for name, target in exchange.targets.items():
            target.copy_(exchange.compressor.decompress(mine[name]))


def _gathered(exchange: Exchange) -> None:
    messages = _everyone(exchange)
    with exchange.span.decompressing():
        packets.add_up(exchange.targets, exchange.compressor, messages)


def _contributed(exchange: Exchange) -> None:
    messages = _everyone(exchange)
    with exchange.span.decompressing():
        packets.add_up_by_contributors(exchange.targets, exchange.compressor, messages)


def _everyone(exchange: Exchange) -> list[dict[str, Packet]]:
    # Else a tensor's size tells how long its packet is, on all ranks alike.
    lengths_differ = exchange.compressor.combines == "pairs" and exchange.layout.counts is None
    return packets.gather(exchange.here, exchange.packets(), lengths_differ=lengths_differ)


def _pairs(exchange: Exchange) -> None:
    here, residuals, layout = exchange.here, exchange.residuals, exchange.layout
    compressor: SparseCompressor = exchange.compressor
    tensors = list(exchange.tensors.values())
    if not tensors[0].is_cpu:
        if here.size > 1 and not compressor.keep and here.device_group(tensors[0]) is not None:
            _pairs_on_device(exchange)
            return
        here.note_staging(tensors[0])
    with exchange.span.compressing():
        indices, values = selected(exchange.tensors, compressor, residuals, layout.edges, checked=True)
    if residuals is not None and residuals.keeps_taken:
        residuals.taken = Taken(list(exchange.tensors), layout.edges, indices, values)
    as_many = layout.counts is not None
    keep = int(layout.places[-1]) if compressor.keep else None
    found, total, dropped = reduce_pairs(here, indices, values, int(layout.edges[-1]), keep, as_many=as_many)
    with exchange.span.decompressing():
        total /= here.size
        packets.put(list(exchange.targets.values()), layout.edges, found, total, clear=True)
        if residuals is not None and dropped.any():
            kept_back = [residuals.of(name, tensor) for name, tensor in exchange.tensors.items()]
            packets.put(kept_back, layout.edges, indices[dropped], values[dropped])


def _pairs_on_device(exchange: Exchange) -> None:
    """As `_pairs`, by all-gathers of indices and values where they lie."""
    here, residuals, layout = exchange.here, exchange.residuals, exchange.layout
    compressor: SparseCompressor = exchange.compressor
    tensors = list(exchange.tensors.values())
    with exchange.span.compressing():
        parts = [
            compressor.select(x, None if residuals is None else residuals.of(name, x), name)
            for name, x in exchange.tensors.items()
        ]
        starts = layout.edges[:-1].tolist()
        indices = torch.cat([found.long() + start for (found, _), start in zip(parts, starts, strict=True)])
        values = torch.cat([taken for _, taken in parts]).to(arrays.working_dtype(tensors[0].dtype))
    counts = np.full(here.size, len(indices))
    if layout.counts is None:
        counts = gather_rows(here, np.array([len(indices)]))[:, 0]
    everyone = zip(gather_tensors(here, indices, counts), gather_tensors(here, values, counts), strict=True)
    with exchange.span.decompressing():
        total = values.new_zeros(int(layout.edges[-1]))
        for found, taken in everyone:
            total.index_add_(0, found, taken)
        total /= here.size
        for target, part in zip(exchange.targets.values(), total.split(layout.sizes.tolist()), strict=True):
            target.copy_(part.view_as(target))


def selected(
    tensors: Tensors, compressor: SparseCompressor, residuals: Residuals | None, edges: Any, *, checked: bool = False
) -> tuple[Any, Any]:
    """Return the elements that are sent, of all tensors laid one after the other, as host arrays.

    Local. What is returned is taken out of the residuals, in place. `edges` are the bounds of the tensors; `checked`
    says that `refuse_bad_sums` refuses nothing.
    """
    dtype = index_dtype(int(edges[-1]))
    together = _together(tensors, compressor, residuals)
    if together is None:
        parts = [packets.select_one(compressor, name, tensor, residuals) for name, tensor in tensors.items()]
        starts = np.asarray(edges).astype(dtype)
        indices = [found.astype(dtype) + start for (found, _), start in zip(parts, starts, strict=False)]
        return np.concatenate(indices), np.concatenate([values for _, values in parts])
    layout, held, kept = together
    if not checked:
        refuse_bad_sums({layout.chosen[i]: held[i] for i in layout.small}, residuals)
    k, places = int(layout.places[-1]), layout.places
    chosen, values = np.empty(k, dtype), np.empty(k, held[0].numpy().dtype)
    memories = np.zeros(len(held), np.int64) if kept is None else rows.addresses_of(kept)
    gradients = rows.addresses_of(held)
    many.take_largest(memories, gradients, layout.edges, layout.small, layout.counts, places, chosen, values)
    for i in layout.large:
        name = layout.chosen[i]
        lo, hi = places[i], places[i + 1]
        found, values[lo:hi] = packets.select_one(compressor, name, tensors[name], residuals)
        np.add(found, layout.edges[i], out=chosen[lo:hi], casting="unsafe")
    return chosen, values


def _together(
    tensors: Tensors, compressor: SparseCompressor, residuals: Residuals | None
) -> tuple[Layout, list[torch.Tensor], list[torch.Tensor] | None] | None:
    """Return layout, tensors and residuals, where the elements of small ones can be chosen together; else None."""
    if not compressor.takes_largest:
        return None
    layout = layout_of(compressor, tensors)
    if layout.excluded or len(layout.small) < 2:
        return None
    held = list(tensors.values())
    if not rows.are_rows(held):
        return None
    if residuals is None:
        return layout, held, None
    known = residuals.state_dict()
    kept = [known.get(name) for name in tensors]
    if not all(map(is_, kept, layout.kept)) or len(kept) != len(layout.kept):
        layout.kept = [residuals.of(name, tensor) for name, tensor in tensors.items()]
        if not _fit(layout.kept, held):
            layout.kept = []
            return None
    return layout, held, layout.kept


def put_back(residuals: Residuals) -> list[str]:
    """Add to the residuals what was taken out of them last, with what was fed to them; return the names. In place.

    For an exchange that does not count: what is to be sent is all in the residuals then. Only of such that are chosen
    element by element ("pairs").
    """
    taken, residuals.taken = residuals.taken, None
    if taken is None:
        return []
    kept = residuals.state_dict()
    packets.put([kept[name] for name in taken.names], taken.edges, taken.indices, taken.values)
    return taken.names


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
    for name, target in exchange.targets.items():
        target.copy_(means[name])
        if residuals is not None:
            kept[name].copy_(inputs[name])


#: How packets combine -> what exchanges them. Each replaces tensors in place and is collective.
EXCHANGES: Mapping[str, Callable[[Exchange], None]] = {
    "summed": _summed,
    "gathered": _gathered,
    "signs": _gathered,
    "pairs": _pairs,
    "lists": _gathered,
    "own": _own,
}
#: The same where sums are divided by the number of those who sent an element.
BY_CONTRIBUTORS: Mapping[str, Callable[[Exchange], None]] = {**EXCHANGES, "pairs": _contributed, "lists": _contributed}
