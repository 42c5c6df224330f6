"""Ways to move bytes between ranks: isend, irecv, and looking which of them are complete.

A transport moves contiguous 1-D bytes (`buffers.as_bytes`) and knows no tensors. Messages between
two ranks with the same tag arrive in the order they were sent. One message is at most
`buffers.COUNT_LIMIT` bytes long: whoever has more cuts it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hpctk.comm.buffers import Dtype


class Waiting(Protocol):
    """What a waiting rank does between two looks; see mpi.watchdog.Waiter."""

    def progress(self) -> None:
        """Something came: start counting anew."""

    def pause(self, peers: Callable[[], Iterable[int]] = tuple) -> None:
        """Let some time pass; PeerError names the operation and the peer where waiting is in vain."""


class Transport(Protocol):
    """What the engine asks of a way to communicate."""

    rank: int
    size: int
    #: Tags are 0 .. tag_limit.
    tag_limit: int
    #: Whether waiting for a message is much cheaper than asking for it, where there is nothing else to do.
    waits: bool

    def isend(self, data: Any, peer: int, tag: int) -> Any:
        """Start sending the bytes of `data` to `peer`; the memory must stay as it is until complete."""

    def irecv(self, data: Any, peer: int, tag: int) -> Any:
        """Start receiving from `peer` into `data`; the message must be exactly as long."""

    def complete(self, requests: list[Any], wait: bool = False) -> list[int]:
        """Return the positions of requests that are known to be complete; it may be that only the first are looked at.

        A complete one must not be asked about again. With `wait` it may wait for the first.
        """

    def waiter(self, operation: str) -> Waiting:
        """Return what to do while nothing is complete."""


class Reduction(Protocol):
    """An all-reduce under way."""

    def done(self) -> bool:
        """Return whether it is complete."""

    def wait(self, operation: str) -> None:
        """Return once it is complete; PeerError at the deadline."""


class NativeAllreduce(Protocol):
    """The all-reduce of the library that joins the ranks, which keeps to itself what it sends."""

    #: The schedule's name.
    name: str
    #: The library's name for it.
    title: str
    #: Whether it blocks, and is faster for it, where a caller has nothing else under way.
    blocks: bool

    def sums(self, dtype: Dtype, *, at_once: bool) -> bool:
        """Return whether it can reduce this dtype, `at_once` as for `start`."""

    def allreduce_at_once(self, tensor: Any, dtype: Dtype, op: str) -> bool:
        """Reduce a plain contiguous host tensor in place; return False where it is not one.

        Collective over the communicator. The short way, for callers that have nothing else under way: for a few bytes
        every call of Python counts, for many the library is fastest in a call that blocks.
        """

    def start(self, flat: Any, dtype: Dtype, op: str, *, at_once: bool = False) -> Reduction:
        """Start replacing flat host memory by its sum (or max) over all ranks.

        Collective over the communicator. In place. dtypes that are `widened` come as float32. `at_once` says that
        nothing else is under way and that the caller is going to wait.
        """


def wait(transport: Transport, requests: list[Any], operation: str, peers: Iterable[int] = ()) -> None:
    """Return once all `requests` are complete; PeerError at the deadline."""
    open_requests = list(requests)
    waiter = transport.waiter(operation)
    while open_requests:
        done = set(transport.complete(open_requests))
        open_requests = [request for i, request in enumerate(open_requests) if i not in done]
        if done:
            waiter.progress()
        else:
            waiter.pause(lambda: peers)
