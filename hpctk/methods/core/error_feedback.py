"""Error feedback with residuals of their own: what was not sent of updates is kept beside the model.

    update_k = x - ahead * e_k - p, p the parameters after the base optimizer's steps
    c_k = C(e_k + update_k);  e_k = e_k + update_k - c_k
    x <- x - o;  p <- x - ahead * e_k

Classic error feedback is ahead = 0: the model holds x. (For 1 the residuals are in the parameters: step_ahead.py.)

Two more copies of the model: the residuals, and room for the update.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from typing import Any

import torch

from hpctk.collectives.compressed_mean import compressed_mean
from hpctk.collectives.dense_mean import dense_mean
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.signs import mean_of_signs
from hpctk.collectives.onebit import onebit_allreduce
from hpctk.compressors import Compressor, Residuals, sign
from hpctk.compressors.core import finite
from hpctk.compressors.core.compressor import refuse
from hpctk.compressors.core.packet import Packet
from hpctk.errors import TensorError
from hpctk.methods.core.flat_buffer import FlatBuffer, difference
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.resharding import SavedRanks, reshard
from hpctk.methods.core.update_exchange import WHOLE, UpdateExchange, sends_signs
from hpctk.telemetry.recorder import Span


class ErrorFeedback(UpdateExchange):
    """Updates on their way, with residuals that are kept. See `UpdateExchange`.

    Parameters
    ----------
    ahead : float
        Which part of the residual the parameters are ahead of x.

    Attributes
    ----------
    errors : list of torch.Tensor
        e_k, for each parameter.
    """

    unsent = "That update was not sent; the residual is what it was before it."

    def __init__(self, replica: Replica, compressor: Compressor, server: Compressor | None, ahead: float = 0.0) -> None:
        super().__init__(replica, compressor, server)
        self._ahead = ahead
        self._row = FlatBuffer(self.parameters)
        self.errors = self._row.parts
        self._residuals = Residuals(zip(self.names, self.errors, strict=True))
        #: The update; then what x is moved by.
        self._scratch = FlatBuffer(self.parameters)

    def exchange(self, x: FlatBuffer) -> tuple[TensorError | None, None]:
        """Send the update, and what is left of earlier ones; move x, and write the parameters."""
        difference(x.parts, self.values, self._scratch)
        if self._ahead:
            self._scratch.flat.sub_(self._row.flat, alpha=self._ahead)
        error = self._bad_update()
        if error is not None:
            # The others are on their way into the exchange.
            self._scratch.flat.zero_()
        try:
            if self._two_way:
                self._one_bit(x)
            else:
                self._mean()
                self._serve(self._scratch)
                x.flat.sub_(self._scratch.flat)
        finally:
            self._write(x)
        return error, None

    def _bad_update(self) -> TensorError | None:
        """Return an error where the sum of an update and its residual is not finite. Local. Changes nothing."""
        bad = finite.first_bad_sum(self._row.flat, self._scratch.flat)
        if bad is None:
            return None
        i = bisect(self._row.edges, bad) - 1
        try:
            refuse(bad - self._row.edges[i], self.errors[i].numel(), self.names[i])
        except TensorError as error:
            return error
        return None

    def _write(self, x: FlatBuffer) -> None:
        for value, part, error in zip(self.values, x.parts, self.errors, strict=True):
            value.copy_(part)
            if self._ahead:
                value.sub_(error, alpha=self._ahead)

    def _one_bit(self, x: FlatBuffer) -> None:
        n, updates = self._n, self._scratch
        with engine_of(self._replica.world).span(WHOLE) as span:
            scale, signs = sign.read(self._signs(span))
            if not signs.is_cpu:
                self._replica.world.note_staging(signs)
            packed, common = onebit_allreduce(self._replica.world, signs.cpu().numpy(), scale, n, self.shard.numpy())
            with span.decompressing():
                sign.add(torch.from_numpy(packed).to(x.flat.device), -common, x.flat[:n])
        self._mean_of_spared(updates.parts)
        x.flat[n:].sub_(updates.flat[n:])

    def _signs(self, span: Span) -> Packet:
        update, error = self._scratch.flat[: self._n], self._row.flat[: self._n]
        with span.compressing():
            return self._compressor.feed(update, error, WHOLE)

    def _mean(self) -> None:
        here, schedule, updates = self._replica.world, self._replica.schedule, self._scratch
        if not sends_signs(self._compressor):
            named = self._by_name(updates.parts)
            compressed_mean(here, named, self._compressor, self._residuals, schedule, checked=True)
            return
        self._mean_of_spared(updates.parts)
        if self._n:
            with engine_of(here).span(WHOLE) as span:
                mean_of_signs(here, self._signs(span), updates.flat[: self._n])

    def average(self, x: FlatBuffer) -> None:
        """Replace all residuals by their mean over the ranks, and write the parameters that belong to that.

        Collective over the communicator. In place.
        """
        errors = {
            f"residual of {name}": error
            for name, error in self._by_name(self.errors).items()
            if not self._compressor.is_excluded(name, error)
        }
        dense_mean(self._replica.world, errors, self._replica.schedule, "residuals")
        if self._ahead:
            self._write(x)

    def state_dict(self, aside: Mapping[str, torch.Tensor] | None) -> dict[str, Any]:
        """Return all residuals, and what the compressors remember; not copies."""
        return {"residuals": self._by_name(self.errors), **super().state_dict(aside)}

    def load_state_dict(self, state: Mapping[str, Any], x: FlatBuffer) -> None:
        """Go on from copies of what `state_dict` returned; write the parameters."""
        restore(self._by_name(self.errors), state["residuals"], "the residual")
        super().load_state_dict(state, x)
        self._write(x)

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return residuals whose mean over the ranks is what it was, and this rank's part of the server's."""
        return {"residuals": reshard(earlier.each("residuals"), earlier.size), **super().resized_state(earlier)}
