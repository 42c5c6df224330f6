"""Bytes over torch.distributed point-to-point, for jobs that have no MPI (torchrun)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpctk import environment
from hpctk.errors import PeerError


class TorchTransport:
    """Moves bytes between the ranks of a process group.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group where not given.
    """

    tag_limit = 2**31 - 1
    polls = False

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._operation = "a message"
        self._timeout = timedelta(seconds=environment.timeout_s())

    def isend(self, data: Any, peer: int, tag: int) -> Any:
        """Start sending the bytes of `data` to `peer`."""
        return self._start(dist.isend, data, peer, tag)

    def irecv(self, data: Any, peer: int, tag: int) -> Any:
        """Start receiving exactly the bytes of `data` from `peer`."""
        return self._start(dist.irecv, data, peer, tag)

    def _start(self, call: Any, data: Any, peer: int, tag: int) -> Any:
        tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
        # dist counts ranks over the whole job, hpctk within the group.
        globally = dist.get_global_rank(self._group, peer) if self._group is not None else peer
        return call(tensor, globally, group=self._group, tag=tag), peer

    def complete(self, requests: list[Any]) -> list[int]:
        """Wait for the oldest request: gloo's point-to-point work cannot be asked whether it is done."""
        if not requests:
            return []
        work, peer = requests[0]
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.size} in {self._operation}, message with rank {peer}: {error}. "
                "HPCTK_TIMEOUT_S sets how long to wait."
            ) from error
        return [0]

    def vigil(self, operation: str) -> Untiring:
        """Return what to do while nothing is complete: `complete` has waited already."""
        self._operation = operation
        return Untiring()


class Untiring:
    """Patience that never runs out, where each wait has a deadline of its own."""

    def progress(self) -> None:
        """Nothing to count."""

    def nap(self, peers: Callable[[], Iterable[int]] = tuple) -> None:
        """Nothing to wait for."""
