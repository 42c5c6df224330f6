"""MGRAWA and LGRAWA: workers are pulled toward a mean in which flat workers weigh more.

Dimlioglu, Choromanska, "GRAWA: Gradient-based Weighted Averaging for Distributed Training of Deep Learning Models",
AISTATS 2024, arXiv 2403.04206.

    after every local step   x_m <- (1 - prox/period)*x_m + (prox/period)*x_C
    in a round               n_m = norms of the gradient: of each tensor (LGRAWA), or their sum (MGRAWA)
                             v <- ema*v + (1-ema)*n;  nhat = v / (1 - ema^t)
                             beta_m = nhat_m^-1 / sum_j nhat_j^-1
                             x_C = sum_m beta_m*x_m;  x_m <- (1-pull)*x_m + pull*x_C

What travels in a round: one number of each worker (MGRAWA) or one for each tensor (LGRAWA), then the model once. With a
compressor it is how far the worker is from the last x_C, times its weight, with error feedback:

    p = e_m + N*beta_m*(x_C - x_m);  c_m = C(p);  e_m = p - c_m;  x_C <- x_C - mean_m c_m

The base optimizer's state stays where it is. The model to evaluate is the plain mean of the workers.

A round comes after `period` local steps of every worker; with asynchronous=True after `period` on average, as
the tickets say (tickets.py): fast workers do more. Workers then end their loops after different numbers of steps,
so put `with opt.join():` around the loop, or give a time budget and leave the loop when opt.finished says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.dense_mean import dense_sum
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.compressors import Compressor
from hpctk.errors import HpctkError, SettingError
from hpctk.methods.core.clipping import norms
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.model_step import DIFFERENCES, ModelRun
from hpctk.methods.core.replay import probing
from hpctk.methods.core.replica import Replica, first_bad, restore
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.run import Closure
from hpctk.methods.core.tickets import Tickets
from hpctk.settings import documented, setting

#: Norms below this share of the workers' mean are taken for it: a zero norm would have all the weight.
FLOOR = 1e-3
#: Instead of norms: of a worker that has never had a gradient. Bad gradients are NaN.
NONE_YET = -1.0


@documented
@dataclass(frozen=True)
class Grawa(LocalStepMethod):
    """The settings that MGRAWA and LGRAWA share.

    A probe may use what it likes of torch's, Python's and numpy's random numbers: training sees nothing of it. With a
    time budget training ends (opt.finished) at the first round after it, on rank 0's clock.
    """

    kind: ClassVar[str] = "model"
    layerwise: ClassVar[bool]

    period: int = setting(32, "local steps between rounds; asynchronous: on average", at_least=1)
    pull: float = setting(0.5, "how far a round moves a worker toward the centre", at_least=0, at_most=1)
    prox: float = setting(0.01, "how far the local steps of a period move it there", at_least=0, at_most=1)
    ema: float = setting(0.9**8, "memory of the norms, 0 for none", at_least=0, below=1, shown="0.9**8")
    norms: str = setting(
        "step", "of the last local step's gradient, or of one that `probe` computes", choices=("step", "probe")
    )
    probe: Callable[[], Any] | None = setting(None, "runs forward and backward on a fresh random batch")
    asynchronous: bool = setting(False, "let fast workers do more local steps")
    time_budget_s: float | None = setting(None, "end training so many seconds after the optimizer was made", above=0)
    compressor: Compressor | None = setting(None, **DIFFERENCES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms == "probe" and not callable(self.probe):
            raise SettingError(f"probe={self.probe!r}: norms='probe' needs a function without arguments")
        if self.norms == "step" and self.probe is not None:
            raise SettingError(f"probe={self.probe!r}: is only called with norms='probe'")

    @property
    def lockstep(self) -> bool:
        """Fast workers do more steps in the asynchronous mode."""
        return not self.asynchronous

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> GrawaRun:
        """Return the method at work on a replica. Collective over the communicator."""
        return GrawaRun(self, replica, base)

    def settings(self) -> dict[str, object]:
        """Return all settings; of the probe only whether there is one: each rank has its own."""
        return {**super().settings(), "probe": self.probe is not None}


@documented
@dataclass(frozen=True)
class MGRAWA(Grawa):
    """Weigh workers by the norms of their whole gradients."""

    summary: ClassVar[str] = "pulled toward a mean in which workers with small gradients weigh more"
    layerwise: ClassVar[bool] = False


@documented
@dataclass(frozen=True)
class LGRAWA(Grawa):
    """Weigh workers tensor by tensor, by the norms of their gradients; settings as in `Grawa`."""

    summary: ClassVar[str] = "as MGRAWA, with weights of its own for every tensor"
    layerwise: ClassVar[bool] = True


class GrawaRun(ModelRun):
    """MGRAWA or LGRAWA at work on one rank.

    Attributes
    ----------
    centre : list of torch.Tensor
        x_C of the last round, the same bits on all ranks; the initial model before.
    weights : ndarray or None
        beta of the last round: a row for each worker, of one number or one for each tensor.
    tickets : Tickets or None
        Of the asynchronous mode.
    """

    def __init__(self, settings: Grawa, replica: Replica, base: torch.optim.Optimizer) -> None:
        # In asynchronous mode tickets say when a round is due, never the number of own steps.
        period = sys.maxsize if settings.asynchronous else settings.period
        super().__init__(replica, base, period, compressor=settings.compressor)
        self._settings = settings
        self.lockstep = settings.lockstep
        self.tickets = Tickets(replica.world, settings.period) if settings.asynchronous else None
        #: Whether ranks were lost since the tickets were made.
        self._lost_tickets = False
        if self.common is None:
            self.centre = replica.copies()
        else:
            self.common.begin()
            self.centre = self.common.x
        self.weights: Any = None
        width = len(replica.names) if settings.layerwise else 1
        self._norms = np.full(width, NONE_YET)
        self._smooth, self._updates = np.zeros(width), 0
        self._probes = 0
        self.last_step_was_bad = False
        self._began = time.monotonic()

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do a local step, and a round where one is due."""
        value = super().step(closure, loss)
        if self.tickets is not None:
            self.counts["tickets"] += 1
            take = self.tickets.take if self.replica.survival is None else self.tickets.take_or_meet
            if self._lost_tickets or take() == "round":
                self.round()
        return value

    def local_step(self) -> None:
        """Let the base optimizer step; the norms come first, for some optimizers change the gradient."""
        # A ticket may make any step the last before a round.
        if self.tickets is not None or self.since_round + 1 >= self.period:
            self._look()
        super().local_step()

    def after_local_step(self) -> None:
        """Move a little toward the centre."""
        if self.last_step_was_bad:
            self._norms = np.full_like(self._norms, np.nan)
        self._move(self._settings.prox / self._settings.period)

    def _move(self, share: float) -> None:
        if share > 0:
            torch_private.foreach_lerp_(self.replica.values, self.centre, share)

    def _look(self) -> None:
        """Take note of the norms of this step's gradients."""
        if self._settings.probe is None:
            self._norms = self._own_norms()

    def _own_norms(self) -> Any:
        """Return the norms of the gradients here; where there is none, the last ones."""
        gradients = self.replica.gradients()
        if all(gradient is None for gradient in gradients):
            return self._norms
        found = iter(norms([gradient for gradient in gradients if gradient is not None]))
        by_tensor = np.array([0.0 if gradient is None else next(found) for gradient in gradients])
        return by_tensor if self._settings.layerwise else by_tensor.sum(keepdims=True)

    def idle(self) -> bool:
        """Take part in a round without local steps; the norms are those of the last one."""
        if self.tickets is None and self.since_round and not self.last_step_was_bad:
            self._look()
        return super().idle()

    def average(self) -> None:
        """Weigh the workers, form the centre, pull. Collective over the communicator. In place."""
        here = self.replica.world
        if self._lost_tickets:
            self.tickets = Tickets(here, self._settings.period)
        elif self.tickets is not None:
            self.tickets.new_cycle()
        mine = self._smoothed(self._norms if self._settings.probe is None else self._probed())
        rows = gather_rows(here, np.array([float(self._time_is_up()), *mine]))
        self.weights = weights(rows[:, 1:])
        self._form_centre(self.weights[here.rank])
        self._move(self._settings.pull)
        # Rank 0's clock decides for all.
        self.finished |= bool(rows[0, 0])

    def round(self, *, active: bool = True) -> bool:
        """Do a round; return whether any rank has data left. Collective over the communicator."""
        going = super().round(active=active)
        self._lost_tickets = False
        return going

    def forget(self, kept: list[int]) -> None:
        """Give up the tickets: those that are left make new ones in the round that comes. Local."""
        self._lost_tickets = self.tickets is not None

    def common_steps(self, own: int) -> int:
        """Return the steps of all rounds in the asynchronous mode: between two of them nobody is in step. Local."""
        return own if self.tickets is None else self.counts["rounds"] * self._settings.period

    def _time_is_up(self) -> bool:
        budget = self._settings.time_budget_s
        return budget is not None and time.monotonic() - self._began >= budget

    def _smoothed(self, found: Any) -> Any:
        """Return nhat; what stands for no norms is returned as it is, and changes nothing."""
        if not (np.isfinite(found) & (found >= 0)).all():
            return found
        ema = self._settings.ema
        self._updates += 1
        self._smooth = ema * self._smooth + (1 - ema) * found
        return self._smooth / (1 - ema**self._updates)

    def _probed(self) -> Any:
        """Return the norms of the probe's gradient. Collective over the communicator."""
        assert self._settings.probe is not None
        self._probes += 1
        with probing(self.replica, self._settings.probe, self._probes):
            bad = first_bad(self.replica.gradients()) is not None
            return np.full_like(self._norms, np.nan) if bad else self._own_norms()

    def prepare_round(self) -> None:
        """Do nothing: a worker without weight may hold anything."""

    def _form_centre(self, mine: Any) -> None:
        if self.common is not None:
            self._move_centre(mine)
            return
        torch_private.foreach_copy_(self.centre, self.replica.values)
        if mine.any():
            torch_private.foreach_mul_(self.centre, np.broadcast_to(mine, len(self.centre)).tolist())
        else:
            # Not times 0: where the gradient is NaN, the parameters may be.
            torch_private.foreach_zero_(self.centre)
            self.counts["rounds_without_weight"] += 1
        centre = self.replica.named(self.centre)
        dense_sum(self.replica.world, centre, self.replica.schedule, "parameters")

    def _move_centre(self, mine: Any) -> None:
        assert self.common is not None
        (fragment,) = self.common.fragments
        fragment.look()
        weights = dict(zip(self.replica.names, np.broadcast_to(mine, len(self.centre)).tolist(), strict=True))
        for name, part in zip(fragment.names, fragment.delta.parts, strict=True):
            part.mul_(self.replica.world.size * weights[name])
        if not mine.any():
            fragment.delta.flat.zero_()
            self.counts["rounds_without_weight"] += 1
        fragment.x.flat.sub_(fragment.combine(checked=False))

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return the centre."""
        return self.replica.named(self.centre)

    def local_state(self) -> dict[str, Any]:
        """Return the memory of the norms, the centre, where in its period this rank is, and the time used."""
        return {
            **super().local_state(),
            "norms": torch.from_numpy(self._norms),
            "smooth": torch.from_numpy(self._smooth),
            "updates": self._updates,
            "probes": self._probes,
            "centre": self.replica.named(self.centre),
            "elapsed_s": time.monotonic() - self._began,
            "finished": self.finished,
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        super().load_local_state(state)
        restore(self.replica.named(self.centre), state["centre"], "the centre")
        self._norms = state["norms"].numpy().copy()
        self._smooth = state["smooth"].numpy().copy()
        self._updates, self._probes = int(state["updates"]), int(state["probes"])
        self._began = time.monotonic() - float(state["elapsed_s"])
        # Not where a larger budget was given meanwhile.
        self.finished = bool(state["finished"]) and self._time_is_up()

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return the mean memory of the norms; the centre and the clock are common to all."""
        norms = torch.stack(list(earlier.each("norms")))
        known = norms[(norms.isfinite() & (norms >= 0)).all(1)]
        return {
            **super().resized_state(earlier),
            "norms": known.mean(0) if len(known) else torch.full_like(norms[0], NONE_YET),
            "smooth": torch.stack(list(earlier.each("smooth"))).mean(0),
        }


def weights(nhat: Any) -> Any:
    """Return beta from nhat, a row for each worker; the same on all ranks, for all know the norms of all.

    Columns add up to 1. NONE_YET gives a worker no weight, and so does what is not finite. Uniform where all norms are
    zero, and where no worker has had a gradient yet.
    """
    without = (nhat < 0).any(axis=1)
    taking_part = np.isfinite(nhat).all(axis=1) & ~without
    if without.all():
        return np.full_like(nhat, 1 / len(nhat))
    if not taking_part.any():
        raise HpctkError(
            "in this round no rank has a gradient that is finite, so that none can have any weight: lower the "
            "learning rate, or look for what makes the loss NaN or infinite"
        )
    here = nhat[taking_part]
    largest = here.max(axis=0)
    # In units of the largest: inverses of tiny norms would overflow.
    scaled = here / np.where(largest == 0, 1, largest)
    floored = np.maximum(scaled, FLOOR * scaled.mean(axis=0))
    inverse = 1 / np.where(largest == 0, 1, floored)
    found = np.zeros_like(nhat)
    found[taking_part] = inverse / inverse.sum(axis=0)
    return found
