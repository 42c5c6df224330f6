"""SASG: sparse updates, sent only by the workers that have news.

Deng, Li, Sun, Lu, "SASG: Sparse Communication with Adaptive Aggregated Stochastic Gradients for Distributed
Learning", arXiv 2112.04088. M workers; h_1, h_2, ... the most recent squared lengths of steps, newest first:

    theta = alpha / M^2 * (h_1 + ... + h_terms)
    upload if ||g(w) - g(w_snap)||^2 > theta on the same minibatch, or after max_delay steps without; always
    in the first `warmup` steps
    upload   p = update(g) + e;  q = TopK(p);  e = p - q;  w_snap = w
    skip     q, e and w_snap stay, and so does the base optimizer; g is forgotten
    w <- w - sum over all workers of q: the last q of a worker that skipped is applied again

What travels: a byte from everyone, then the messages of the uploaders: k values and k indices of all tensors as one
sparse vector, or with a compressor such as ChunkTopK its packets. Every rank keeps every rank's last q, so there is no
server. The q are added up in rank order, from zero, and the sum is subtracted: elementwise, hence the same bits on all
ranks.

A rank without data says so once, by an empty message, and its q is not applied any more; its residual waits for it
to come back.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.lazy_allgather import lazy_allgather
from hpctk.compressors import A_COMPRESSOR, Compressor, Residuals, TopK, by_name
from hpctk.errors import SettingError, TensorError
from hpctk.kernels.in_order import add_in_order
from hpctk.methods.core.flat_buffer import FlatBuffer, squared_distance, take_back
from hpctk.methods.core.last_messages import LastMessages
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.replay import Replay
from hpctk.methods.core.replica import Gradients, Replica, restore
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.run import Closure, Commit, UpdateRun, nothing
from hpctk.methods.core.survival import Undo
from hpctk.methods.core.uploads import uploads_of
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class SASG(LocalStepMethod):
    """Upload the top-k of update plus residual, and only when the gradient has changed enough.

    The defaults are the authors', for SGD without momentum. Otherwise begin with `SASG(density=0.1, alpha=0.1,
    reduce="mean")`: with momentum the defaults were the worst of eight settings (benchmarks/RESULTS.md).
    """

    kind: ClassVar[str] = "update"
    summary: ClassVar[str] = "sparse updates, only from the workers that have news"

    density: float = setting(0.01, "part of each tensor's elements that an upload carries", above=0, at_most=1)
    alpha: float | None = setting(
        None,
        "how much change is no news; 0 sends whatever differs; below 0, everything",
        shown="1/lr of each step, M/lr with reduce='mean'",
    )
    max_delay: int = setting(10, "steps after which a worker uploads in any case", at_least=0)
    terms: int | None = setting(
        None, "how many steps back the length of steps is looked at", at_least=0, shown="max_delay - 1"
    )
    warmup: int = setting(10, "steps at the start in which everyone uploads", at_least=0)
    reduce: str = setting(
        "sum", "what is applied of the messages; the sum is the authors' convention", choices=("sum", "mean")
    )
    compressor: Compressor | None = setting(
        None,
        "what chooses and writes an upload's elements, such as ChunkTopK()",
        parser=by_name,
        allowed=A_COMPRESSOR,
        shown="TopK(density)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.compressor
        if given is None:
            return
        if given.combines not in ("pairs", "lists") or given.settings().get("keep"):
            raise SettingError(f"compressor={given!r}: an upload lists elements; take TopK or ChunkTopK")
        if given.exclude or given.min_elements:
            raise SettingError(f"compressor={given!r}: an upload spares no tensor; leave out exclude and min_elements")

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> SasgRun:
        """Return SASG at work on a replica."""
        return SasgRun(self, replica, base)


class SasgRun(UpdateRun):
    """SASG at work on one rank.

    Attributes
    ----------
    messages : LastMessages
        The last q of every rank; none before its first upload, and after it ran out of data.
    lengths : list of float
        h, as many as are looked at.
    delay : int
        tau: 1 after an upload, one more after each skip.
    """

    def __init__(self, settings: SASG, replica: Replica, base: torch.optim.Optimizer) -> None:
        super().__init__(replica, base)
        self._settings = settings
        compressor = TopK(settings.density) if settings.compressor is None else deepcopy(settings.compressor)
        values = replica.values
        #: The update, or the sum of all messages; the model, while a gradient is taken elsewhere.
        self._scratch = FlatBuffer(values)
        self.residuals = Residuals()
        self._encoder = uploads_of(compressor, self._scratch, self.residuals)
        self._compressor_name = type(compressor).__name__
        self.snapshot = FlatBuffer(values).parts
        self.messages = LastMessages(replica.world.size, self._scratch, self._encoder.read)
        self.lengths: list[float] = []
        self.delay = 0
        self._replay: Replay | None = None
        #: Whether there is news in this step, None where that is not known yet; and whether this rank uploads.
        self._news: bool | None = None
        self._uploads = False

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do one iteration; the closure is called a second time where only that tells whether to upload."""
        if closure is None:
            raise TypeError(
                "SASG needs step(closure): it takes a second gradient of the same minibatch at an earlier model. "
                "Let the closure zero the gradients, run forward and backward, and return the loss."
            )
        self._news = None
        self._replay = None if self._uploads_anyway() else Replay(self.replica, closure)
        try:
            return super().step(closure, loss)
        finally:
            self._replay = None

    def prepare(self, gradients: Gradients) -> None:
        """Find out whether this rank uploads: the closure may fail at the earlier model."""
        super().prepare(gradients)
        if self._news is None:
            self._news = self._has_news()

    def exchange(self, *, active: bool) -> Commit:
        """Upload or skip, to apply all ranks' messages. Collective over the communicator. In place."""
        here = self.replica.world
        if not self.stepped:
            self._uploads = active and bool(self._news) and self._take_update()
            self.stepped = True
        uploads = self._uploads
        if uploads and not self._scratch.flat.is_cpu:
            here.note_staging(self._scratch.flat)
        n, itemsize = self._scratch.flat.numel(), self._scratch.flat.element_size()
        with engine_of(here).span("updates", self._compressor_name, elements=n, dense_bytes=n * itemsize) as span:
            with span.compressing():
                message = self._encoder.write() if uploads else None if active else self._farewell()
            received = lazy_allgather(here, message)

        def commit() -> None:
            if uploads:
                self._encoder.take_out(self._updates())
            self.messages.replace(received)
            self.delay = 1 if uploads else self.delay + 1
            self.counts["uploads" if uploads else "skips"] += 1
            if uploads:
                self.counts["rounds"] += 1
                self.counts["upload_bits"] += self._encoder.bits
            self._apply()

        return commit

    def undo(self) -> Undo:
        """Return what does nothing: the parameters are as before, and so is the base optimizer's step in any case.

        Whether this rank uploads was found out once, with the ranks that there were then. Where residuals are shared
        out, the step is undone: what is sent is chosen from other residuals then. Local.
        """
        return super().undo() if self.replica.buddies else nothing

    def _uploads_anyway(self) -> bool:
        """Return whether this rank's next step uploads whatever its gradient is."""
        settings = self._settings
        known = self.messages.known(self.replica.world.rank)
        late = self.delay > settings.max_delay
        always = settings.alpha is not None and settings.alpha < 0
        return always or self.t < settings.warmup or not known or late

    def threshold(self) -> float:
        """Return theta, the squared change of a gradient that is no news."""
        moved = sum(self.lengths)
        if moved == 0:
            return 0.0
        size, alpha = self.replica.world.size, self._settings.alpha
        if alpha is None:
            rate = float(self.base.param_groups[0]["lr"])
            numerator = size if self._settings.reduce == "mean" else 1
            alpha = numerator / rate if rate > 0 else math.inf
        return alpha / size**2 * moved

    def _has_news(self) -> bool:
        """Return whether this rank uploads."""
        # Not "change > theta": a change that is NaN, as a gradient far from here may make it, is news.
        return self._replay is None or not self._change(self._replay) <= self.threshold()

    def _change(self, replay: Replay) -> float:
        """Return ||g(w) - g(w_snap)||^2, summed in float64."""
        now = self.replica.gradients()
        then = replay.gradients_at(self.snapshot, self._scratch.parts)
        return add_in_order(squared_distance(a, b) for a, b in zip(now, then, strict=True))

    def _take_update(self) -> bool:
        """Let the base optimizer step, and keep what it would subtract; return whether that can be sent."""
        replica = self.replica
        values = replica.values
        torch_private.foreach_copy_(self.snapshot, values)
        try:
            self.base.step()
        except BaseException:
            replica.load(self.snapshot)
            raise
        take_back(self.snapshot, values, self._scratch)
        try:
            # Changes nothing: a bad tensor must leave all residuals as they are.
            self._encoder.pick(self._updates())
        except TensorError as error:
            # The others are on their way into the exchange.
            self.keep_unsent(error, "That update was not sent; the residual is what it was before it.")
            return False
        return True

    def _updates(self) -> dict[str, torch.Tensor]:
        return self.replica.named(self._scratch.parts)

    def _farewell(self) -> Any:
        """Return an empty message where the others still hold one of this rank."""
        return np.empty(0, np.uint8) if self.messages.known(self.replica.world.rank) else None

    def _apply(self) -> None:
        """Subtract the sum of all messages from the parameters, and note how far that was."""
        divisor = self.replica.world.size if self._settings.reduce == "mean" else 1
        length = self.messages.subtract_from(self.replica.values, divisor)
        terms = self._settings.terms
        looked_at = max(0, self._settings.max_delay - 1) if terms is None else terms
        self.lengths = [length, *self.lengths][:looked_at]

    def local_state(self) -> dict[str, Any]:
        """Return residuals, snapshot, all ranks' messages, lengths of steps, delay and t."""
        return {
            "residuals": self.residuals.state_dict(),
            "snapshot": self._named_snapshot(),
            "messages": self.messages.state_dict(),
            "lengths": torch.tensor(self.lengths, dtype=torch.float64),
            "delay": self.delay,
            "t": self.t,
        }

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Go on from what `local_state` returned."""
        restore(self._named_snapshot(), state["snapshot"], "the snapshot")
        self.residuals.load_state_dict(state["residuals"])
        self.messages.load_state_dict(state["messages"])
        self.lengths = state["lengths"].tolist()
        self.delay, self.t = int(state["delay"]), int(state["t"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return residuals that keep what is applied; every rank uploads first, as no message is known.

        The messages of ranks that skipped would only have been applied once more: nothing is lost with them.
        """
        if self._settings.reduce == "mean":
            residuals = reshard(earlier.each("residuals"), earlier.size)
        else:
            residuals = reshard(earlier.each("residuals"), self.replica.world.size)
        return {**earlier.first(), "residuals": residuals, "messages": {}, "delay": 0}

    def load_recovered(self, state: dict[str, Any]) -> None:
        """Go on from a state with shares of what lost ranks had: as no message is known, there is news. Local."""
        self.load_local_state(state)
        self._news = self._replay = None

    def forget(self, kept: list[int]) -> None:
        """Forget the messages of lost ranks: they are not applied any more. Local."""
        self.messages = self.messages.of_ranks(kept)

    def _named_snapshot(self) -> dict[str, torch.Tensor]:
        return self.replica.named(self.snapshot)
