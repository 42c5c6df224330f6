"""Error feedback whose residuals are in the parameters: what was not sent is how far they are from x.

    p = the parameters after the base optimizer's own step: y_k - update_k = x - e_k - update_k
    c_k = C(x - p);  c = mean_k c_k;  o = c, or what a server makes of it
    p <- p + c_k - o;  x <- x - o;  so that x - p is the new e_k
    the mean of the residuals is the mean of the parameters

One copy of the model, x, is all that is kept, and few passes over memory are made after the base optimizer's step:

    pairs (TopK)          reads x and p once to choose; moves both at the chosen elements only
    Sign, one or two way  reads x and p once for signs and 1-norm; moves both in a second pass
    others, and servers   write the difference down in the parameters' own memory, where feeding a compressor leaves
                          the residual; beside it room for c and o

In the first two nothing moves before the exchange is over, and known to count on all ranks: where it fails, p still
holds all that has to be sent.

An update that is not finite is not sent, and x is spared. Then the parameters of that rank go back to x, as what they
were before the step is not known any more: what that rank had not sent before is lost with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from hpctk.collectives.compressed_mean import compressed_mean
from hpctk.collectives.dense_mean import dense_mean
from hpctk.collectives.engine.call_recording import label
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.signs import gather_signs, mean_of_signs, sign_packet
from hpctk.collectives.onebit import onebit_allreduce, sign_bytes
from hpctk.collectives.sparse_allreduce import reduce_pairs
from hpctk.comm import buffers
from hpctk.compressors import Compressor, Residuals, sign
from hpctk.compressors.core import finite
from hpctk.compressors.core.compressor import refuse
from hpctk.compressors.core.sparse import SparseCompressor
from hpctk.errors import TensorError
from hpctk.kernels import lean, select, updates
from hpctk.kernels.in_order import add_in_order
from hpctk.kernels.packing import index_dtype
from hpctk.methods.core.flat_buffer import FlatBuffer
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.update_exchange import WHOLE, UpdateExchange, sends_signs


class Part(NamedTuple):
    """One parameter: its name, where it begins in the model as one vector, x and p, both contiguous."""

    name: str
    start: int
    x: torch.Tensor
    p: torch.Tensor

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Of a parameter on the host: x and p as the kernels see them."""
        return self.x.view(-1).numpy(), self.p.view(-1).numpy()


class StepAhead(UpdateExchange):
    """Updates on their way, with residuals in the parameters. See `UpdateExchange`."""

    unsent = (
        "That update was not sent, nor what this rank had left of earlier ones: its parameters are those of "
        "averaged_model()."
    )

    def __init__(self, replica: Replica, compressor: Compressor, server: Compressor | None) -> None:
        super().__init__(replica, compressor, server)
        self._on_host = not buffers.on_device(self.parameters[0])
        #: Room for c and o, once it is needed.
        self._room: FlatBuffer | None = None
        #: Room for the means of what is not compressed, where a rank may be lost before they count.
        self._means: dict[str, torch.Tensor] = {}

    @property
    def defers(self) -> bool:
        """Whether nothing moves before the exchange is over: pairs, and signs one way."""
        signs = sends_signs(self._compressor) and self._on_host
        return self._server is None and (self._compressor.combines == "pairs" or signs)

    def exchange(self, x: FlatBuffer) -> tuple[TensorError | None, Callable[[], None] | None]:
        """Send what lies between the parameters and x; both move by what all ranks have sent."""
        values = self.values
        # A copy of what does not lie in C order, as conv weights in channels_last.
        held = [value if value.is_contiguous() else value.contiguous() for value in values]
        parts = [Part(*part) for part in zip(self.names, x.edges, x.parts, held, strict=False)]

        def write() -> None:
            for value, part in zip(values, parts, strict=True):
                if value is not part.p:
                    value.copy_(part.p)

        try:
            error, move = self._exchange(parts, x)
        finally:
            write()

        def apply() -> None:
            if move is not None:
                move()
                write()

        return error, apply

    def _exchange(self, parts: list[Part], x: FlatBuffer) -> tuple[TensorError | None, Callable[[], None] | None]:
        here = self._replica.world
        # A group that takes device tensors gathers lists of elements where they lie, in `compressed_mean`.
        by_host = self._on_host or here.device_group(x.flat) is None
        if self._compressor.combines == "pairs" and self._server is None and by_host:
            return self._pairs(parts)
        if self._on_host and sends_signs(self._compressor) and (self._server is None or sends_signs(self._server)):
            return self._signs(parts)
        return self._dense(parts), None

    # Pairs

    def _pairs(self, parts: list[Part]) -> tuple[TensorError | None, Callable[[], None]]:
        compressor, here = cast(SparseCompressor, self._compressor), self._replica.world
        spared = [part for part in parts if compressor.is_excluded(part.name, part.p)]
        chosen = [part for part in parts if not compressor.is_excluded(part.name, part.p)]
        moves: list[Callable[[], None]] = []
        with engine_of(here).span(
            label([part.name for part in chosen], "tensors") if chosen else "",
            type(compressor).__name__,
            elements=sum(part.p.numel() for part in chosen),
            dense_bytes=sum(part.p.numel() * part.p.element_size() for part in chosen),
        ) as span:
            edges = np.cumsum([0, *(part.p.numel() for part in chosen)])
            if chosen and not chosen[0].p.is_cpu:
                here.note_staging(chosen[0].p)
            with span.compressing():
                (indices, values), error = self._with_error(parts, spared, lambda: _picked(compressor, chosen, edges))
            if chosen:
                counts = [compressor.k(part.p.numel()) for part in chosen]
                known = [count for count in counts if count is not None]
                keep = sum(known) if compressor.keep else None
                as_many = len(known) == len(counts)
                found, total, dropped = reduce_pairs(here, indices, values, int(edges[-1]), keep, as_many=as_many)
                with span.decompressing():
                    sent, mean = indices[~dropped] if dropped.any() else indices, total / here.size
                moves.append(lambda: _move_at(chosen, edges, sent, found, mean))
        moves.append(self._mean_of(spared))
        return error, lambda: _each(moves)

    def _with_error(self, parts: list[Part], spared: list[Part], look: Any) -> tuple[Any, TensorError | None]:
        """Return what `look` returns, and the error for which the parameters were first put back to x, if any."""
        try:
            _refuse_bad([(part.name, part.p) for part in spared])
            return look(), None
        except TensorError as error:
            # The others are on their way into the exchange: take part, with nothing to send.
            for part in parts:
                part.p.copy_(part.x)
            return look(), error

    def _mean_of(self, spared: list[Part]) -> Callable[[], None]:
        """Find the mean of what all ranks hold: all of it is sent, so nothing stays behind. Collective.

        Return what lets x, and the parameters, be that mean.
        """
        into = named = {part.name: part.p for part in spared}
        if spared:
            if self._replica.survival is not None:
                into = self._means = self._means or {name: torch.empty_like(p) for name, p in named.items()}
            dense_mean(self._replica.world, named, self._replica.schedule, "updates", into)

        def move() -> None:
            for part in spared:
                part.x.copy_(into[part.name])
                if into is not named:
                    part.p.copy_(part.x)

        return move

    # Signs

    def _signs(self, parts: list[Part]) -> tuple[TensorError | None, Callable[[], None]]:
        here, n = self._replica.world, self._n
        signed, spared = parts[: self._signed], parts[self._signed :]
        moves: list[Callable[[], None]] = []
        with engine_of(here).span(WHOLE) as span:
            with span.compressing():
                (packed, scale), error = self._with_error(parts, spared, lambda: _packed(signed, n))
            if n:
                rows, scales = self._common_signs(packed, scale, parts[0].p)

                def move() -> None:
                    for part in signed:
                        lean.move_by_signs(*part.arrays, part.start, packed, scale, rows, scales)

                moves.append(move)
        moves.append(self._mean_of(spared))
        return error, lambda: _each(moves)

    def _common_signs(self, packed: Any, scale: float, like: torch.Tensor) -> tuple[Any, list[float]]:
        """Return rows of packed signs and their scales, of which o is the sum. Collective over the communicator."""
        here = self._replica.world
        if self._two_way:
            common, size = onebit_allreduce(here, packed.copy(), scale, self._n, self.shard.numpy())
            return common[None], [size]
        everyone = gather_signs(here, sign_packet(scale, packed, self._n, like.dtype))
        return np.stack([signs.numpy() for _, signs in everyone]), [each / here.size for each, _ in everyone]

    # Everything else

    def _dense(self, parts: list[Part]) -> TensorError | None:
        """Feed the compressor with the difference, formed where the parameters are, which leaves e_k there."""
        room = self._room = self._room or FlatBuffer(self.parameters)
        error, moves = None, False
        for part in parts:
            torch.sub(part.x, part.p, out=part.p)
        try:
            try:
                _refuse_bad([(part.name, part.p) for part in parts])
            except TensorError as bad:
                error = bad
                for part in parts:
                    part.p.zero_()
            if sends_signs(self._compressor):
                self._mean_of_signs(parts, room)
            else:
                self._mean_of_packets(parts, room)
            if not self._two_way:
                self._serve(room)
            moves = True
        finally:
            _move_and_write(parts, room, moves=moves)
        return error

    def _mean_of_packets(self, parts: list[Part], room: FlatBuffer) -> None:
        """Write c into the room; leave in the parameters' memory what was not sent of the difference there."""
        room.flat.zero_()
        for part, c in zip(parts, room.parts, strict=True):
            if self._compressor.is_excluded(part.name, part.p):
                c.copy_(part.p)
                part.p.zero_()
        residuals = Residuals((part.name, part.p) for part in parts)
        named = self._by_name(room.parts)
        compressed_mean(self._replica.world, named, self._compressor, residuals, self._replica.schedule, checked=True)

    def _mean_of_signs(self, parts: list[Part], room: FlatBuffer) -> None:
        """Write c, or o where signs travel both ways, into the room; else as `_mean_of_packets`."""
        here, n, whole = self._replica.world, self._n, room.flat[: self._n]
        for part, c in zip(parts, room.parts, strict=True):
            c.copy_(part.p)
            part.p.zero_()
        self._mean_of_spared(room.parts)
        if not n:
            return
        with engine_of(here).span(WHOLE) as span:
            with span.compressing():
                packet = self._compressor.compress(whole, WHOLE)
                scale, own = sign.read(packet)
                sign.add(own, -scale, whole)
                for part, left in zip(parts[: self._signed], room.parts, strict=False):
                    part.p.copy_(left)
            if not self._two_way:
                mean_of_signs(here, packet, whole)
                return
            if not own.is_cpu:
                here.note_staging(own)
            packed, common = onebit_allreduce(here, own.cpu().numpy(), scale, n, self.shard.numpy())
            with span.decompressing():
                sign.add(torch.from_numpy(packed).to(whole.device), common, whole.zero_())

    def average(self, x: FlatBuffer) -> None:
        """Replace the parameters by their mean over the ranks: x is the same on all, so residuals are, too.

        Collective over the communicator. In place.
        """
        named = {
            f"residual of {name}": value
            for name, value in self._by_name(self.values).items()
            if not self._compressor.is_excluded(name, value)
        }
        dense_mean(self._replica.world, named, self._replica.schedule, "residuals")

    def state_dict(self, aside: Mapping[str, torch.Tensor] | None) -> dict[str, Any]:
        """Return the parameters, the server's residual, and what the compressors remember; not copies."""
        parameters = self._by_name(self.values) if aside is None else dict(aside)
        return {"parameters": parameters, **super().state_dict(aside)}

    def load_state_dict(self, state: Mapping[str, Any], x: FlatBuffer) -> None:
        """Go on from copies of what `state_dict` returned; writes the parameters."""
        restore(self._by_name(self.values), state["parameters"], "the parameters")
        super().load_state_dict(state, x)

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return parameters whose mean over the ranks is what it was, and this rank's part of the server's residual."""
        return {"parameters": reshard(earlier.each("parameters"), earlier.size), **super().resized_state(earlier)}


def _each(moves: list[Callable[[], None]]) -> None:
    for move in moves:
        move()


def _refuse_bad(named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise TensorError where a tensor is not finite."""
    for name, tensor in named:
        refuse(finite.first_bad(tensor.view(-1)), tensor.numel(), name)


def _picked(compressor: SparseCompressor, parts: list[Part], edges: Any) -> tuple[Any, Any]:
    """Return what is sent of x - p, of all tensors laid one after the other, as host arrays. Changes nothing."""
    dtype = index_dtype(int(edges[-1]))
    indices, values = [np.empty(0, dtype)], []
    for part, start in zip(parts, edges, strict=False):
        found, taken = (_host(each) for each in compressor.pick(part.x, part.p, part.name, minus=True))
        indices.append(found.astype(dtype, copy=False) + dtype.type(start))
        values.append(taken)
    return np.concatenate(indices), np.concatenate(values) if values else np.empty(0)


def _host(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array


def _move_at(parts: list[Part], edges: Any, sent: Any, indices: Any, values: Any) -> None:
    """Let p be x where it was sent; then move both by a sparse vector. In place."""
    own, all_ranks = np.searchsorted(sent, edges), np.searchsorted(indices, edges)
    for part, start, (a, b), (lo, hi) in zip(parts, edges, pairwise(own), pairwise(all_ranks), strict=False):
        if part.x.is_cpu:
            lean.move_at(*part.arrays, int(start), sent[a:b], indices[lo:hi], values[lo:hi])
            continue
        x, p = part.x.view(-1), part.p.view(-1)
        here, there = (torch.from_numpy(each - int(start)).to(x.device) for each in (sent[a:b], indices[lo:hi]))
        p[here] = x[here]
        for moved in (x, p):
            moved[there] -= torch.from_numpy(values[lo:hi]).to(x)


def _packed(parts: list[Part], n: int) -> tuple[Any, float]:
    """Return the packed signs of x - p, of all tensors laid one after the other, and its mean magnitude."""
    packed = np.zeros(sign_bytes(n), np.uint8)
    if not n:
        return packed, 0.0
    kind = np.dtype(parts[0].arrays[0].dtype)
    norm = add_in_order(lean.pack_signs(*part.arrays, part.start, packed) for part in parts)
    if not math.isfinite(norm):
        for part in parts:
            bad = select.first_not_finite(*part.arrays, minus=True)
            refuse(None if bad < 0 else bad, part.p.numel(), part.name)
        # A mean is no larger than the largest: divide before summing.
        mean = add_in_order(float(((part.x - part.p).abs() / n).sum()) for part in parts)
        return packed, min(mean, float(np.finfo(kind).max))
    # In the elements' precision at once: what travels is what is taken out of the difference.
    return packed, float(kind.type(norm / n))


def _move_and_write(parts: list[Part], room: FlatBuffer, *, moves: bool) -> None:
    """Move x by what is in the room, if it `moves`; write x - e_k into the parameters, whose memory holds e_k."""
    for part, move in zip(parts, room.parts, strict=True):
        if part.x.is_cpu:
            updates.move_ahead(part.arrays[0], move.view(-1).numpy() if moves else None, part.arrays[1])
            continue
        if moves:
            part.x.sub_(move)
        torch.sub(part.x, part.p, out=part.p)
