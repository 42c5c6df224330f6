"""Ranks that agree: handshakes, errors shared by all, work done by one.

Everything here stands on two collective primitives, the minimum of one integer over all ranks and
the broadcast of a byte string, so it works over any way of communicating. What ranks tell each
other is JSON, never pickle.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from hpctk.errors import MismatchError, PeerError

T = TypeVar("T")
Items = Sequence[tuple[str, object]]
#: Hears what the ranks told each other: what it was, for which operation, how many bytes, since when.
Listener = Callable[[str, str, int, float], None]


class Agreement(ABC):
    """What a group of ranks can settle among themselves."""

    rank: int
    size: int
    #: Told of every agreement, when it is made.
    listeners: Sequence[Listener] = ()

    @abstractmethod
    def _minimum(self, values: Sequence[int], operation: str) -> list[int]:
        """Do what `minimum` does."""

    @abstractmethod
    def _broadcast_bytes(self, data: bytes, root: int, operation: str) -> bytes:
        """Do what `broadcast_bytes` does."""

    def minimum(self, values: Sequence[int], operation: str) -> list[int]:
        """Return the smallest of all ranks' `values` (64 bits, signed) at each position.

        Collective over the communicator.
        """
        began = time.perf_counter()
        least = self._minimum(values, operation)
        for listen in self.listeners:
            listen("flags", operation, 8 * len(values), began)
        return least

    def broadcast_bytes(self, data: bytes, root: int, operation: str) -> bytes:
        """Return root's `data` on every rank. Collective over the communicator."""
        began = time.perf_counter()
        text = self._broadcast_bytes(data, root, operation)
        for listen in self.listeners:
            listen("broadcast", operation, len(text) if self.rank == root else 0, began)
        return text

    def agree(self, what: str, items: Items) -> None:
        """Raise MismatchError, the same on every rank, unless all ranks pass the same items.

        Collective over the communicator.

        Parameters
        ----------
        what : str
            What is being compared, for the message: "DistributedOptimizer".
        items : sequence of (str, value)
            In an order that matters. Values are compared by their text.
        """
        text = json.dumps([[str(key), str(value)] for key, value in items]).encode()
        # 62 bits: the number and its negative both fit, and are both least only if all are equal.
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
        operation = f"handshake on {what}"
        least, negated = self.minimum([digest, -digest], operation)
        if least == -negated:
            return
        reference = self.broadcast_bytes(text, 0, operation)
        odd_one = self.minimum([self.size if text == reference else self.rank], operation)[0]
        other = json.loads(self.broadcast_bytes(text, odd_one, operation))
        difference = first_difference(json.loads(reference), other, odd_one)
        raise MismatchError(
            f"{what}: rank {odd_one} disagrees with rank 0: {difference}. All ranks must be given the same."
        )

    @contextmanager
    def shared_errors(self, what: str) -> Iterator[None]:
        """Run local work; if it fails on any rank, every rank raises PeerError with the same text.

        Collective over the communicator. For work between collectives that can fail on one rank
        alone (opening a file): the others would wait for it in the next collective.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = self.minimum([self.size if error is None else self.rank], what)[0]
        if failed == self.size:
            return
        text = self.broadcast_bytes(describe(error), failed, what).decode()
        raise PeerError(f"{what} failed on rank {failed}: {text}") from error

    def gather_texts(self, text: str, operation: str) -> list[str]:
        """Return every rank's `text`, in rank order, on every rank. Collective over the communicator."""
        return [self.broadcast_bytes(text.encode(), root, operation).decode() for root in range(self.size)]

    def run_on_root(self, what: str, function: Callable[[], T], root: int = 0) -> T:
        """Run `function` on one rank and return its result on all; its exception is raised on all.

        Collective over the communicator. The result travels as JSON: None, bool, numbers, strings,
        lists and dicts with string keys. Every rank, root too, gets what JSON makes of it.
        """
        reply: dict[str, object] = {}
        error: Exception | None = None
        if self.rank == root:
            try:
                reply = {"result": function()}
                json.dumps(reply)
            except Exception as caught:
                error = caught
                reply = {"error": describe(error).decode()}
        answer = json.loads(self.broadcast_bytes(json.dumps(reply).encode(), root, what))
        if "error" in answer:
            raise PeerError(f"{what} failed on rank {root}: {answer['error']}") from error
        result: T = answer["result"]
        return result


def describe(error: BaseException | None) -> bytes:
    """Return an exception as one line for other ranks to read."""
    if error is None:
        return b""
    # A file name that is no text must not fail here, on one rank: the others wait for this line.
    return f"{type(error).__name__}: {error}".rstrip(": ").encode(errors="backslashreplace")


def first_difference(reference: list[list[str]], other: list[list[str]], rank: int) -> str:
    """Say where two handshakes part, with both values."""
    for position, (mine, theirs) in enumerate(zip(reference, other, strict=False)):
        if mine == theirs:
            continue
        if mine[0] == theirs[0]:
            return f"{mine[0]} is {mine[1]} on rank 0 and {theirs[1]} on rank {rank}"
        return f"item {position} is {mine[0]!r} on rank 0 and {theirs[0]!r} on rank {rank}"
    longer, where = (reference, 0) if len(reference) > len(other) else (other, rank)
    extra = longer[min(len(reference), len(other))][0]
    return f"rank 0 has {len(reference)} items and rank {rank} has {len(other)}; {extra!r} is only on rank {where}"
