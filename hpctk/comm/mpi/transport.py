"""Bytes over mpi4py, on a World's duplicate of the user's communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpctk.comm.mpi.watchdog import Waiter
from hpctk.errors import PeerError

if TYPE_CHECKING:
    from hpctk.comm.mpi.world import MpiWorld

_BYTE = MPI.BYTE
_testsome = MPI.Request.Testsome


class MpiTransport:
    """Moves bytes between the ranks of a World."""

    waits = False

    def __init__(self, world: MpiWorld) -> None:
        self.world = world
        self.rank, self.size = world.rank, world.size
        self._comm = world.data
        self.tag_limit = int(world.data.Get_attr(MPI.TAG_UB) or 32767)

    def isend(self, data: Any, peer: int, tag: int) -> MPI.Request:
        """Start sending the bytes of `data` to `peer`."""
        return self._comm.Isend([data, len(data), _BYTE], peer, tag)

    def irecv(self, data: Any, peer: int, tag: int) -> MPI.Request:
        """Start receiving exactly the bytes of `data` from `peer`."""
        return self._comm.Irecv([data, len(data), _BYTE], peer, tag)

    def complete(self, requests: list[MPI.Request], wait: bool = False) -> list[int]:
        """Return the positions of requests that are complete now."""
        try:
            return _testsome(requests) or []
        except MPI.Exception as error:
            raise PeerError(
                f"rank {self.rank} of {self.size}: MPI says {error.Get_error_string()!r} of a message. "
                "Did the ranks give tensors of different sizes?"
            ) from error

    def waiter(self, operation: str) -> Waiter:
        """Return what to do while nothing is complete."""
        return self.world.waiter(operation)
