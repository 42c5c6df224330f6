"""Collectives of a few numbers, made of messages: for jobs that are to outlive a rank.

Open MPI 5.0's own that return at once (MPI_Iallreduce and the like) look at their messages where a rank is lost, which
ends the process ("Send error after request freed", see `completed` in survivors.py), whatever the error handler says:
that took down a survivor in about one loss in two hundred. What is started here is kept until it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import pack, unpack

from mpi4py import MPI

from hpctk.comm.mpi import tags

#: Returns once all requests are complete, or raises.
Wait = Callable[[Sequence[MPI.Request]], None]

#: Receives that nobody waits for, as the send beside them failed: their messages may still come, and need the memory.
_unclaimed: list[MPI.Request] = []


def minimum(comm: MPI.Intracomm, values: Sequence[int], wait: Wait, tag: int = tags.MINIMUM) -> list[int]:
    """Return the smallest of all ranks' values at each position. Collective over the communicator.

    Round k brings what the 2^k ranks before have found: after log2(size) rounds, rounded up, every rank knows all. Some
    come twice, which a minimum does not mind.
    """
    rank, size, form = comm.Get_rank(), comm.Get_size(), f"{len(values)}q"
    least, step = list(values), 1
    while step < size:
        mine, theirs = pack(form, *least), bytearray(8 * len(least))
        received = comm.Irecv([theirs, len(theirs), MPI.BYTE], (rank - step) % size, tag)
        try:
            sent = comm.Isend([mine, len(mine), MPI.BYTE], (rank + step) % size, tag)
        except MPI.Exception:
            _unclaimed.append(received)
            raise
        wait((received, sent))
        least = list(map(min, least, unpack(form, theirs)))
        step, tag = 2 * step, tag + 1
    return least


def broadcast(comm: MPI.Intracomm, data: bytearray, root: int, wait: Wait) -> None:
    """Overwrite `data` by root's. Collective over the communicator. In place.

    A binomial tree: who has it gives it to the rank half as far away as the last time.
    """
    size = comm.Get_size()
    place = (comm.Get_rank() - root) % size
    step = 1
    while step < size:
        step *= 2
    while step > 1:
        half = step // 2
        if place % step == 0 and place + half < size:
            wait((comm.Isend([data, len(data), MPI.BYTE], (place + half + root) % size, tags.BROADCAST),))
        elif place % step == half:
            wait((comm.Irecv([data, len(data), MPI.BYTE], (place - half + root) % size, tags.BROADCAST),))
        step = half
