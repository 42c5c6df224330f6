"""EF21: every rank sends how its momentum differs from what the others think it is.

Fatkhullin, Tyurin, Richtarik, "Momentum Provably Improves Error Feedback!", NeurIPS 2023, arXiv 2305.15155; without
momentum: Richtarik, Sokolov, Fatkhullin, "EF21", NeurIPS 2021, arXiv 2106.05203. v_i is rank i's momentum, h_i the
estimate of it that the others have, h = mean_i h_i the same on all ranks:

    v_i <- momentum*v_i + (1 - momentum)*g_i     (v_i = g_i in the first step)
    c_i = C(v_i - h_i);  h_i <- h_i + c_i;  h <- h + mean_i c_i
    the base optimizer sees h

What the compressor leaves out needs no residual: it is in v_i - h_i in the next step, too. An element that does not
travel is applied all the same, with its last known value; with Mean(TopK) it is applied only when it travels. The
momentum is inside: take a base SGD without. Sparse gradients (embeddings) are the bad case, for what was seen once is
applied until a message corrects it: spare such tensors (`exclude=`).

What travels: the packets of Mean with the same compressor, every step; one dense all-reduce at first (start="dense").
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hpctk.collectives.compressed_mean import compressed_mean, refuse_bad_sums
from hpctk.collectives.dense_mean import dense_mean
from hpctk.compressors import A_COMPRESSOR, Compressor, Residuals, by_name
from hpctk.errors import SettingError
from hpctk.log import log
from hpctk.methods.core.method import GradientMethod
from hpctk.methods.core.replica import Gradients, Replica
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.run import GradientRun
from hpctk.methods.core.survival import Undo, copied
from hpctk.settings import documented, required, setting

Tensors = dict[str, torch.Tensor]


@documented
@dataclass(frozen=True)
class EF21(GradientMethod):
    """Exchange compressed differences between momentum and its estimate."""

    summary: ClassVar[str] = "compressed differences to an estimate of the momentum"

    compressor: Compressor = field(
        metadata=required("of the differences; not PowerSGD, not keep=True", parser=by_name, allowed=A_COMPRESSOR)
    )
    momentum: float = setting(0.9, "memory of the gradient, 0 for none", at_least=0, below=1)
    start: str = setting("dense", 'the first message: "dense", or compressed ("zero")', choices=("dense", "zero"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compressor.combines == "own" or self.compressor.settings().get("keep"):
            raise SettingError(f"compressor={self.compressor!r}: what it brings back is no mean of what the ranks sent")
        if not self.compressor.contracts:
            log.warning("EF21 with %r: the estimate need not follow the momentum; TopK's does", self.compressor)

    def begin(self, replica: Replica) -> Ef21Run:
        """Return EF21 at work on a replica."""
        return Ef21Run(self, replica)


class Ef21Run(GradientRun):
    """EF21 at work on one rank.

    Attributes
    ----------
    momentum, estimate, mean : dict of str to torch.Tensor
        v_i, h_i and h, of every parameter that had a gradient on some rank.
    """

    def __init__(self, settings: EF21, replica: Replica) -> None:
        super().__init__(replica)
        self._settings = settings
        self._compressor = deepcopy(settings.compressor)
        self._compressor.set_rank(replica.world.rank)
        self.momentum: Tensors = {}
        self.estimate: Tensors = {}
        self.mean: Tensors = {}
        #: v_i, h_i and h as they will be once this step is committed, and v_i - h_i before it.
        self._next: tuple[Tensors, Tensors, Tensors] = {}, {}, {}
        self._differences: Tensors = {}
        #: Whether ranks were lost whose estimates are still in h.
        self._stale = False

    def rescale(self, factor: float) -> None:
        """Multiply all that is kept. In place."""
        for kept in (self.momentum, self.estimate, self.mean):
            for tensor in kept.values():
                tensor.mul_(factor)

    def prepare(self, gradients: Gradients) -> None:
        """Form this rank's momentum and its difference to the estimate; raise TensorError where one overflows."""
        self._next, self._differences = ({}, {}, {}), {}
        for name, gradient in zip(self.replica.names, gradients, strict=True):
            if gradient is not None:
                self._move(name, gradient)
        refuse_bad_sums(self._differences, None)

    def _move(self, name: str, gradient: torch.Tensor) -> None:
        share, momentum = self._settings.momentum, self._next[0]
        if name in self.momentum:
            momentum[name] = self.momentum[name].mul(share).add_(gradient, alpha=1 - share)
        else:
            momentum[name] = gradient.clone(memory_format=torch.contiguous_format)
        known = self.estimate.get(name)
        self._differences[name] = momentum[name].clone() if known is None else momentum[name] - known

    def exchange(self, gradients: Tensors) -> None:
        """Replace gradients by h. Collective over the communicator. In place."""
        self.exchange_into(gradients, gradients)

    def exchange_into(self, gradients: Tensors, into: Tensors) -> None:
        """Write h into tensors like the gradients. Collective over the communicator."""
        momentum, _, mean = self._next
        if self._stale:
            fresh = {name: estimate.clone() for name, estimate in self.estimate.items()}
            dense_mean(self.replica.world, fresh, self.replica.schedule, "estimates")
            self.mean = fresh
        for name, gradient in gradients.items():
            if name not in momentum:
                # Another rank has one; this one's is zero.
                self._move(name, gradient)
        first = [name for name in gradients if self._settings.start == "dense" and name not in self.mean]
        if first:
            self._exchange_dense(first)
        rest = [name for name in gradients if name not in mean]
        if rest:
            self._exchange_compressed(rest)
        for name, target in into.items():
            target.copy_(mean[name])

    def _exchange_dense(self, names: list[str]) -> None:
        momentum, estimate, mean = self._next
        for name in names:
            estimate[name], mean[name] = momentum[name].clone(), momentum[name].clone()
        named = {name: mean[name] for name in names}
        dense_mean(self.replica.world, named, self.replica.schedule, "gradients")

    def _exchange_compressed(self, names: list[str]) -> None:
        _, estimate, mean = self._next
        means, left = {name: self._differences[name].clone() for name in names}, Residuals()
        compressed_mean(self.replica.world, means, self._compressor, left, self.replica.schedule, checked=True)
        for name in names:
            # What the others decode, which is not what was put in where the compressor rounds.
            sent = self._differences[name]
            if name in left:
                sent.sub_(left.of(name, sent))
            estimate[name] = sent.add_(self.estimate[name]) if name in self.estimate else sent
            mean[name] = means[name].add_(self.mean[name]) if name in self.mean else means[name]

    def commit(self) -> None:
        """Keep momentum, estimate and mean of this step. Local."""
        super().commit()
        self._stale = False
        for kept, new in zip((self.momentum, self.estimate, self.mean), self._next, strict=True):
            kept.update(new)
        self._next, self._differences = ({}, {}, {}), {}

    def undo(self) -> Undo:
        """Return what puts the compressor back: all else is only changed by `commit`. Local."""
        state = copied(self._compressor.state_dict())
        return lambda: self._compressor.load_state_dict(state)

    def forget(self, kept: list[int]) -> None:
        """Let h be the mean of the estimates of those that are left, from the next exchange on. Local."""
        self._stale = True

    def local_state(self) -> dict[str, Any]:
        """Return v_i, h_i, h and what the compressor remembers."""
        return {
            "momentum": self.momentum,
            "estimate": self.estimate,
            "mean": self.mean,
            "compressor": self._compressor.state_dict(),
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from copies of what `local_state` returned."""
        self.momentum, self.estimate, self.mean = (
            {name: tensor.clone() for name, tensor in state[what].items()} for what in ("momentum", "estimate", "mean")
        )
        self._compressor.load_state_dict(state["compressor"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return the ranks' mean momentum and estimate, so that h stays the mean of the estimates."""
        means = {what: reshard(earlier.each(what), earlier.size) for what in ("momentum", "estimate")}
        return {**earlier.first(), **means}
