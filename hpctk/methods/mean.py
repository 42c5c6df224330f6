"""Mean: average the gradients, the baseline of everything; with any compressor, clipped, or of unit norm.

What travels: gradients, every step: dense, or what the compressor makes of them. With `error_feedback` what it
leaves behind is added to the next gradient (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech
2014; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, arXiv 1901.09847).

    clip        the rate of a group becomes lr * min(1, R / (1e-10 + ||mean g||)), R = clip / lr at the start:
                "naive parallel clipping", CELGC's baseline
    unit_norm   mean_i(g_i / ||g_i||) * mean_i ||g_i||: AdaCons's control

What feedback brings later is not lost where the base optimizer's step is linear in the gradient, as SGD's is. Adam
divides by the size of what arrives, clipping after the exchange by its norm: with TopK training then is as slow as
with a fraction of the rate. See "Mean with TopK under Adam" in docs/methods.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.allreduce import start_in_place
from hpctk.collectives.bucket_result import BucketResult
from hpctk.collectives.bucketed_mean import Bucket, BucketedMean
from hpctk.collectives.compressed_mean import compressed_mean, layout_of, put_back, refuse_bad_sums
from hpctk.collectives.dense_mean import LARGE_BYTES, Work, dense_mean
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.collectives.engine.handle import Handle
from hpctk.comm import buffers
from hpctk.compressors import A_COMPRESSOR, Compressor, Residuals, by_name
from hpctk.methods.core.clipping import CLIP, Clipping, global_norm
from hpctk.methods.core.method import GradientMethod, scaled_rates
from hpctk.methods.core.replica import Gradients, Replica
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.residual_bound import ResidualBound
from hpctk.methods.core.run import BucketRun
from hpctk.methods.core.survival import Undo, copied
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class Mean(GradientMethod):
    """Average the gradients.

    With TopK under Adam, or where gradients are clipped after the exchange, begin dense, raise the rate, or take SAEF:
    docs/methods.md has figures.
    """

    summary: ClassVar[str] = "plain averaging of gradients, with any compressor"

    compressor: Compressor | None = setting(
        None, "how gradients are written down; dense without", parser=by_name, allowed=A_COMPRESSOR
    )
    error_feedback: bool = setting(True, "whether what the compressor left behind is added to the next gradient")
    clip: float | None = setting(None, f"by the norm of the mean gradient: {CLIP}", at_least=0, at_most=math.inf)
    unit_norm: bool = setting(False, "average directions, and multiply by the mean norm")
    #: The earlier name of error_feedback.
    feedback: InitVar[bool | None] = field(default=None, kw_only=True)

    def __post_init__(self, feedback: bool | None) -> None:
        if feedback is not None:
            warnings.warn("Mean(feedback=) is error_feedback= now", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "error_feedback", feedback)
        super().__post_init__()

    def begin(self, replica: Replica) -> MeanRun:
        """Return averaging at work on a replica."""
        return MeanRun(self, replica)


class MeanRun(BucketRun):
    """Averaging at work on one rank."""

    def __init__(self, settings: Mean, replica: Replica) -> None:
        super().__init__(replica)
        self._settings = settings
        self.residuals = Residuals()
        self._clipping: Clipping | None = None
        # What it remembers belongs to this model: one Mean may serve several.
        self._compressor = deepcopy(settings.compressor)
        if self._compressor is not None:
            self._compressor.set_rank(replica.world.rank)
        self._bound = ResidualBound(self._compressor)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals. In place."""
        if factor != 1:
            for residual in self.residuals.state_dict().values():
                residual.mul_(factor)
            self._bound.reset()

    @property
    def _kept(self) -> Residuals | None:
        return self.residuals if self._settings.error_feedback else None

    def prepare(self, gradients: Gradients) -> None:
        """Raise TensorError where a gradient and its residual overflow."""
        compressor = self._compressor
        # With unit_norm what is compressed is known only once the norms are.
        if compressor is None or self._settings.unit_norm:
            return
        if self._kept is None or self._bound.allows(self.look.largest, self.residuals, self.replica.dtype):
            return
        named = zip(self.replica.names, gradients, strict=True)
        held = {name: tensor for name, tensor in named if tensor is not None}
        refuse_bad_sums({n: x for n, x in held.items() if not compressor.is_excluded(n, x)}, self._kept)

    def exchange(self, gradients: dict[str, torch.Tensor]) -> None:
        """Replace gradients by their mean. Collective over the communicator. In place."""
        norms = self._normalize(list(gradients.values())) if self._settings.unit_norm else None
        self._average(gradients, gradients)
        if norms is not None:
            torch_private.foreach_mul_(list(gradients.values()), float(norms.mean()))

    def exchange_into(self, gradients: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        """Write their mean into tensors like the gradients; `commit` does so where those are given themselves.

        Collective over the communicator.
        """
        if self._settings.unit_norm:
            super().exchange_into(gradients, into)
            return
        self._average(gradients, into, self._unwritten if self._in_place(gradients, into) else None)

    def expendable(self, gradients: dict[str, torch.Tensor], *, scaled: bool) -> Collection[str]:
        """Return the names of those that are in the residuals, too, once they are sent, or travel packed. Local."""
        if self._compressor is None:
            if scaled or self._settings.unit_norm:
                return ()
            return [name for name, gradient in gradients.items() if gradient.nbytes < LARGE_BYTES]
        if not self.residuals.keeps_taken:
            return ()
        return layout_of(self._compressor, gradients).chosen

    def _average(
        self, gradients: dict[str, torch.Tensor], into: dict[str, torch.Tensor], later: list[Work] | None = None
    ) -> None:
        here, compressor, schedule = self.replica.world, self._compressor, self.replica.schedule
        if compressor is None:
            dense_mean(here, gradients, schedule, "gradients", into, later)
        else:
            checked = not self._settings.unit_norm
            compressed_mean(here, gradients, compressor, self._kept, schedule, checked=checked, into=into)

    @property
    def by_buckets(self) -> bool:
        """Whether a part can go alone: a norm needs all gradients, and so do compressors that aggregate themselves.

        Nor do lists that a device's own group gathers as one.
        """
        if self._settings.unit_norm or self._compressor is None:
            return not self._settings.unit_norm
        here, first = self.replica.world, self.replica.parameters[0]
        gathers = self._compressor.combines == "pairs" and not first.is_cpu and here.device_group(first) is not None
        return self._compressor.combines != "own" and not gathers

    @cached_property
    def _bucketed(self) -> BucketedMean:
        assert self._compressor is not None
        like = {name: x.to(self.replica.dtype) for name, x in self.replica.named(self.replica.values).items()}
        return BucketedMean(self.replica.world, self._compressor, self._kept, self.replica.schedule, like)

    def meet_buckets(self) -> None:
        """Find out how buckets are to travel. Collective over the communicator."""
        if self._compressor is not None:
            _ = self._bucketed

    def start_bucket(
        self, lane: int, gradients: dict[str, torch.Tensor], *, in_order: bool = False
    ) -> tuple[Handle, int] | Bucket:
        """Start averaging some gradients. Collective over the communicator. Not in place."""
        if self._compressor is not None:
            return self._bucketed.start(lane, gradients, in_order=in_order)
        here, flat = self.replica.world, self.memory.joined(lane, gradients.values())
        own_lane = None if in_order else lane
        # Divided when it is written into the gradients, by the ranks of now.
        return start_in_place(here, flat, buffers.dtype_of(flat), "sum", self.replica.schedule, own_lane), here.size

    def finish_buckets(self, buckets: list[Any], has: set[str]) -> list[BucketResult]:
        """Return the means."""
        if self._compressor is not None:
            return [BucketResult(flat) for flat in self._bucketed.finish(buckets, has)]
        return [BucketResult(handle.wait(), size) for handle, size in buckets]

    def commit(self) -> None:
        """Keep what the compressor has left behind."""
        super().commit()
        self._bound.advance()
        if "_bucketed" in vars(self):
            self._bucketed.commit()

    def _normalize(self, gradients: Sequence[torch.Tensor]) -> Any:
        """Bring the gradient to norm 1, in place; return the norms of all ranks."""
        norm = global_norm(gradients)
        if norm > 0:
            torch_private.foreach_div_(list(gradients), norm)
        return gather_rows(self.replica.world, np.array([norm]))[:, 0]

    def meet(self, base: torch.optim.Optimizer) -> None:
        """Note the rate at the start, where steps are to be clipped."""
        if self._settings.clip is not None:
            self._clipping = Clipping(self._settings.clip, base)

    def apply(self, base: torch.optim.Optimizer) -> None:
        """Step on the mean, clipped where that was asked for. Collective over the communicator then."""
        if self._clipping is None:
            base.step()
            return
        mine = global_norm([gradient for gradient in self.replica.gradients() if gradient is not None])
        # Of rank 0 for all: with another number of threads the same sum may round otherwise.
        norms = self.replica.together(lambda: gather_rows(self.replica.world, np.array([mine])))
        norm = float(norms[0, 0])
        with scaled_rates(base, self._clipping.factor(norm)):
            base.step()

    def undo(self) -> Undo:
        """Return what puts the residuals back, and the compressor; nothing where gradients travel as they are."""
        compressor = self._compressor
        if compressor is None:
            return lambda: None
        by_copy = self._kept is None or self._settings.unit_norm or self.replica.buddies
        if compressor.combines != "pairs" or by_copy:
            return super().undo()
        # Without a copy: a residual to which the gradient was added, and what was taken out, is all there is to send.
        self.residuals.keeps_taken, self.residuals.taken = True, None
        state = copied(compressor.state_dict())

        def undo() -> None:
            compressor.load_state_dict(state)
            self._bound.reset()
            for name in put_back(self.residuals):
                parameter = self.replica.parameters[self.replica.places[name]]
                parameter.grad = torch.zeros_like(parameter)

        return undo

    def forget(self, kept: list[int]) -> None:
        """Give up what buckets have left of the residuals: they do not count. Local."""
        vars(self).pop("_bucketed", None)

    def local_state(self) -> dict[str, Any]:
        """Return the residuals, what the compressor remembers, and the rate at the start."""
        state: dict[str, Any] = {"residuals": self.residuals.state_dict()}
        if self._compressor is not None:
            state["compressor"] = self._compressor.state_dict()
        if self._clipping is not None:
            state["first_rate"] = self._clipping.first_rate
        return state

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        self.residuals.load_state_dict(state["residuals"])
        self._bound.reset()
        if self._compressor is not None:
            self._compressor.load_state_dict(state.get("compressor", {}))
        if self._clipping is not None and "first_rate" in state:
            self._clipping.first_rate = float(state["first_rate"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return residuals whose mean over the ranks is what it was; the rest is common to all."""
        return {**earlier.first(), "residuals": reshard(earlier.each("residuals"), earlier.size)}
