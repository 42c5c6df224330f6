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
sparse vector. Every rank keeps every rank's last q, so there is no server. The q are added up in rank order, from
zero, and the sum is subtracted: elementwise, hence the same bits on all ranks.

A rank without data says so once, by an empty message, and its q is not applied any more; its residual waits for it
to come back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk import torch_private
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.lazy_allgather import lazy_allgather
from hpctk.compressors import Residuals, TopK
from hpctk.compressors.core import sparse
from hpctk.errors import TensorError
from hpctk.kernels.packing import index_dtype
from hpctk.methods.core.flat_buffer import FlatBuffer, squared_distance, take_back
from hpctk.methods.core.last_messages import LastMessages
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.replay import Replay
from hpctk.methods.core.replica import Gradients, Replica, restore
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.run import Closure, UpdateRun
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class SASG(LocalStepMethod):
    """Upload the top-k of update plus residual, and only when the gradient has changed enough."""

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
        self._compressor = TopK(settings.density)
        values = replica.values
        #: The update, or the sum of all messages; the model, while a gradient is taken elsewhere.
        self._scratch = FlatBuffer(values)
        self._edges = [0, *accumulate(value.numel() for value in values)]
        self.residuals = Residuals()
        self.snapshot = FlatBuffer(values).parts
        self.messages = LastMessages(replica.world.size, self._scratch)
        self.lengths: list[float] = []
        self.delay = 0
        self._replay: Replay | None = None
        self._news = False
        #: What this step sends of each tensor: indices and values.
        self._picked: list[tuple[Any, Any]] = []

    def step(self, closure: Closure | None, loss: float | None) -> Any:
        """Do one iteration; the closure is called a second time where only that tells whether to upload."""
        if closure is None:
            raise TypeError(
                "SASG needs step(closure): it takes a second gradient of the same minibatch at an earlier model. "
                "Let the closure zero the gradients, run forward and backward, and return the loss."
            )
        self._replay = None if self._uploads_anyway() else Replay(self.replica, closure)
        try:
            return super().step(closure, loss)
        finally:
            self._replay = None

    def prepare(self, gradients: Gradients) -> None:
        """Find out whether this rank uploads: the closure may fail at the earlier model."""
        super().prepare(gradients)
        self._news = self._has_news()

    def exchange(self, *, active: bool) -> None:
        """Upload or skip, and apply all ranks' messages. Collective over the communicator. In place."""
        here = self.replica.world
        uploaded = active and self._news and self._take_update()
        n, itemsize = self._scratch.flat.numel(), self._scratch.flat.element_size()
        with engine_of(here).span("updates", "TopK", elements=n, dense_bytes=n * itemsize) as span:
            with span.compressing():
                message = self._message() if uploaded else None if active else self._farewell()
            received = lazy_allgather(here, message)
            with span.decompressing():
                self.messages.replace(received)
        self.delay = 1 if uploaded else self.delay + 1
        self.counts["uploads" if uploaded else "skips"] += 1
        if uploaded:
            self.counts["rounds"] += 1
            self.counts["upload_bits"] += self._kept() * (8 * itemsize + 32)
        self._apply()

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
        return sum(squared_distance(a, b) for a, b in zip(now, then, strict=True))

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
            self._picked = self._pick()
        except TensorError as error:
            # The others are on their way into the exchange.
            self.keep_unsent(error, "That update was not sent; the residual is what it was before it.")
            return False
        return True

    def _pick(self) -> list[tuple[Any, Any]]:
        """Return what is sent of each tensor. Changes nothing: a bad tensor must leave all residuals as they are."""
        pick, residuals = self._compressor.pick, self.residuals
        return [pick(residuals.of(name, part), part, name) for name, part in self._updates().items()]

    def _updates(self) -> dict[str, torch.Tensor]:
        return self.replica.named(self._scratch.parts)

    def _message(self) -> Any:
        """Return q, of all tensors as one sparse vector; what it lacks of the update stays in e."""
        indices, values = [], []
        dtype = index_dtype(self._edges[-1])
        for start, (name, part), (found, taken) in zip(
            self._edges, self._updates().items(), self._picked, strict=False
        ):
            self._compressor.take_out(part, self.residuals.of(name, part), found)
            indices.append(_host(found).astype(dtype, copy=False) + dtype.type(start))
            values.append(_host(taken))
        self._picked = []
        return sparse.write(np.concatenate(indices), np.concatenate(values), self._edges[-1])

    def _farewell(self) -> Any:
        """Return an empty message where the others still hold one of this rank."""
        return np.empty(0, np.uint8) if self.messages.known(self.replica.world.rank) else None

    def _kept(self) -> int:
        return sum(self._compressor.k(part.numel()) for part in self._scratch.parts)

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

    def forget(self, kept: list[int]) -> None:
        """Forget the messages of lost ranks: they are not applied any more. Local."""
        self.messages = self.messages.of_ranks(kept)

    def _named_snapshot(self) -> dict[str, torch.Tensor]:
        return self.replica.named(self.snapshot)


def _host(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array
