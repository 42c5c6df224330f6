"""The life of a step of model methods: local steps, and now and then a round in which parameters travel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from hpctk.collectives.compressed_mean import dense_mean
from hpctk.methods.core.replica import Replica, first_bad
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.run import Closure, LocalStepRun, evaluate
from hpctk.methods.core.step_status import LocalStatus
from hpctk.methods.core.survival import Undo


class ModelRun(LocalStepRun):
    """A model method at work: derive, and say what a round does.

    A gradient that is NaN or infinite is not applied; its step counts all the same, and the others hear of
    it at the next round.

    Parameters
    ----------
    replica : Replica
    base : torch.optim.Optimizer
    period : int
        Local steps between rounds.
    """

    #: Whether all ranks do as many steps between two rounds, so that their schedules of rates agree.
    lockstep = True

    def __init__(self, replica: Replica, base: torch.optim.Optimizer, period: int) -> None:
        super().__init__(replica, base)
        self.period = period
        #: Local steps since the last round.
        self.since_round = 0
        #: The first parameter with a bad gradient since the last round.
        self.bad: int | None = None
        self.last_step_was_bad = False

    @abstractmethod
    def average(self) -> None:
        """Let the models of all ranks come together. Collective over the communicator. In place."""

    def local_step(self) -> None:
        """Let the base optimizer step on the local gradient."""
        self.base.step()

    def after_local_step(self) -> None:
        """Do what a method does between rounds after every local step, applied or not; nothing by default."""

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do a local step, and a round where one is due."""
        value = evaluate(closure)
        self.note_loss(value if loss is None else loss)
        bad = first_bad(self.replica.gradients())
        if bad is None:
            self.local_step()
        elif self.bad is None:
            self.bad = bad
        self.last_step_was_bad = self.skipped = bad is not None
        self.after_local_step()
        self.since_round += 1
        if self.since_round >= self.period:
            self.round()
        return value

    def note_loss(self, loss: Any) -> None:
        """Take note of the loss of this step, None where nobody told; for methods that ask."""

    def idle(self) -> bool:
        """Take part in a round without local steps."""
        return self.round(active=False)

    def round(self, *, active: bool = True) -> bool:
        """Do a round; return whether any rank has data left. Collective over the communicator."""
        return self.replica.together(lambda: self._round(active=active), self.undo)

    def undo(self) -> Undo:
        """Return what puts back the model, and all that the method keeps. Local."""
        undo_method, values = super().undo(), self.replica.copies()

        def undo() -> None:
            undo_method()
            self.replica.load(values)

        return undo

    def _round(self, *, active: bool) -> bool:
        groups = self.base.param_groups if self.lockstep else []
        mine = LocalStatus((), self.bad, active)
        status = self.replica.status.exchange(mine, groups, self.shared_state, self.period, operation="opening a round")
        self.bad = None
        self.since_round = 0
        self.skip_or_raise(status)
        self.average()
        self.counts["rounds"] += 1
        return status.active

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return nothing: between rounds every worker has a model of its own."""
        return {}

    def mean_parameters(self) -> list[torch.Tensor]:
        """Return the mean of all ranks' parameters, as new tensors. Collective over the communicator."""
        mean = self.replica.copies()
        dense_mean(self.replica.world, self.replica.named(mean), self.replica.schedule, "parameters")
        return mean

    def local_state(self) -> dict[str, Any]:
        """Return where in its period this rank is, and what the others are to hear at the next round."""
        return {"since_round": self.since_round, "bad": self.bad, "last_step_was_bad": self.last_step_was_bad}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        self.since_round = int(state["since_round"])
        self.bad, self.last_step_was_bad = state["bad"], bool(state["last_step_was_bad"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return rank 0's state; a bad gradient that nobody has heard of is forgotten."""
        return {**super().resized_state(earlier), "bad": None}

    def evaluated_parameters(self) -> list[torch.Tensor] | None:
        """Return the mean of the workers. Collective over the communicator."""
        return self.mean_parameters()
