"""Ranks that agree: handshakes, errors shared by all, work done by one.

Everything here stands on two collective primitives, the minimum of some integers over all ranks and
the broadcast of bytes whose number is known, so it works over any way of communicating. What ranks tell each
other is JSON, never pickle.

Every agreement begins with a message of the same length that names the operation: ranks that are in different
collective calls all raise the same MismatchError, where they would otherwise mix what does not belong together.

One thread at a time: two at once would mix up their messages, or crash. Different threads at different times are fine,
and so is the thread of ddp/driver.py, which steps in only while nobody else is there and for whom others wait a moment.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from types import TracebackType
from typing import TypeVar

from hpctk.errors import HpctkError, MismatchError, PeerError, SettingError, TensorError
from hpctk.telemetry.recorder import Recorders

T = TypeVar("T")
Items = Sequence[tuple[str, object]]

#: Integers in the first message of every agreement, and how many of them name the operation.
FRAME, HEAD = 16, 4
#: Errors of one rank that all ranks raise as what they are; any other becomes a PeerError.
SHARED_KINDS: dict[str, type[HpctkError]] = {kind.__name__: kind for kind in (SettingError, TensorError, MismatchError)}


class Agreement(ABC):
    """What a group of ranks can settle among themselves."""

    rank: int
    size: int
    #: Of the calls among these ranks; an agreement is one.
    recorders: Recorders
    #: What the user has called that is made of several operations, "" where that is none.
    _called: str = ""

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Let waits inside be named after what the user called, in errors here and on other ranks. Local."""
        outer, self._called = self._called, self._called or name
        try:
            yield
        finally:
            self._called = outer

    def wait_name(self, operation: str) -> str:
        """Return how a wait is named: after what the user called, with the operation in it."""
        return f"{self._called} ({operation})" if self._called else operation

    @abstractmethod
    def _minimum(self, values: Sequence[int], operation: str) -> list[int]:
        """Return the smallest of all ranks' values at each position; all ranks give as many."""

    @abstractmethod
    def _broadcast(self, data: bytearray, root: int, operation: str) -> None:
        """Overwrite `data`, as long on all ranks, by root's. In place."""

    def minimum(self, values: Sequence[int], operation: str) -> list[int]:
        """Return the smallest of all ranks' `values` (64 bits, signed) at each position.

        Collective over the communicator. Raise MismatchError where ranks are in different operations, or give
        different numbers of values.
        """
        began = time.perf_counter()
        least = self._framed(values, operation)
        self.recorders.record_control("flags", operation, 8 * (HEAD + max(len(values), FRAME - HEAD)), began)
        return least

    def _framed(self, values: Sequence[int], operation: str) -> list[int]:
        code, n = _code(operation), len(values)
        room = FRAME - HEAD
        first = self._minimum([code, -code, n, -n, *values[:room], *((0,) * max(0, room - n))], operation)
        # A number and its negative are both least only if all ranks gave the same.
        if first[0] != -first[1] or first[2] != -first[3]:
            raise self._elsewhere(operation)
        least = first[HEAD : HEAD + n]
        return least if n <= room else least + self._minimum(values[room:], operation)

    def _elsewhere(self, operation: str) -> MismatchError:
        """Return the error for ranks that are in different operations, the same on all. Collective."""
        operations = self.gather_texts(operation, "comparing operations")
        odd = next((rank for rank, other in enumerate(operations) if other != operations[0]), None)
        if odd is None:
            return MismatchError(f"the ranks give different numbers of values in {operation}")
        return MismatchError(
            f"the ranks are in different collective calls: rank 0 is in {operations[0]}, rank {odd} in "
            f"{operations[odd]}. Every rank must make the same collective calls in the same order."
        )

    def broadcast_bytes(self, data: bytes, root: int, operation: str) -> bytes:
        """Return root's `data` on every rank. Collective over the communicator."""
        began = time.perf_counter()
        length = -self._framed([-len(data) if self.rank == root else 0], operation)[0]
        text = bytearray(data) if self.rank == root else bytearray(length)
        if length:
            self._broadcast(text, root, operation)
        self.recorders.record_control("broadcast", operation, length if self.rank == root else 0, began)
        return bytes(text)

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
        digest = digest_of(text)
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
        """Run local work; if it fails on any rank, every rank raises the same error.

        Collective over the communicator. For work between collectives that can fail on one rank
        alone (opening a file): the others would wait for it in the next collective. A SettingError, TensorError or
        MismatchError stays one; anything else is a PeerError on all ranks.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failed = self.minimum([self.size if error is None else self.rank], what)[0]
        if failed == self.size:
            return
        raise self.shared_error(error, failed, what) from error

    def shared_error(self, error: Exception | None, failed: int, what: str) -> HpctkError:
        """Return the error of rank `failed` as all ranks are to raise it. Collective over the communicator."""
        return _shared(self.broadcast_bytes(describe(error), failed, what).decode(), failed, what)

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
            raise _shared(answer["error"], root, what) from error
        result: T = answer["result"]
        return result


#: Seconds between two looks whether the driver is through.
NAP_S = 2e-5


class OneThread:
    """Held by whoever uses a communicator, as a context; the same thread may enter it again.

    Where another thread is inside, entering raises HpctkError.

    Parameters
    ----------
    own : str
        How a thread gets a communicator of its own.
    """

    # No lock: acquiring and releasing one takes longer than all of this, in calls that are made of several. Nor is one
    # needed: Python switches threads at calls and jumps back, and there is neither between a look and what follows it.
    __slots__ = ("_depth", "_driving", "_own", "_thread")

    def __init__(self, own: str = "comm.Dup()") -> None:
        self._own = own
        #: Of the thread inside, 0 where there is none; how often it has entered.
        self._thread = self._depth = 0
        self._driving = False

    @property
    def holder(self) -> int:
        """The thread inside, 0 where there is none."""
        return self._thread

    def __enter__(self) -> None:
        me = get_ident()
        if self._thread == me:
            self._depth += 1
        elif not self._thread:
            self._thread, self._depth = me, 1
        else:
            self._enter_late()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = 0

    def _enter_late(self) -> None:
        while self._thread:
            if not self._driving:
                raise HpctkError(
                    f"two threads use one communicator at once: give each thread its own, {self._own} "
                    f"(this is thread {threading.current_thread().name!r})"
                )
            time.sleep(NAP_S)
        self.__enter__()

    def drive(self, work: Callable[[], bool]) -> bool:
        """Do what takes a moment, in a thread of hpctk's own; return what it does, False where others are there."""
        me = get_ident()
        if self._thread:
            return False
        self._thread, self._depth, self._driving = me, 1, True
        try:
            return work()
        finally:
            self._depth, self._driving, self._thread = 0, False, 0


@lru_cache(maxsize=1024)
def _code(operation: str) -> int:
    return digest_of(operation.encode())


def digest_of(data: bytes) -> int:
    """Return 62 bits that stand for `data`: the number and its negative both fit into 64."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 2


def describe(error: BaseException | None) -> bytes:
    """Return an exception as one line for other ranks to read."""
    if error is None:
        return b""
    # A file name that is no text must not fail here, on one rank: the others wait for this line.
    return f"{type(error).__name__}: {error}".rstrip(": ").encode(errors="backslashreplace")


def _shared(text: str, failed: int, what: str) -> HpctkError:
    """Return what all ranks raise for an error that `describe` has described on one of them."""
    kind, _, message = text.partition(": ")
    if kind in SHARED_KINDS:
        return SHARED_KINDS[kind](f"{what} failed on rank {failed}: {message}")
    return PeerError(f"{what} failed on rank {failed}: {text}")


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
