"""The life of a step of model methods: local steps, and now and then a round in which parameters travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpctk.collectives.dense_mean import dense_mean
from hpctk.compressors import A_COMPRESSOR, Compressor, by_name
from hpctk.methods.core.common_model import CommonModel
from hpctk.methods.core.period_rule import QSR
from hpctk.methods.core.replica import Replica, first_bad
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.run import Closure, LocalStepRun, evaluate
from hpctk.methods.core.step_status import LocalStatus, StepStatus, prepared
from hpctk.methods.core.survival import Undo, copied

#: The setting of methods that send models, for those who would rather send less.
DIFFERENCES: dict[str, Any] = {
    "meaning": "of what has changed since the last common model, with error feedback; the models themselves without",
    "parser": by_name,
    "allowed": A_COMPRESSOR,
}


class ModelRun(LocalStepRun):
    """A model method at work: derive, and say what a round does, unless it replaces all models by their mean.

    A gradient that is NaN or infinite is not applied; its step counts all the same, and the others hear of
    it at the next round.

    Parameters
    ----------
    replica : Replica
    base : torch.optim.Optimizer
    period : int
        Local steps between rounds.
    rule : QSR, optional
        Says it anew for every round; `period` is the least then.
    compressor : Compressor, optional
        What travels is the difference to the model that all had in common last, with error feedback.
    """

    #: Whether all ranks do as many steps between two rounds, so that their schedules of rates agree.
    lockstep = True

    def __init__(
        self,
        replica: Replica,
        base: torch.optim.Optimizer,
        period: int,
        rule: QSR | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__(replica, base)
        self.period = self._least = period
        self._rule = rule
        #: Local steps so far, t.
        self.t = 0
        self.common = None if compressor is None else CommonModel(replica, compressor)
        #: Local steps since the last round.
        self.since_round = 0
        #: The first parameter with a bad gradient since the last round.
        self.bad: int | None = None
        self.last_step_was_bad = False
        #: A copy of the model before the last round, where ranks may be lost in it.
        self._kept_values: list[torch.Tensor] | None = None

    def average(self) -> None:
        """Let the models of all ranks come together: in their mean. Collective over the communicator. In place."""
        if self.common is None:
            values = self.replica.named(self.replica.values)
            dense_mean(self.replica.world, values, self.replica.schedule, "parameters")
        else:
            (fragment,) = self.common.fragments
            fragment.x.flat.sub_(fragment.combine())
            self.replica.load(self.common.x)

    def local_step(self) -> None:
        """Let the base optimizer step on the local gradient."""
        self.base.step()

    def after_local_step(self) -> None:
        """Do what a method does between rounds after every local step, applied or not; nothing by default."""

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do a local step, and a round where one is due."""
        value = evaluate(closure)
        self.begin_step()
        self.note_loss(value if loss is None else loss)
        bad = first_bad(self.replica.gradients())
        if bad is None:
            self.local_step()
        elif self.bad is None:
            self.bad = bad
        self.last_step_was_bad = self.skipped = bad is not None
        self.after_local_step()
        self.count_step()
        return value

    def begin_step(self) -> None:
        """Learn how long the round is that begins, and hold on to the model that all ranks have in common. Local."""
        if self.since_round == 0:
            self.period = self.next_period()
        if self.common is not None:
            self.common.begin()

    def next_period(self) -> int:
        """Return the number of local steps of the round that begins."""
        if self._rule is None:
            return self._least
        return self._rule.period(self._least, float(self.base.param_groups[0]["lr"]), self.t)

    def count_step(self) -> None:
        """Count a local step, applied or not, and do a round where one is due."""
        self.t += 1
        self.since_round += 1
        if self.since_round >= self.period:
            self.round()

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
        undo_method, values = super().undo(), copied(self.replica.values, self._kept_values)
        self._kept_values = values

        def undo() -> None:
            undo_method()
            self.replica.load(values)

        return undo

    def _round(self, *, active: bool) -> bool:
        status = self.open_round(active=active)
        self.since_round = 0
        self.skip_or_raise(status)
        self.average()
        self.counts["rounds"] += 1
        return status.active

    def open_round(self, *, active: bool) -> StepStatus:
        """Prepare a round, and learn what all ranks have to say. Collective over the communicator."""

        def find() -> LocalStatus:
            self.prepare_round()
            return LocalStatus((), self.bad, active)

        groups = self.base.param_groups if self.lockstep else []
        status = self.replica.status.exchange(
            prepared(find),
            groups,
            self.shared_state,
            self.period,
            operation="opening a round",
            period=None if self._rule is None else self.period,
        )
        self.bad = None
        if not active and status.period is not None:
            self.period = status.period
        return status

    def prepare_round(self) -> None:
        """Raise TensorError where this rank has nothing that can be sent. Local; changes nothing that lasts."""
        if self.common is not None:
            self.common.begin()
            for fragment in self.common.fragments:
                fragment.look()
                fragment.check()

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return the last common model, where it is kept; between rounds every worker has a model of its own."""
        return {} if self.common is None else self.replica.named(self.common.x)

    def mean_parameters(self) -> list[torch.Tensor]:
        """Return the mean of all ranks' parameters, as new tensors. Collective over the communicator."""
        mean = self.replica.copies()
        dense_mean(self.replica.world, self.replica.named(mean), self.replica.schedule, "parameters")
        return mean

    def local_state(self) -> dict[str, Any]:
        """Return where in its period this rank is, what the others are to hear at the next round, the common model."""
        state = {"since_round": self.since_round, "bad": self.bad, "last_step_was_bad": self.last_step_was_bad}
        if self._rule is not None:
            state |= {"period": self.period, "t": self.t}
        return state if self.common is None else {**state, "common": self.common.state_dict()}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        self.since_round = int(state["since_round"])
        self.bad, self.last_step_was_bad = state["bad"], bool(state["last_step_was_bad"])
        if self._rule is not None:
            self.period, self.t = int(state["period"]), int(state["t"])
        if self.common is not None:
            self.common.load_state_dict(state["common"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return rank 0's state; a bad gradient that nobody has heard of is forgotten."""
        state = {**super().resized_state(earlier), "bad": None}
        return state if self.common is None else {**state, "common": CommonModel.resized_state(earlier, "common")}

    def evaluated_parameters(self) -> list[torch.Tensor] | None:
        """Return the mean of the workers. Collective over the communicator."""
        return self.mean_parameters()
