"""The mean of what a compressor carries, in buckets of tensors that leave one after the other.

The result is that of `compressed_mean` of all tensors at once:

- "gathered", "signs", "lists": a bucket's packets are all-gathered, decoded in rank order at the end: the same bits;
- "pairs": a bucket's elements are all-gathered where those of the whole model would be (or between two ranks, whose
  sums know one order), and merged at the end; elsewhere they are only chosen early, and summed at the end as one
  sparse vector: the same bits;
- "summed", and tensors that are left alone: a bucket's all-reduce. Between two ranks the same bits; among more as far
  as the schedule adds in an order that does not depend on where an element lies (recursive_doubling), else to rounding.

Nothing that lasts changes before `commit`: residuals are fed as copies, draws are counted again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from hpctk.collectives.allreduce import start_in_place
from hpctk.collectives.compressed_mean import Layout, layout_of, selected
from hpctk.collectives.dense_mean import Tensors
from hpctk.collectives.engine.call_recording import label
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_messages import Messages
from hpctk.collectives.engine.gather_tensors import start_on_device
from hpctk.collectives.engine.handle import Handle
from hpctk.collectives.sparse.packets import put
from hpctk.collectives.sparse_allreduce import choose_lists, reduce_pairs, summed_pairs
from hpctk.comm import buffers
from hpctk.comm.world import World
from hpctk.compressors.core import arrays, sparse
from hpctk.compressors.core.compressor import Compressor, Residuals
from hpctk.compressors.core.packet import Packet
from hpctk.compressors.core.sparse import SparseCompressor
from hpctk.errors import TensorError
from hpctk.kernels import rows
from hpctk.kernels.packing import index_dtype
from hpctk.schedules import ring

Pairs = tuple[Any, Any]


@dataclass
class Bucket:
    """Some tensors under way.

    Attributes
    ----------
    sizes : dict
        How many elements each tensor has, in the order of the result.
    packets : dict
        This rank's, where there are packets.
    pairs : (indices, values) or None
        This rank's elements, where those are chosen.
    chosen, excluded : Handle or None
        What travels of the tensors that are compressed, and of the others.
    state : dict
        What the compressor is to remember of these tensors once the step is made.
    """

    sizes: dict[str, int]
    layout: Layout
    like: torch.Tensor
    packets: dict[str, Packet] = field(default_factory=dict)
    pairs: Pairs | None = None
    chosen: Handle | None = None
    excluded: Handle | None = None
    state: dict[str, Any] = field(default_factory=dict)


class BucketedMean:
    """The exchange of one model's gradients, bucket by bucket.

    Collective over the communicator to make.

    Parameters
    ----------
    here : World
    compressor : Compressor
        One whose packets are not of its own kind ("own").
    residuals : Residuals or None
        As in `compressed_mean`.
    schedule : str
        Of dense all-reduces.
    like : mapping of str to torch.Tensor
        All tensors of the model, in its order.
    """

    def __init__(
        self, here: World, compressor: Compressor, residuals: Residuals | None, schedule: str, like: Tensors
    ) -> None:
        self._here, self._compressor, self._residuals, self._schedule = here, compressor, residuals, schedule
        self._places = {name: i for i, name in enumerate(like)}
        #: Copies of the residuals that the buckets under way have changed; swapped for them by `commit`.
        self._pending = Residuals()
        self._after: tuple[list[str], dict[str, Any]] = [], {}
        self._gathers = here.size > 1 and compressor.combines == "pairs" and self._worth_gathering(like)

    def _worth_gathering(self, like: Tensors) -> bool:
        layout = layout_of(self._compressor, like)
        if not layout.chosen or layout.counts is None:
            return bool(layout.chosen)
        wide = arrays.working_dtype(next(iter(like.values())).dtype)
        return self._lists_are_gathered(int(layout.edges[-1]), int(layout.places[-1]), wide.itemsize)

    def _lists_are_gathered(self, n: int, k: int, itemsize: int) -> bool:
        """Return whether an all-gather of lists gives the bits of the sparse all-reduce of k of n elements."""
        keep = k if self._sparse.keep else None
        chosen = choose_lists(self._here, n, k, keep, itemsize)
        return chosen == "allgather" or (self._here.size == 2 and keep is None and chosen != "dense")

    @property
    def _sparse(self) -> SparseCompressor:
        return cast(SparseCompressor, self._compressor)

    def start(self, lane: int, tensors: dict[str, torch.Tensor], *, in_order: bool = False) -> Bucket:
        """Compress some tensors and let them leave. Collective over the communicator. Not in place.

        `lane` and the one after it are the engine's, reserved for this bucket.
        """
        here, compressor = self._here, self._compressor
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        # In the model's order, in which elements have their indices.
        ordered = {name: tensors[name].contiguous() for name in sorted(tensors, key=self._places.__getitem__)}
        layout = layout_of(compressor, ordered)
        bucket = Bucket(sizes, layout, next(iter(tensors.values())))
        if layout.excluded:
            flat = torch.cat([ordered[name].reshape(-1) for name in layout.excluded])
            bucket.excluded = self._reduced(flat, None if in_order else lane + 1)
        if not layout.chosen:
            return bucket
        chosen = {name: ordered[name] for name in layout.chosen}
        before = compressor.state_dict()
        names = label(chosen)
        with engine_of(here).span(
            names, type(compressor).__name__, elements=int(layout.edges[-1]), dense_bytes=layout.dense_bytes
        ) as span:
            with span.compressing():
                try:
                    self._compress(bucket, chosen)
                except TensorError:
                    # A sum that overflows: this rank finds it once more when the step is opened, and all ranks raise.
                    if before:
                        compressor.load_state_dict(before)
                    self._compress(bucket, {name: torch.zeros_like(x) for name, x in chosen.items()}, cleared=True)
            self._leave(bucket, lane, in_order=in_order)
        if before or compressor.state_dict():
            after = compressor.state_dict()
            bucket.state = {name: after[name] for name in chosen if name in after}
            compressor.load_state_dict(before)
        return bucket

    def _compress(self, bucket: Bucket, tensors: Tensors, *, cleared: bool = False) -> None:
        residuals = self._copied(tensors, cleared=cleared)
        if self._compressor.combines == "pairs":
            if not bucket.like.is_cpu:
                self._here.note_staging(bucket.like)
            bucket.pairs = selected(tensors, self._sparse, residuals, bucket.layout.edges)
        elif residuals is None:
            bucket.packets = {name: self._compressor.compress(x, name) for name, x in tensors.items()}
        else:
            bucket.packets = {name: residuals.feed(self._compressor, name, x) for name, x in tensors.items()}

    def _copied(self, tensors: Tensors, *, cleared: bool) -> Residuals | None:
        """Return copies of the residuals, in memory that is kept from step to step."""
        if self._residuals is None:
            return None
        for name, tensor in tensors.items():
            copy = self._pending.of(name, tensor)
            if cleared or name not in self._residuals:
                copy.zero_()
            else:
                copy.copy_(self._residuals.of(name, tensor))
        return self._pending

    def _leave(self, bucket: Bucket, lane: int, *, in_order: bool) -> None:
        if bucket.pairs is not None:
            if self._gathers:
                bucket.chosen = self._gathered(self._written(bucket, *bucket.pairs), lane)
            return
        data = torch.cat([packet.data for packet in bucket.packets.values()])
        if self._compressor.combines == "summed":
            bucket.chosen = self._reduced(data, None if in_order else lane)
        else:
            bucket.chosen = self._gathered_packets(data, lane)

    def _reduced(self, flat: torch.Tensor, lane: int | None) -> Handle:
        return start_in_place(self._here, flat, buffers.dtype_of(flat), "mean", self._schedule, lane)

    def _gathered_packets(self, data: torch.Tensor, lane: int) -> Handle:
        here = self._here
        if not data.is_cpu:
            group = here.device_group(data) if here.size > 1 else None
            if group is not None:
                # Packets of tensors of the same sizes are of one length.
                return start_on_device(here, group, data, np.full(here.size, data.numel()))
            here.note_staging(data)
        return self._gathered(data.cpu().numpy(), lane)

    def _gathered(self, message: Any, lane: int) -> Handle:
        here = self._here
        messages = Messages(here.size)
        messages.data[here.rank] = message
        plan = ring.allgather(here.size)
        return engine_of(here).handle_ragged(
            plan, messages, lambda: messages.data, payload_bytes=len(message), lane=lane
        )

    def finish(self, buckets: list[Bucket], has: set[str]) -> list[torch.Tensor]:
        """Return what came of each bucket, flat, its tensors in the order given. Collective over the communicator.

        `has` names the tensors that are there on some rank; of the others nothing is changed.
        """
        state = {name: kept for bucket in buckets for name, kept in bucket.state.items() if name in has}
        chosen = (name for bucket in buckets for name in bucket.layout.chosen if name in has)
        self._after = sorted(chosen, key=self._places.__getitem__), state
        results: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            self._finish_excluded(bucket, results)
        if self._compressor.combines == "pairs":
            self._finish_pairs(buckets, has, results)
        else:
            finish = self._finish_summed if self._compressor.combines == "summed" else self._finish_gathered
            for bucket in buckets:
                finish(bucket, results)
        return [torch.cat([results[name].reshape(-1) for name in bucket.sizes]) for bucket in buckets]

    def _finish_excluded(self, bucket: Bucket, results: dict[str, torch.Tensor]) -> None:
        if bucket.excluded is not None:
            names = bucket.layout.excluded
            parts = bucket.excluded.wait().split([bucket.sizes[name] for name in names])
            results.update(zip(names, parts, strict=True))

    def _finish_summed(self, bucket: Bucket, results: dict[str, torch.Tensor]) -> None:
        if bucket.chosen is None:
            return
        parts = bucket.chosen.wait().split([packet.data.numel() for packet in bucket.packets.values()])
        for (name, packet), part in zip(bucket.packets.items(), parts, strict=True):
            results[name] = self._compressor.decompress(replace(packet, data=part))

    def _finish_gathered(self, bucket: Bucket, results: dict[str, torch.Tensor]) -> None:
        if bucket.chosen is None:
            return
        packets = bucket.packets
        edges = np.cumsum([0, *(packet.nbytes for packet in packets.values())])
        sums = {name: bucket.like.new_zeros(packet.shape) for name, packet in packets.items()}
        for data in bucket.chosen.wait():
            for (lo, hi), (name, packet) in zip(pairwise(edges), packets.items(), strict=True):
                part = torch.as_tensor(data[lo:hi]).to(bucket.like.device)
                self._compressor.add_to(sums[name].view(-1), replace(packet, data=part))
        for total in sums.values():
            total /= self._here.size
        results.update(sums)

    def _finish_pairs(self, buckets: list[Bucket], has: set[str], results: dict[str, torch.Tensor]) -> None:
        here, compressor = self._here, self._sparse
        gathered = [bucket.chosen.wait() if bucket.chosen is not None else None for bucket in buckets]
        names = sorted((n for b in buckets for n in b.layout.chosen), key=self._places.__getitem__)
        sizes = {name: bucket.sizes[name] for bucket in buckets for name in bucket.layout.chosen}
        for bucket in buckets:
            results.update((name, bucket.like.new_zeros(sizes[name])) for name in bucket.layout.chosen)
        whole = _Whole([name for name in names if name in has], sizes)
        if not whole.names:
            return
        mine = whole.joined(buckets, [bucket.pairs for bucket in buckets if bucket.pairs is not None])
        as_many = all(bucket.layout.counts is not None for bucket in buckets)
        keep = len(mine[0]) if compressor.keep else None
        found: Any = None
        if self._gathers:
            lists = [
                whole.joined(buckets, [self._read(b, g[rank]) for b, g in zip(buckets, gathered, strict=True) if g])
                for rank in range(here.size)
            ]
            most = max(len(indices) for indices, _ in lists)
            if self._lists_are_gathered(whole.n, most, mine[1].itemsize):
                found, total, dropped = summed_pairs(lists, whole.n, keep, mine[0])
            elif not as_many:
                # All ranks know: the next buckets are only chosen early.
                self._gathers = False
        if found is None:
            found, total, dropped = reduce_pairs(here, *mine, whole.n, keep, as_many=as_many)
        total /= here.size
        put([results[name] for name in whole.names], whole.edges, found, total)
        if self._residuals is not None and dropped.any():
            fed = self._pending.state_dict()
            put([fed[name] for name in whole.names], whole.edges, mine[0][dropped], mine[1][dropped])

    def _written(self, bucket: Bucket, indices: Any, values: Any) -> Any:
        n = int(bucket.layout.edges[-1])
        if not sparse.turns_dense(len(indices), n, values.itemsize):
            return sparse.write(indices, values, n)
        # Not as a dense vector, in which zeros that were chosen look like those that were not.
        return np.concatenate([values.view(np.uint8), indices.view(np.uint8)])

    def _read(self, bucket: Bucket, data: Any) -> Pairs:
        n = int(bucket.layout.edges[-1])
        assert bucket.pairs is not None
        indices, values = bucket.pairs
        k, rest = divmod(len(data), indices.itemsize + values.itemsize)
        if rest or not sparse.turns_dense(k, n, values.itemsize):
            return sparse.read(data, n, values.dtype.name)
        cut = k * values.itemsize
        return data[cut:].copy().view(indices.dtype), data[:cut].copy().view(values.dtype)

    def commit(self) -> None:
        """Keep what the buckets that were finished last have left behind. Local."""
        (names, state), self._after = self._after, ([], {})
        if self._residuals is not None:
            self._residuals.swap(self._pending, names)
        if state:
            self._compressor.load_state_dict({**self._compressor.state_dict(), **state})


class _Whole:
    """The tensors of all buckets, laid one after the other in the model's order."""

    def __init__(self, names: list[str], sizes: Mapping[str, int]) -> None:
        self.names = names
        self.edges = rows.edges_of(np.array([sizes[name] for name in names], np.int64))
        self.n = int(self.edges[-1])
        self._starts = dict(zip(names, self.edges.tolist(), strict=False))

    def joined(self, buckets: list[Bucket], lists: Iterable[Pairs]) -> Pairs:
        """Return the elements of all buckets as one sparse vector; those of tensors that are left out are dropped."""
        indices, values = [], []
        members = (bucket.layout for bucket in buckets if bucket.pairs is not None)
        for layout, (found, taken) in zip(members, lists, strict=True):
            cuts = np.diff(np.searchsorted(found, layout.edges))
            starts = np.array([self._starts.get(name, -1) for name in layout.chosen], np.int64)
            moved = found.astype(np.int64) + np.repeat(starts - layout.edges[:-1], cuts)
            there = np.repeat(starts >= 0, cuts)
            indices.append(moved[there])
            values.append(taken[there])
        joined, its_values = np.concatenate(indices), np.concatenate(values)
        if len(joined) > 1 and not (joined[1:] > joined[:-1]).all():
            order = np.argsort(joined, kind="stable")
            joined, its_values = joined[order], its_values[order]
        return joined.astype(index_dtype(self.n)), its_values
