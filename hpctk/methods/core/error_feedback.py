"""What of an update travels and what stays behind, on the worker's side and on the server's.

    c_k = C(e_k + update_k);  e_k = e_k + update_k - c_k;  c = mean_k c_k
    o = c, or with a server  o = C_server(s + c);  s = s + c - o

`Sign` sees the whole model as one vector with one scale. Without a server every rank gets every rank's signs; with
Sign on both sides they make the one-bit all-reduce (collectives/onebit.py): one bit for each element each way, s cut
into shards. With any other server every rank knows c and does the server's work itself, the same everywhere, so s is
replicated and nothing more travels; where that server is Sign, its 1-norm is put together from shards, the same sum
on every rank.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeGuard

import torch

from hpctk.collectives.compressed_mean import compressed_mean, dense_mean
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.signs import feed_common_signs, mean_of_signs
from hpctk.collectives.onebit import onebit_allreduce, shard_bounds
from hpctk.compressors import Compressor, Residuals, sign
from hpctk.compressors.core import finite
from hpctk.compressors.core.compressor import refuse
from hpctk.compressors.core.packet import Packet
from hpctk.errors import SettingError
from hpctk.methods.core.flat_buffer import FlatBuffer
from hpctk.methods.core.replica import Replica, restore
from hpctk.telemetry.recorder import Span

#: The name of the model as one vector, for compressors and residuals.
WHOLE = "the whole model"


class ErrorFeedback:
    """The way of updates from all ranks to all ranks.

    Parameters
    ----------
    replica : Replica
    compressor : Compressor
        Of each worker's update; used by a copy of it.
    server : Compressor or None
        Of the mean; used by a copy of it.

    Attributes
    ----------
    names, parameters
        In the order of rows: what Sign sees as one vector comes first.
    errors : list of torch.Tensor
        e_k, for each parameter.
    shard : torch.Tensor
        This rank's part of s where that is cut into shards; empty else.
    """

    def __init__(self, replica: Replica, compressor: Compressor, server: Compressor | None) -> None:
        self._replica = replica
        # Copies: both may be one object, and only the worker's draws are to differ from rank to rank.
        self._compressor, self._server = deepcopy(compressor), deepcopy(server)
        self._compressor.set_rank(replica.world.rank)
        signs = [each for each in (self._compressor, self._server) if _sends_signs(each)]
        named = list(zip(replica.names, replica.parameters, strict=True))
        spared = {name: not signs or signs[0].is_excluded(name, parameter) for name, parameter in named}
        if signs and any(spared[name] != signs[-1].is_excluded(name, parameter) for name, parameter in named):
            raise SettingError("Sign as compressor and Sign as server must spare the same tensors")
        named.sort(key=lambda pair: spared[pair[0]])
        self.names, self.parameters = [name for name, _ in named], [parameter for _, parameter in named]
        #: Tensors and elements of the vector that Sign sees.
        self._signed = list(spared.values()).count(False)
        self._n = sum(parameter.numel() for parameter in self.parameters[: self._signed])
        self._two_way = len(signs) == 2 and self._n > 0
        self._row = FlatBuffer(self.parameters)
        self.errors = self._row.parts
        self._residuals, self._server_residuals = Residuals(zip(self.names, self.errors, strict=True)), Residuals()
        self.shard = self.own_shard(torch.zeros(self._n, dtype=self.parameters[0].dtype))

    def own_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of s, given the whole; empty where s is not cut into shards."""
        lo, hi = shard_bounds(self._replica.world, self._n) if self._two_way else (0, 0)
        return whole[lo:hi].clone()

    def check(self, updates: FlatBuffer) -> None:
        """Raise TensorError where the sum of an update and its residual is not finite. Local. Changes nothing."""
        bad = finite.first_bad_sum(self._row.flat, updates.flat)
        if bad is not None:
            i = bisect(self._row.edges, bad) - 1
            refuse(bad - self._row.edges[i], self._row.parts[i].numel(), self.names[i])

    def exchange(self, updates: FlatBuffer, x: FlatBuffer) -> bool:
        """Replace updates by o and return False; or move x by o without writing it down, and return True.

        Collective over the communicator. In place. All ranks have found their updates good by `check`.
        """
        if self._two_way:
            self._one_bit(updates, x)
            return True
        self._mean(updates)
        self._serve(updates)
        return False

    def _one_bit(self, updates: FlatBuffer, x: FlatBuffer) -> None:
        n = self._n
        with engine_of(self._replica.world).span(WHOLE) as span:
            packet = self._signs(updates, span)
            scale, signs = sign.read(packet)
            packed = signs.cpu().numpy()
            packed, common = onebit_allreduce(self._replica.world, packed, scale, n, self.shard.numpy())
            with span.decompressing():
                sign.add(torch.from_numpy(packed).to(x.flat.device), -common, x.flat[:n])
        self._mean_of_spared(updates)
        x.flat[n:].sub_(updates.flat[n:])

    def _signs(self, updates: FlatBuffer, span: Span) -> Packet:
        update, error = updates.flat[: self._n], self._row.flat[: self._n]
        with span.compressing():
            return self._compressor.feed(update, error, WHOLE)

    def _mean_of_spared(self, updates: FlatBuffer) -> None:
        if self._signed < len(self.names):
            named = dict(zip(self.names[self._signed :], updates.parts[self._signed :], strict=True))
            dense_mean(self._replica.world, named, self._replica.schedule, "updates")

    def _mean(self, updates: FlatBuffer) -> None:
        here, schedule = self._replica.world, self._replica.schedule
        if not _sends_signs(self._compressor):
            named = dict(zip(self.names, updates.parts, strict=True))
            compressed_mean(here, named, self._compressor, self._residuals, schedule, checked=True)
            return
        self._mean_of_spared(updates)
        if self._n:
            with engine_of(here).span(WHOLE) as span:
                mean_of_signs(here, self._signs(updates, span), updates.flat[: self._n])

    def _serve(self, updates: FlatBuffer) -> None:
        server, kept = self._server, self._server_residuals
        if _sends_signs(server):
            whole = updates.flat[: self._n]
            feed_common_signs(self._replica.world, whole, kept.of(WHOLE, whole))
        elif server is not None:
            for name, part in zip(self.names, updates.parts, strict=True):
                if not server.is_excluded(name, part):
                    part.copy_(server.decompress(kept.feed(server, name, part)))

    def average(self) -> None:
        """Replace all residuals by their mean over the ranks. Collective over the communicator. In place."""
        named = zip(self.names, self.errors, strict=True)
        errors = {
            f"residual of {name}": error for name, error in named if not self._compressor.is_excluded(name, error)
        }
        dense_mean(self._replica.world, errors, self._replica.schedule, "residuals")

    def state_dict(self) -> dict[str, Any]:
        """Return all residuals, and what the compressors remember; not copies."""
        return {
            "residuals": dict(zip(self.names, self.errors, strict=True)),
            "server_residuals": self._server_residuals.state_dict(),
            "server_shard": self.shard,
            "compressor": self._compressor.state_dict(),
            "server": {} if self._server is None else self._server.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from copies of what `state_dict` returned."""
        restore(dict(zip(self.names, self.errors, strict=True)), state["residuals"], "the residual")
        restore({"shard": self.shard}, {"shard": state["server_shard"]}, "the server's residual")
        self._server_residuals.load_state_dict(state["server_residuals"])
        self._compressor.load_state_dict(state["compressor"])
        if self._server is not None:
            self._server.load_state_dict(state["server"])


def _sends_signs(compressor: Compressor | None) -> TypeGuard[Compressor]:
    """Return whether a compressor sees the whole model as one vector of signs with one scale."""
    return compressor is not None and compressor.combines == "signs"
