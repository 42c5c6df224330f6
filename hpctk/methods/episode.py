"""EPISODE: as CELGC, for workers whose data differ.

Crawshaw, Bao, Liu, "EPISODE: Episodic Gradient Clipping with Periodic Resampled Corrections for Federated Learning with
Heterogeneous Data", ICLR 2023, arXiv 2302.07155. A round of `period` local steps begins at an x that all ranks share:

    G_i = gradient of worker i at x;  G = mean_i G_i;  clips = ||G|| > R,  R = clip / lr at the start
    each local step   d = g - G_i + G;  rate = lr * min(R / (1e-10 + ||d||), 1000) if the round clips, else lr
                      the base optimizer steps on d with that rate
    after the last    x_i <- mean_j x_j

So whether to clip is decided once for a round, by all ranks alike, and a round that clips normalises: its steps are
lr*R long (without momentum and weight decay), also where ||d|| is below R. The norm is over all parameters, in float64.

What travels: once in `period` steps gradients, at the first of them, and parameters, after the last; twice as much as
CELGC's. The model to evaluate is the mean of the workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.dense_mean import dense_mean
from hpctk.errors import SettingError
from hpctk.kernels.in_order import add_in_order
from hpctk.methods.core.clipping import CLIP, SMALL, Clipping, global_norm
from hpctk.methods.core.method import LocalStepMethod, scaled_rates
from hpctk.methods.core.model_step import ModelRun
from hpctk.methods.core.replay import undisturbed
from hpctk.methods.core.replica import Gradients, Replica, first_bad
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.run import Closure, evaluate
from hpctk.settings import documented, required, setting

#: The largest factor of a rate: where d is tiny, momentum and weight decay would explode.
LARGEST = 1000.0


@documented
@dataclass(frozen=True)
class EPISODE(LocalStepMethod):
    """Correct local gradients toward the mean one, clip by rounds, average the models every `period` steps."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "CELGC for workers whose data differ: corrected gradients, clipped by rounds"

    clip: float = field(metadata=required(CLIP, at_least=0, at_most=math.inf))
    period: int = setting(16, "local steps between averages", at_least=1)
    corrections: str = setting(
        "step", "from the round's first gradient, or from one that `probe` computes", choices=("step", "probe")
    )
    probe: Callable[[], Any] | None = setting(None, "runs forward and backward on a fresh random batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.corrections == "probe" and not callable(self.probe):
            raise SettingError(f"probe={self.probe!r}: corrections='probe' needs a function without arguments")
        if self.corrections == "step" and self.probe is not None:
            raise SettingError(f"probe={self.probe!r}: is only called with corrections='probe'")

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> EpisodeRun:
        """Return EPISODE at work on a replica."""
        return EpisodeRun(self, replica, base)

    def settings(self) -> dict[str, object]:
        """Return all settings; of the probe only whether there is one: each rank has its own."""
        return {**super().settings(), "probe": self.probe is not None}


class EpisodeRun(ModelRun):
    """EPISODE at work on one rank.

    Attributes
    ----------
    own, mean : dict of str to torch.Tensor
        G_i and G of this round, for the parameters that have a gradient on some rank; empty until it is open.
    clips : bool or None
        Whether this round clips; None until it is open.
    """

    def __init__(self, settings: EPISODE, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base, settings.period)
        self._settings = settings
        self._clipping = Clipping(settings.clip, base)
        self.own: dict[str, torch.Tensor] = {}
        self.mean: dict[str, torch.Tensor] = {}
        self.clips: bool | None = None
        self._probes = 0

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do a local step; open the round before it and average after it where that is due."""
        value = evaluate(closure)
        bad = None
        if self.clips is None:
            self.replica.together(self._open, self.undo)
            self.skipped = self.clips is None
        else:
            bad = first_bad(self.replica.gradients())
            self.skipped = bad is not None
        if not self.skipped:
            self.local_step()
        elif self.bad is None:
            self.bad = bad
        self.last_step_was_bad = self.skipped
        self.count_step()
        return value

    def _open(self, *, active: bool = True) -> bool:
        """Share the gradients at x, unless one is bad: then the round stays closed, and all ranks skip this step.

        Collective over the communicator. Return whether any rank has data.
        """
        found: list[torch.Tensor | None] = []

        def find() -> Gradients:
            found.extend(self._probed() if active and self._settings.probe else self.replica.gradients())
            return found

        status = self.open_step(find, self.base.param_groups, active=active)
        if not status.active or self.skip_or_raise(status):
            return status.active
        for name, value, gradient, has in zip(self.replica.names, self.replica.values, found, status.has, strict=True):
            if has:
                like = torch.zeros_like(value) if gradient is None else gradient
                self.own[name] = like.clone(memory_format=torch.contiguous_format)
                self.mean[name] = self.own[name].clone()
        dense_mean(self.replica.world, self.mean, self.replica.schedule, "gradients")
        norm = math.sqrt(add_in_order(_sum_of_squares(tensor) for tensor in self.mean.values()))
        self.clips = norm > self._clipping.bound
        self.counts["clipped_rounds"] += self.clips
        return True

    def _probed(self) -> Gradients:
        """Return the probe's gradients; this step's own where those are bad, so that all ranks hear of it."""
        assert self._settings.probe is not None
        self._probes += 1
        own = self.replica.gradients()
        if first_bad(own) is not None:
            return own
        with undisturbed(self.replica, self._probes):
            with self.replica.forward_and_backward():
                self._settings.probe()
            probed = self.replica.gradients()
        if all(gradient is None for gradient in probed):
            raise SettingError("probe: left no gradients; it has to run forward and backward")
        return probed

    def local_step(self) -> None:
        """Step on the corrected gradient, with the rate that the round's decision gives."""
        named = zip(self.replica.names, self.replica.gradients(), strict=True)
        held = {name: gradient for name, gradient in named if gradient is not None}
        corrected = [name for name in self.mean if name in held]
        moved = [held[name] for name in corrected]
        torch_private.foreach_sub_(moved, [self.own[name] for name in corrected])
        torch_private.foreach_add_(moved, [self.mean[name] for name in corrected])
        factor = 1.0
        if self.clips:
            factor = min(self._clipping.bound / (SMALL + global_norm(list(held.values()))), LARGEST)
            self.counts["clipped_steps"] += 1
            self.counts["bounded_steps"] += factor == LARGEST
        with scaled_rates(self.base, factor):
            self.base.step()

    def average(self) -> None:
        """Replace the parameters by their mean over the workers. Collective over the communicator."""
        super().average()
        self.own, self.mean, self.clips = {}, {}, None

    def idle(self) -> bool:
        """Take part in the opening of a round, or in its end, without data: whichever the others come to next."""
        if self.clips is not None or self.since_round >= self.period:
            return self.round(active=False)
        for parameter in self.replica.parameters:
            parameter.grad = None
        active = self.replica.together(lambda: self._open(active=False), self.undo)
        if active and self.clips is None:
            # The others count a step that all have skipped, and may come to the end of the round by it.
            self.since_round += 1
        return active

    def local_state(self) -> dict[str, Any]:
        """Return the round as it is, where in it this rank is, and the rate at the start."""
        return {
            **super().local_state(),
            "own": self.own,
            "mean": self.mean,
            "clips": self.clips,
            "probes": self._probes,
            "first_rate": self._clipping.first_rate,
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from copies of what `local_state` returned."""
        super().load_local_state(state)
        self.own, self.mean = ({n: x.clone() for n, x in state[what].items()} for what in ("own", "mean"))
        self.clips = None if state["clips"] is None else bool(state["clips"])
        self._probes = int(state["probes"])
        self._clipping.first_rate = float(state["first_rate"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return the round as it was, without corrections: those of some ranks would not cancel."""
        state = super().resized_state(earlier)
        return {**state, "own": state["mean"]}


def _sum_of_squares(tensor: torch.Tensor) -> float:
    """Return it in float64, the same bits on all ranks however many threads each has: the decision must be one."""
    return float(np.square(tensor.double().cpu().numpy()).sum())
