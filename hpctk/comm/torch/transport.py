"""Bytes over torch.distributed point-to-point (gloo), for jobs that have no MPI (torchrun).

Gloo moves messages by itself, but cannot be asked whether one is there: it can only be waited for, and a wait that
ends early ends the whole group. So where a rank has other things to do, threads wait, and `complete` looks at what
they have seen. The messages that stand first in a plan have a thread each, and that is enough: no rank waits for a
later message of ours before it has got the first.
"""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctk.comm.transport import Waiting

if TYPE_CHECKING:
    from hpctk.comm.torch.world import TorchWorld

#: Messages of one direction that have a thread each.
WAITED = 8
#: Seconds between two looks where none of them has come.
PAUSE_S = 1e-3
#: Seconds that the threads have to end when the program does.
LEAVE_S = 2.0


class Message:
    """A message under way."""

    __slots__ = ("_error", "_seen", "_work", "peer", "waited_for")

    def __init__(self, work: Any, peer: int) -> None:
        self._work, self.peer = work, peer
        #: Whether a thread has it.
        self.waited_for = False
        self._seen = threading.Event()
        self._error: RuntimeError | None = None

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed, as far as its thread has seen."""
        return self._seen.is_set()

    def wait(self, timeout: timedelta) -> None:
        """Return once it is complete; RuntimeError where it has failed, or at the deadline."""
        if not self.waited_for:
            self._work.wait(timeout)
        else:
            self._seen.wait()
        if self._error is not None:
            raise self._error

    def watch(self, timeout: timedelta) -> None:
        """Wait for it, in a thread."""
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            self._error = error
        self._seen.set()


class Watchers:
    """Threads that wait for messages; as many as were ever needed at once."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._news = threading.Event()
        self._threads: list[threading.Thread] = []

    def give(self, message: Message) -> None:
        """Let a thread wait for a message."""
        message.waited_for = True
        self._messages.put(message)
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._work, name="hpctk gloo", daemon=True)
            thread.start()
            self._threads.append(thread)
            _in_use.add(self)

    def _work(self) -> None:
        # One call each, so that nothing here holds a message any longer than it must.
        while self._watch_next():
            self._news.set()
            self._idle.release()

    def _watch_next(self) -> bool:
        message = self._messages.get()
        if message is not None:
            message.watch(self._timeout)
        return message is not None

    def end(self, deadline: float) -> bool:
        """Let the threads end that wait for nothing more; return whether all did before the deadline."""
        for _ in self._threads:
            self._messages.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def pause(self) -> None:
        """Let some time pass, or return as soon as a message is there that nobody has heard of yet."""
        self._news.wait(PAUSE_S)
        self._news.clear()


class TorchTransport:
    """Moves bytes between the ranks of a World."""

    tag_limit = 2**31 - 1
    waits = True

    def __init__(self, world: TorchWorld) -> None:
        self.rank, self.size = world.rank, world.size
        self._world = world
        self._ranks = dist.get_process_group_ranks(world.group)
        self._operation = "a message"
        self._timeout = timedelta(seconds=world.timeout_s)
        self._watchers = Watchers(self._timeout)

    def isend(self, data: Any, peer: int, tag: int) -> Message:
        """Start sending the bytes of `data` to `peer`."""
        return self._start(dist.isend, data, peer, tag)

    def irecv(self, data: Any, peer: int, tag: int) -> Message:
        """Start receiving exactly the bytes of `data` from `peer`."""
        return self._start(dist.irecv, data, peer, tag)

    def _start(self, call: Any, data: Any, peer: int, tag: int) -> Message:
        tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
        try:
            # dist counts ranks over the whole job, hpctk within the group.
            return Message(call(tensor, self._ranks[peer], group=self._world.group, tag=tag), peer)
        except RuntimeError as error:
            raise self._world.lost(self._operation, [peer], error) from error

    def complete(self, requests: list[Message], wait: bool = False) -> list[int]:
        """Return the positions of those of the first requests that are known to be complete."""
        if wait and requests:
            self._finish(requests[0])
            return [0]
        found = []
        for position, message in enumerate(requests[:WAITED]):
            if not message.waited_for:
                self._watchers.give(message)
            elif message.done:
                self._finish(message)
                found.append(position)
        return found

    def _finish(self, message: Message) -> None:
        try:
            message.wait(self._timeout)
        except RuntimeError as error:
            raise self._world.lost(self._operation, [message.peer], error) from error

    def waiter(self, operation: str) -> Waiting:
        """Return what to do while nothing is complete."""
        self._operation = operation
        return self._world.waiter(operation, self._watchers.pause)


_in_use: weakref.WeakSet[Watchers] = weakref.WeakSet()


def end_threads() -> bool:
    """Let all threads end that wait for nothing more; return whether they did."""
    # Python ends daemon threads where they next want the GIL. Inside torch that is C++, which takes the process down.
    deadline = time.monotonic() + LEAVE_S
    ended = [watchers.end(deadline) for watchers in list(_in_use)]
    return all(ended)
