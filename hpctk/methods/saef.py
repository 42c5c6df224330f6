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

What travels: compressed updates, every step, by the ways of update_exchange.py (one bit for each element each way with
Sign on both sides); each average of residuals moves as many bytes as the model has.
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
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.run import UpdateRun
from hpctk.methods.core.step_ahead import StepAhead
from hpctk.methods.core.update_exchange import UpdateExchange
from hpctk.settings import documented, required, setting


@documented
@dataclass(frozen=True)
class SAEF(LocalStepMethod):
    """Exchange compressed updates; take gradients a step ahead."""

    kind: ClassVar[str] = "update"
    summary: ClassVar[str] = "compressed updates, gradients taken where the residuals point"

    compressor: Compressor = field(metadata=required("of each worker's update", parser=by_name, allowed=A_COMPRESSOR))
    server: Compressor | None = setting(None, "of the mean; not PowerSGD", parser=by_name, allowed=A_COMPRESSOR)
    average_every: int = setting(0, "iterations between averages of the residuals; 0 for never", at_least=0)
    step_ahead: bool = setting(True, "whether gradients are taken at x - e_k; else at x, as in classic error feedback")

    def __post_init__(self) -> None:
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
        way: type[UpdateExchange] = StepAhead if settings.step_ahead else ErrorFeedback
        self.feedback = way(replica, settings.compressor, settings.server)
        self.x = FlatBuffer(self.feedback.parameters)

    def exchange(self, *, active: bool) -> None:
        """Send the update, move x, and step ahead of it. Collective over the communicator. In place."""
        self.feedback.cut_anew()
        if self.t == 0:
            self._start()
        if active:
            self.base.step()
        error = self.feedback.exchange(self.x)
        if error is not None:
            self.keep_unsent(error, self.feedback.unsent)
        self.counts["rounds"] += 1
        every = self._settings.average_every
        # Iteration t + 1 would begin with it, but its forward needs the parameters before.
        if every and (self.t + 2) % every == 0:
            self.feedback.average()
            self.counts["averages"] += 1

    def _start(self) -> None:
        """Let x be what the model holds."""
        torch_private.foreach_copy_(self.x.parts, self.feedback.values)

    def commit(self) -> None:
        """Take what was done for done."""
        self.feedback.commit()

    def forget(self, kept: list[int]) -> None:
        """Forget lost ranks: what they had not sent is lost with them. Local."""
        self.feedback.forget()

    def _named_x(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.feedback.names, self.x.parts, strict=True))

    def evaluated_parameters(self) -> list[torch.Tensor] | None:
        """Return x."""
        x = self._named_x()
        return None if self.t == 0 else [x[name] for name in self.replica.names]

    def shared_state(self) -> Mapping[str, torch.Tensor]:
        """Return x; the parameters before the first step."""
        return super().shared_state() if self.t == 0 else self._named_x()

    def local_state(self) -> dict[str, Any]:
        """Return x, this rank's parameters or residuals, the server's, what the compressors remember, and t."""
        if self.t == 0:
            self._start()
        aside = None if self.set_aside is None else self.replica.named(self.set_aside)
        return {"x": self._named_x(), **self.feedback.state_dict(aside), "t": self.t}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned; the parameters are written, too."""
        restore(self._named_x(), state["x"], "x")
        self.feedback.load_state_dict(state, self.x)
        self.t = int(state["t"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return a state in which the mean of the residuals is what it was, and this rank's part of the server's."""
        return {**earlier.first(), **self.feedback.resized_state(earlier)}
