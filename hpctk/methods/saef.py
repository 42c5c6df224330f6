"""SAEF: compressed updates with error feedback, the gradient taken where the residuals point.

Xu, Huo, Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed Gradient", AAAI 2021, arXiv
2008.05823. x is the same on all ranks, e_k is rank k's residual:

    every average_every iterations  e_k <- mean_j e_j
    y_k = x - e_k;  g_k = gradient at y_k;  delta_k = e_k + update(g_k)
    c_k = C(delta_k);  e_k = delta_k - c_k;  c = mean_k c_k
    o = c, or with a server  o = C_server(s + c);  s = s + c - o
    x <- x - o

Between steps the model's parameters are y_k, so a step ends with the averaging due in the next one. Evaluate at x:
`with opt.averaged_model():`. Until the first step x is whatever the model holds; later, what was done to the parameters
since the last step, such as clamping them, travels with the update.

No residual is stored, as it is how far the parameters are from x (methods/core/step_ahead.py). With p, what they are
after the base optimizer's own step, delta_k = x - p, and the above is

    c_k = C(x - p);  p <- p + c_k - o;  x <- x - o;  the average of residuals: p <- mean_j p_j

so that x is all that is kept beside the model. With step_ahead=False, which is classic error feedback, the gradient is
taken at x, the parameters are x between steps, and e_k has to be kept (methods/core/error_feedback.py).

SA-PEF (Redie, Arablouei, Werner, TMLR 2026, arXiv 2601.20738) goes a part of the way ahead, and exchanges after
`period` local steps from there: y_k = x - step_ahead * e_k, delta_k = e_k + what the steps did. All of e_k is sent in
any case; where the gradient is taken is all that changes. Between exchanges nothing travels, a bad gradient is not
applied, and the others hear of it at the next one; steps after the last exchange are not in x.

What travels: compressed updates, every `period` steps, by the ways of update_exchange.py (one bit for each element each
way with Sign on both sides); each average of residuals moves as many bytes as the model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hpctk import torch_private
from hpctk.compressors import A_COMPRESSOR, Compressor, by_name
from hpctk.errors import SettingError
from hpctk.methods.core.error_feedback import ErrorFeedback
from hpctk.methods.core.flat_buffer import FlatBuffer
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.replica import Replica, first_bad, restore
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.run import Closure, Commit, UpdateRun, evaluate, nothing
from hpctk.methods.core.step_ahead import StepAhead
from hpctk.methods.core.step_status import LocalStatus, prepared
from hpctk.methods.core.survival import Undo
from hpctk.methods.core.update_exchange import UpdateExchange
from hpctk.settings import documented, required, setting


def _part(text: str) -> object:
    """Return the number that a text stands for; the text itself, which is refused, where it stands for none."""
    try:
        return {"true": 1.0, "false": 0.0}[text.lower()] if text.isalpha() else float(text)
    except (KeyError, ValueError):
        return text


@documented
@dataclass(frozen=True)
class SAEF(LocalStepMethod):
    """Exchange compressed updates; take gradients a step ahead."""

    kind: ClassVar[str] = "update"
    summary: ClassVar[str] = "compressed updates, gradients taken where the residuals point"

    compressor: Compressor = field(metadata=required("of each worker's update", parser=by_name, allowed=A_COMPRESSOR))
    server: Compressor | None = setting(None, "of the mean; not PowerSGD", parser=by_name, allowed=A_COMPRESSOR)
    average_every: int = setting(0, "iterations between averages of the residuals; 0 for never", at_least=0)
    step_ahead: float = setting(
        1.0,
        "gradients are taken at x - step_ahead * e_k; 0, or false, is classic error feedback, true is 1",
        at_least=0,
        at_most=1,
        parser=_part,
    )
    period: int = setting(1, "local steps between exchanges", at_least=1)

    def __post_init__(self) -> None:
        if isinstance(self.step_ahead, bool):
            object.__setattr__(self, "step_ahead", float(self.step_ahead))
        super().__post_init__()
        if self.server is not None and self.server.combines == "own":
            # Every rank does the server's work: matrix products must not decide on shared bits.
            raise SettingError(f"server={self.server!r}: its work cannot be repeated bit for bit on all ranks")

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> SaefRun:
        """Return SAEF at work on a replica."""
        return SaefRun(self, replica, base)


class SaefRun(UpdateRun):
    """SAEF at work on one rank.

    Attributes
    ----------
    feedback : UpdateExchange
        The way of updates, and where their residuals are.
    x : FlatBuffer
    """

    def __init__(self, settings: SAEF, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base)
        self._settings = settings
        sides = replica, settings.compressor, settings.server
        self.feedback: UpdateExchange = (
            StepAhead(*sides) if settings.step_ahead == 1 else ErrorFeedback(*sides, settings.step_ahead)
        )
        self.x = FlatBuffer(self.feedback.parameters)
        #: Local steps since the last exchange, where there are several, and the first bad gradient among them.
        self.since_exchange = 0
        self.bad: int | None = None
        #: Whether x is known although nothing was exchanged yet.
        self._began = False
        #: Whether the residuals are to be averaged, now that an exchange has been applied.
        self._averages = False

    @property
    def _fresh(self) -> bool:
        """Whether x is not known yet."""
        return self.t == 0 and not self._began

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do a local step, and exchange what came of the last ones where that is due."""
        period = self._settings.period
        if period == 1:
            return super().step(closure, loss)
        value = evaluate(closure)
        self._begin()
        bad = first_bad(self.replica.gradients())
        if bad is None:
            self.base.step()
        elif self.bad is None:
            self.bad = bad
        self.skipped = bad is not None
        self.since_exchange += 1
        if self.since_exchange >= period:
            self._together(lambda: self._round(active=True))
        return value

    def idle(self) -> bool:
        """Take part in an exchange without local steps."""
        if self._settings.period == 1:
            return super().idle()
        self._begin()
        return self._together(lambda: self._round(active=False))

    def _begin(self) -> None:
        if self._fresh:
            self._start()
            self._began = True

    def _round(self, *, active: bool) -> tuple[bool, Commit]:
        """Exchange what the local steps came to; return whether any rank has data, and what applies it. Collective."""

        def find() -> LocalStatus:
            self.prepare(())
            return LocalStatus((), self.bad, active)

        groups, period = self.base.param_groups, self._settings.period
        status = self.replica.status.exchange(
            prepared(find), groups, self.shared_state, period, operation="opening a round"
        )
        self.bad, self.since_exchange = None, 0
        self.skip_or_raise(status)
        apply = self.exchange(active=False) if status.active else nothing

        def commit() -> None:
            apply()
            self.t += status.active

        return status.active, commit

    def exchange(self, *, active: bool) -> Commit:
        """Send the update, to move x and step ahead of it. Collective over the communicator. In place."""
        self.feedback.cut_anew()
        if not self.stepped:
            if self._fresh:
                self._start()
            if active:
                self.base.step()
            self.stepped = True
        error, move = self.feedback.exchange(self.x)
        if error is not None:
            self.keep_unsent(error, self.feedback.unsent)

        def commit() -> None:
            if move is not None:
                move()
            self.feedback.commit()
            self.counts["rounds"] += 1
            every = self._settings.average_every
            # Iteration t + 1 would begin with it, but its forward needs the parameters before.
            self._averages = every > 0 and (self.t + 2) % every == 0

        return commit

    def concluded(self) -> None:
        """Average the residuals where it is time to. Collective over the communicator."""
        if self._averages:
            self._averages = False
            self.replica.together(lambda: self.feedback.average(self.x), super().undo)
            self.counts["averages"] += 1

    def undo(self) -> Undo:
        """Return what puts back all that an exchange changes: nothing where x and the parameters move afterwards.

        The base optimizer's own step stays, then: what it did is how far the parameters are from x. Local.
        """
        if not self.feedback.defers or self.replica.buddies:
            return super().undo()
        undo_feedback, since, bad = self.feedback.undo(), self.since_exchange, self.bad

        def undo() -> None:
            undo_feedback()
            self.since_exchange, self.bad = since, bad

        return undo

    def _start(self) -> None:
        """Let x be what the model holds."""
        torch_private.foreach_copy_(self.x.parts, self.feedback.values)

    def forget(self, kept: list[int]) -> None:
        """Forget lost ranks: what they had not sent is lost with them. Local."""
        self.feedback.forget()

    def lasting(self, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return how far parameters are from x, which moves on. Local."""
        return self._from_x(tensors) if path == ("parameters",) else tensors

    def of_now(self, path: tuple[str, ...], held: Mapping[tuple[str, ...], Any]) -> dict[str, torch.Tensor]:
        """Return parameters that are as far from x as they were. Local."""
        tensors = super().of_now(path, held)
        if path != ("parameters",):
            return tensors
        if not tensors:
            # No local step had been made since an exchange.
            ahead = self._settings.step_ahead
            tensors = {name: ahead * error for name, error in held.get(("residuals",), {}).items()}
        return self._from_x(tensors)

    def _from_x(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = self._named_x()
        return {name: x[name] - tensor for name, tensor in tensors.items()}

    def load_recovered(self, state: dict[str, Any]) -> None:
        """Go on from a state with shares of what lost ranks had; the server's residual is cut at the next exchange."""
        self.load_local_state({**state, "server_shard": self.feedback.shard})

    def _named_x(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.feedback.names, self.x.parts, strict=True))

    def evaluated_parameters(self) -> list[torch.Tensor] | None:
        """Return x."""
        x = self._named_x()
        return None if self._fresh else [x[name] for name in self.replica.names]

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return x; the parameters before the first step."""
        return super().shared_state() if self._fresh and not self.stepped else self._named_x()

    def local_state(self) -> dict[str, Any]:
        """Return x, this rank's parameters or residuals, the server's, what the compressors remember, and t."""
        if self._fresh:
            self._start()
        aside = self.replica.named(self.replica.values if self.set_aside is None else self.set_aside)
        state = {"x": self._named_x(), **self.feedback.state_dict(aside), "t": self.t}
        if self._settings.period > 1:
            state |= {"since_exchange": self.since_exchange, "bad": self.bad}
        # Between exchanges the parameters are no function of x and the residuals.
        return {**state, "parameters": aside} if self.since_exchange else state

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned; the parameters are written, too."""
        restore(self._named_x(), state["x"], "x")
        self.feedback.load_state_dict(state, self.x)
        self.t = int(state["t"])
        self.since_exchange, self.bad = int(state.get("since_exchange", 0)), state.get("bad")
        self._began = self.since_exchange > 0
        if self._began:
            restore(self.replica.named(self.replica.values), state["parameters"], "the parameters")

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return a state in which the mean of the residuals is what it was, and this rank's part of the server's.

        The mean of what the ranks did since the last exchange is what it was, too.
        """
        state = {**earlier.first(), **self.feedback.resized_state(earlier)}
        if state.get("since_exchange"):
            state |= {"parameters": reshard(earlier.each("parameters"), earlier.size), "bad": None}
        return state
