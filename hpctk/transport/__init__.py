"""Ways to move bytes between ranks: isend, irecv, and looking which of them are complete.

A transport moves contiguous 1-D bytes (`buffers.as_bytes`) and knows no tensors. Messages between
two ranks with the same tag arrive in the order they were sent. One message is at most
`buffers.COUNT_LIMIT` bytes long: whoever has more cuts it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Patience(Protocol):
    """What a waiting rank does between two looks; see rollcall.Vigil."""

    def progress(self) -> None:
        """Something came: start counting anew."""

    def nap(self, peers: Callable[[], Iterable[int]] = tuple) -> None:
        """Let some time pass; PeerError names the operation and the peer where waiting is in vain."""


class Transport(Protocol):
    """What the engine asks of a way to communicate."""

    rank: int
    size: int
    #: Tags are 0 .. tag_limit.
    tag_limit: int
    #: Whether `complete` returns at once; else it waits for the first request.
    polls: bool

    def isend(self, data: Any, peer: int, tag: int) -> Any:
        """Start sending the bytes of `data` to `peer`; the memory must stay as it is until complete."""

    def irecv(self, data: Any, peer: int, tag: int) -> Any:
        """Start receiving from `peer` into `data`; the message must be exactly as long."""

    def complete(self, requests: list[Any]) -> list[int]:
        """Return the positions of requests that are complete, now or (see `polls`) after waiting for the first.

        A complete one must not be asked about again.
        """

    def vigil(self, operation: str) -> Patience:
        """Return what to do while nothing is complete."""


def wait(transport: Transport, requests: list[Any], operation: str, peers: Iterable[int] = ()) -> None:
    """Return once all `requests` are complete; PeerError at the deadline."""
    open_requests = list(requests)
    vigil = transport.vigil(operation)
    while open_requests:
        done = set(transport.complete(open_requests))
        open_requests = [request for i, request in enumerate(open_requests) if i not in done]
        if done:
            vigil.progress()
        else:
            vigil.nap(lambda: peers)
