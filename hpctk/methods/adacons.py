"""AdaCons: gradients weighted by how much their worker agrees with all.

Choukroun, Azoulay, Kisilev, "Adaptive Consensus Gradients Aggregation for Scaled Distributed Training", arXiv
2411.03742.

    u_i = g_i / (||g_i|| + eps),  alpha_i = <u_i, mean g>
    sorted ascending, momentum on the sorted values: m = beta m + (1 - beta) s; un-sorted, divided by their sum
    out = sum_i a_i u_i, times the scale:  "mean_norm" mean_j ||g_j||,  "unit" 1,  "coefficients" sum_i w_i g_i

What travels: gradients, every step, for the volume of one all-reduce (collectives/consensus.py has the
schedule, collectives/consensus_weights.py the weights). Where the weights make no sense (opposed gradients),
the plain mean is used for that step and counted as a fallback.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch

from hpctk import torch_private
from hpctk.collectives.bucket_result import BucketResult
from hpctk.collectives.consensus import Part, aggregate_in_place, finish
from hpctk.collectives.engine.consensus_weights import MOMENTUM, SCALE, ConsensusState
from hpctk.collectives.engine.engine import engine_of
from hpctk.methods.core.method import GradientMethod
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.run import BucketRun
from hpctk.methods.core.survival import Undo
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class AdaCons(GradientMethod):
    """Weigh gradients by their agreement with the consensus.

    It helps where a few large gradients spoil the mean, as in its authors' regression; so does Mean(unit_norm=True).
    On images and text it needed as many samples as Mean; no scale was better than the others everywhere
    (benchmarks/RESULTS.md).
    """

    summary: ClassVar[str] = "gradients weighted by their agreement, for one all-reduce's bytes"

    momentum: float = MOMENTUM.field(0.99)
    scale: str = SCALE.field("mean_norm")
    layerwise: bool = setting(False, "whether every tensor gets weights of its own")

    def begin(self, replica: Replica) -> AdaConsRun:
        """Return AdaCons at work on a replica."""
        return AdaConsRun(self, replica)


class AdaConsRun(BucketRun):
    """AdaCons at work on one rank."""

    def __init__(self, settings: AdaCons, replica: Replica) -> None:
        super().__init__(replica)
        self._settings = settings
        #: The sorted momentum of each tensor by name, or of the whole model under "": the same on all ranks.
        self.momentum: dict[str, Any] = {}
        #: What the last exchange made of it, and its fallbacks.
        self._next: tuple[dict[str, Any], int] = {}, 0

    def exchange(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace gradients by their weighted sum. Collective over the communicator. In place."""
        torch_private.foreach_copy_(list(gradients.values()), self._aggregated(gradients))

    def exchange_into(self, gradients: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        """Write their weighted sum into tensors like the gradients; `commit` does so where they are given themselves.

        Collective over the communicator.
        """
        write = partial(torch_private.foreach_copy_, list(into.values()), self._aggregated(gradients))
        if self._in_place(gradients, into):
            self._unwritten.append(write)
        else:
            write()

    def expendable(self, gradients: dict[str, torch.Tensor], *, scaled: bool) -> Collection[str]:
        """Return the names of all, as the result lies beside them, unless it is going to be scaled. Local."""
        return () if scaled else list(gradients)

    def _aggregated(self, gradients: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return their weighted sum, until the next one. Collective over the communicator. Not in place."""
        tensors = list(gradients.values())
        edges = [0, *accumulate(tensor.numel() for tensor in tensors)]
        if not tensors[0].is_cpu:
            self.replica.world.note_staging(tensors[0])
        flat = self._room(tensors[0], edges[-1])
        parts = [flat[lo:hi].view(tensor.shape) for (lo, hi), tensor in zip(pairwise(edges), tensors, strict=True)]
        torch_private.foreach_copy_(parts, tensors)
        # A tensor without a gradient in this step is not there: momentum goes by names, not by places.
        names = list(gradients) if self._settings.layerwise else [""]
        groups = edges if self._settings.layerwise else [0, edges[-1]]
        state = self._state(names)
        aggregate_in_place(
            self.replica.world, flat.numpy(), groups, state, self._settings.momentum, self._settings.scale
        )
        self._remember(names, state)
        return parts

    @property
    def by_buckets(self) -> bool:
        """Parts are exchanged during backward; the weights, and the rest, follow when all are there."""
        return True

    def start_bucket(self, lane: int, gradients: dict[str, torch.Tensor], *, in_order: bool = False) -> Part:
        """Start exchanging the parts of some gradients. Collective over the communicator. Not in place."""
        here = self.replica.world
        whole = self.memory.joined(lane, gradients.values())
        if not whole.is_cpu:
            here.note_staging(whole)
        flat = whole.cpu().numpy()
        edges, members = [0, len(flat)], [0]
        if self._settings.layerwise:
            edges = [0, *accumulate(gradient.numel() for gradient in gradients.values())]
            places = {name: place for place, name in enumerate(self.replica.names)}
            members = [places[name] for name in gradients]
        return Part(here, flat, edges, members, self.memory.room(lane, Part.room_bytes(here, flat)), lane)

    def finish_buckets(self, buckets: list[Any], has: set[str]) -> list[BucketResult]:
        """Return the weighted sums. Collective over the communicator."""
        names = self.replica.names if self._settings.layerwise else [""]
        state = self._state(names)
        # A tensor without a gradient on any rank makes no step, so its momentum does not move.
        absent = {g for g, name in enumerate(names) if self._settings.layerwise and name not in has}
        finish(buckets, len(names), state, self._settings.momentum, self._settings.scale, absent)
        self._remember(names, state)
        return [BucketResult(torch.from_numpy(part.flat)) for part in buckets]

    def _state(self, names: list[str]) -> ConsensusState:
        return ConsensusState({g: self.momentum[name] for g, name in enumerate(names) if name in self.momentum})

    def _remember(self, names: list[str], state: ConsensusState) -> None:
        self._next = {names[g]: momentum for g, momentum in state.sorted_momentum.items()}, state.fallbacks

    def commit(self) -> None:
        """Keep the momentum of the last exchange."""
        super().commit()
        momentum, fallbacks = self._next
        self.momentum |= momentum
        self.counts["fallbacks"] += fallbacks

    def _room(self, like: torch.Tensor, n: int) -> torch.Tensor:
        room = engine_of(self.replica.world).workspace("adacons", n * like.element_size())
        return torch.from_numpy(room).view(like.dtype)

    def undo(self) -> Undo:
        """Return what does nothing: an exchange changes nothing that lasts before it is committed."""
        return lambda: None

    def local_state(self) -> dict[str, Any]:
        """Return the momentum of the sorted agreements."""
        return {"momentum": {name: torch.from_numpy(kept) for name, kept in self.momentum.items()}}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        self.momentum = {name: kept.numpy().copy() for name, kept in state["momentum"].items()}
