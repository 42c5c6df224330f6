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

What travels: compressed updates, every step, by the ways of error_feedback.py (one bit for each element each way with
Sign on both sides); each average of residuals moves them dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hpctk import torch_private
from hpctk.compressors import A_COMPRESSOR, Compressor, by_name
from hpctk.errors import SettingError, TensorError
from hpctk.kernels import updates
from hpctk.methods.core.error_feedback import ErrorFeedback
from hpctk.methods.core.flat_buffer import FlatBuffer
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.run import UpdateRun
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
    """SAEF at work on one rank."""

    def __init__(self, settings: SAEF, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base)
        self._settings = settings
        self.feedback = ErrorFeedback(replica, settings.compressor, settings.server)
        self.x = FlatBuffer(self.feedback.parameters)
        #: The parameters as they were written; then the update, then what x is moved by.
        self._scratch = FlatBuffer(self.feedback.parameters)

    @property
    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.feedback.parameters]

    def exchange(self, *, active: bool) -> None:
        """Send the update, move x, and step ahead of it. Collective over the communicator. In place."""
        if self.t == 0:
            self._start()
        try:
            self._take_update(active)
            moved = self.feedback.exchange(self._scratch, self.x)
        except Exception:
            self._write(moves=False)
            raise
        self.counts["rounds"] += 1
        every = self._settings.average_every
        # Iteration t + 1 would begin with it, but its forward needs the parameters before.
        if every and (self.t + 2) % every == 0:
            self.feedback.average()
            self.counts["averages"] += 1
        self._write(moves=not moved)

    def _start(self) -> None:
        """Let x be what the model holds."""
        for row in (self.x, self._scratch):
            torch_private.foreach_copy_(row.parts, self._values)

    def _take_update(self, active: bool) -> None:
        """Let the base optimizer step, and keep what it subtracted; the parameters are written later."""
        if not active:
            self._scratch.flat.zero_()
            return
        self.base.step()
        torch_private.foreach_sub_(self._scratch.parts, self._values)
        try:
            self.feedback.check(self._scratch)
        except TensorError as error:
            # The others are on their way into the exchange.
            self._scratch.flat.zero_()
            self.keep_unsent(error)

    def _write(self, *, moves: bool) -> None:
        """Move x by what is in the room, unless it has moved; write y_k, or x, into the parameters and the room."""
        ahead = self._settings.step_ahead
        rows = zip(self.x.parts, self._scratch.parts, self.feedback.errors, self._values, strict=True)
        for x, room, error, value in rows:
            if value.is_contiguous() and value.is_cpu:
                arrays = (tensor.view(-1).numpy() for tensor in (x, room, error, value))
                updates.move_and_write(*arrays, moves=moves, ahead=ahead)
                continue
            if moves:
                x.sub_(room)
            room.copy_(x - error if ahead else x)
            value.copy_(room)

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
        """Return x, the residuals of this rank and of the server, what the compressors remember, and t."""
        if self.t == 0:
            self._start()
        return {"x": self._named_x(), **self.feedback.state_dict(), "t": self.t}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned; the parameters are written, too."""
        restore(self._named_x(), state["x"], "x")
        self.feedback.load_state_dict(state)
        self.t = int(state["t"])
        self._write(moves=False)

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return residuals whose mean over the ranks is what it was, and this rank's part of the server's."""
        shards = torch.cat(list(earlier.each("server_shard")))
        return {
            **earlier.first(),
            "residuals": reshard(earlier.each("residuals"), earlier.size),
            "server_shard": self.feedback.own_shard(shards),
        }
