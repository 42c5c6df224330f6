"""The way of updates from all ranks to all ranks: what the two forms of error feedback have in common.

    c = mean_k c_k
    o = c, or with a server  o = C_server(s + c);  s = s + c - o

`Sign` sees the whole model as one vector with one scale. Without a server every rank gets every rank's signs; with
Sign on both sides they make the one-bit all-reduce (collectives/onebit.py): one bit for each element each way, s cut
into shards. With any other server every rank knows c and does the server's work itself, the same everywhere, so s is
replicated and nothing more travels; where that server is Sign, its 1-norm is put together from shards, the same sum
on every rank.

Where the residuals e_k are is the affair of the subclasses: error_feedback.py keeps them, step_ahead.py finds them
in the parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeGuard

import torch

from hpctk.collectives.dense_mean import dense_mean, dense_sum
from hpctk.collectives.engine.signs import feed_common_signs
from hpctk.collectives.onebit import shard_bounds
from hpctk.compressors import Compressor, Residuals
from hpctk.errors import SettingError, TensorError
from hpctk.methods.core.flat_buffer import FlatBuffer
from hpctk.methods.core.replica import Replica, restore
from hpctk.methods.core.resharding import SavedRanks
from hpctk.methods.core.survival import Undo, copied

#: The name of the model as one vector, for compressors and residuals.
WHOLE = "the whole model"


class UpdateExchange(ABC):
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
    shard : torch.Tensor
        This rank's part of s where that is cut into shards; empty else.
    """

    #: What becomes of an update that is not finite.
    unsent: str

    def __init__(self, replica: Replica, compressor: Compressor, server: Compressor | None) -> None:
        self._replica = replica
        # Copies: both may be one object, and only the worker's draws are to differ from rank to rank.
        self._compressor, self._server = deepcopy(compressor), deepcopy(server)
        self._compressor.set_rank(replica.world.rank)
        signs = [each for each in (self._compressor, self._server) if sends_signs(each)]
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
        self._server_residuals = Residuals()
        self.shard = self.own_shard(torch.zeros(self._n, dtype=self.parameters[0].dtype))
        self._lo = self._bounds[0]
        #: What this rank has of s, where ranks were lost and s is to be cut anew.
        self._uncut: torch.Tensor | None = None

    @property
    def values(self) -> list[torch.Tensor]:
        """The parameters in the order of rows, without their history: to be read and changed in place."""
        return [parameter.detach() for parameter in self.parameters]

    def own_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of s, given the whole; empty where s is not cut into shards."""
        lo, hi = self._bounds
        return whole[lo:hi].clone()

    @property
    def _bounds(self) -> tuple[int, int]:
        return shard_bounds(self._replica.world, self._n) if self._two_way else (0, 0)

    def forget(self) -> None:
        """Have s cut into the shards of the ranks that are left, at the next exchange; that of a lost rank is lost.

        Local.
        """
        if self._two_way:
            if self._uncut is None:
                self._uncut = torch.zeros(self._n, dtype=self.shard.dtype)
                self._uncut[self._lo : self._lo + len(self.shard)] = self.shard
            self._lo = self._bounds[0]
            self.shard = self.own_shard(self._uncut)

    def cut_anew(self) -> None:
        """Cut s where ranks were lost since the last exchange. Collective over the communicator then. In place."""
        if self._uncut is not None:
            whole = self._uncut.clone()
            dense_sum(self._replica.world, {"the server's residual": whole}, self._replica.schedule, "residuals")
            self.shard = self.own_shard(whole)

    def commit(self) -> None:
        """Take what was done since the last exchange for done. Local."""
        self._uncut = None

    def undo(self) -> Undo:
        """Return what puts back all that an exchange changes which `defers` the rest. Local."""
        state = copied(self._compressor.state_dict())
        return lambda: self._compressor.load_state_dict(state)

    @property
    def defers(self) -> bool:
        """Whether `exchange` leaves x, the parameters and all that is kept as they are until it is applied."""
        return False

    @abstractmethod
    def exchange(self, x: FlatBuffer) -> tuple[TensorError | None, Callable[[], None] | None]:
        """Send what the base optimizer has done to the parameters since they were written, to move x and them.

        Collective over the communicator. In place. Return why this rank's update was not sent, where it is not finite:
        the other ranks' are, and they do not know. And what moves x and the parameters; None where they have moved.
        """

    @abstractmethod
    def average(self, x: FlatBuffer) -> None:
        """Replace all residuals by their mean over the ranks, and write the parameters that belong to that.

        Collective over the communicator. In place.
        """

    def _mean_of_spared(self, tensors: list[torch.Tensor]) -> None:
        """Replace those that Sign does not see by their mean over the ranks. In place."""
        if self._signed < len(self.names):
            named = dict(zip(self.names[self._signed :], tensors[self._signed :], strict=True))
            dense_mean(self._replica.world, named, self._replica.schedule, "updates")

    def _serve(self, mean: FlatBuffer) -> None:
        """Replace c by o, in place."""
        server, kept = self._server, self._server_residuals
        if sends_signs(server):
            whole = mean.flat[: self._n]
            feed_common_signs(self._replica.world, whole, kept.of(WHOLE, whole))
        elif server is not None:
            for name, part in zip(self.names, mean.parts, strict=True):
                if not server.is_excluded(name, part):
                    part.copy_(server.decompress(kept.feed(server, name, part)))

    def state_dict(self, aside: Mapping[str, torch.Tensor] | None) -> dict[str, Any]:
        """Return all residuals, and what the compressors remember; not copies.

        `aside` are the parameters by name, where the model holds something else just now.
        """
        return {
            "server_residuals": self._server_residuals.state_dict(),
            "server_shard": self.shard,
            "compressor": self._compressor.state_dict(),
            "server": {} if self._server is None else self._server.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], x: FlatBuffer) -> None:
        """Go on from copies of what `state_dict` returned; x is what it was then. Writes the parameters."""
        restore({"shard": self.shard}, {"shard": state["server_shard"]}, "the server's residual")
        self._server_residuals.load_state_dict(state["server_residuals"])
        self._compressor.load_state_dict(state["compressor"])
        if self._server is not None:
            self._server.load_state_dict(state["server"])

    def resized_state(self, earlier: SavedRanks) -> dict[str, Any]:
        """Return what of the state is not rank 0's where another number of ranks saved theirs."""
        return {"server_shard": self.own_shard(torch.cat(list(earlier.each("server_shard"))))}

    def _by_name(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self.names, tensors, strict=True))


def sends_signs(compressor: Compressor | None) -> TypeGuard[Compressor]:
    """Return whether a compressor sees the whole model as one vector of signs with one scale."""
    return compressor is not None and compressor.combines == "signs"
