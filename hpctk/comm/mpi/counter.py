"""The shared word over MPI, owned by rank 0.

On one node it is a word of an MPI window, and MPI_Get_accumulate (Fetch_and_op with a request) an instruction on
shared memory: 0.04 ms, whatever rank 0 does.

Between nodes it is a number that rank 0 keeps, and adding is a message to it and one back; a thread answers while
rank 0 computes. Not a window: over TCP, Open MPI 5 blocks in starting the operation, takes several answers of the
owner for one addition, and holds a lock meanwhile that it gives to whoever comes: of four hosts that took tickets as
fast as they could one got 373 in 4 s and another a single one, where messages gave each 193, none later than 0.04 s.
Messages, too, where a job outlives its ranks: who asks rank 0 hears that it is lost, and the others make a new word.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctk.comm import forked
from hpctk.comm.mpi.abort import fault_tolerant
from hpctk.comm.mpi.tags import ASK, TICKET
from hpctk.comm.mpi.watchdog import ONE_IN_MPI
from hpctk.comm.mpi.world import MpiWorld
from hpctk.comm.shared_counter import OWNER
from hpctk.comm.world import World
from hpctk.errors import HpctkError
from hpctk.log import log

#: Words of a window, one for each that is ever made on these ranks. Only rank 0 pays for them.
WINDOW_WORDS = 2**16
#: Seconds between two looks of rank 0's thread for messages.
POLL_S = 5e-4


def mpi_counter(here: World) -> WindowCounter | ServedCounter:
    """Return a new shared word. Collective over the communicator."""
    assert isinstance(here, MpiWorld)
    # Where ranks may be lost: one that dies while it adds to a window leaves it locked.
    kind = WindowCounter if len(here.nodes) == 1 and not fault_tolerant() else ServedCounter
    return kind(here)


class WindowCounter:
    """A word in memory that all ranks reach. Collective over the communicator to make."""

    way = "window"
    sent_bytes: int | None = 8
    received_bytes: int | None = 8

    def __init__(self, here: MpiWorld) -> None:
        self._here = here
        self._window: _Window = _kept(here, _Window)
        self._place = self._window.next_place()

    def add(self, value: int) -> int:
        """Add, and return what the word was before."""
        mine, before = np.array([value], np.int64), np.empty(1, np.int64)
        # Not Fetch_and_op itself: it is completed by a flush, and nobody can look up from a flush.
        request = self._window.win.Rget_accumulate(
            [mine, MPI.INT64_T], [before, MPI.INT64_T], OWNER, (self._place, 1, MPI.INT64_T), MPI.SUM
        )
        self._here.wait([request], "taking a ticket", [OWNER])
        return int(before[0])

    def take_answered(self) -> dict[int, int]:
        """Return nothing: the memory answers by itself."""
        return {}


class ServedCounter:
    """A word that rank 0 keeps and others ask for. Collective over the communicator to make."""

    way = "messages"
    sent_bytes: int | None = 16
    received_bytes: int | None = 8

    def __init__(self, here: MpiWorld) -> None:
        self._here = here
        self._server: _CounterServer = _kept(here, _CounterServer)
        self._place = self._server.open_for(self)

    def add(self, value: int) -> int:
        """Add, and return what the word was before."""
        if self._here.rank == OWNER:
            return self._server.add(self._place, value)
        question, before = np.array([self._place, value], np.int64), np.empty(1, np.int64)
        requests = [
            self._server.comm.Irecv([before, MPI.INT64_T], OWNER, TICKET),
            self._server.comm.Isend([question, MPI.INT64_T], OWNER, ASK),
        ]
        self._here.wait(requests, "taking a ticket", [OWNER])
        return int(before[0])

    def take_answered(self) -> dict[int, int]:
        """Return how often rank 0, this one, has answered each rank since the last call."""
        return self._server.take_answered(self._place)


class _Window:
    """The memory of a communicator's words. Collective over the communicator to make and to free."""

    def __init__(self, here: MpiWorld) -> None:
        words = WINDOW_WORDS if here.rank == OWNER else 0
        self.win = MPI.Win.Allocate(8 * words, 8, comm=here.data)
        if words:
            self.win.tomemory()[:] = bytes(8 * words)
        # Nobody ever asks for an exclusive lock: no need to tell rank 0 of this one.
        self.win.Lock_all(MPI.MODE_NOCHECK)
        self.win.Sync()
        here.barrier("making a shared word")
        self._used = 0

    def next_place(self) -> int:
        """Return the place of a word that is still 0, the same on all ranks."""
        if self._used == WINDOW_WORDS:
            raise HpctkError(f"more than {WINDOW_WORDS} shared words on one communicator: duplicate it")
        self._used += 1
        return self._used - 1

    def free(self) -> None:
        # At exit ranks leave at different times, and some without freeing anything: this would wait for them.
        if not _exiting.is_set():
            self.win.Unlock_all()
            self.win.Free()


class _CounterServer:
    """Where rank 0 keeps a communicator's words and answers for them. Collective to make and to free."""

    def __init__(self, here: MpiWorld) -> None:
        self._here = here
        #: Whether it is the World's, on which nothing else has these tags. A copy of one's own would have to be made
        #: by what small_messages.py does without.
        self._borrowed = here.expects_losses
        if self._borrowed:
            self.comm = here.control
        else:
            self.comm, made = here.data.Idup()
            here.wait([made], "making a shared word")
        # A rank may ask for a word that rank 0 has not come to make yet: it is 0.
        self._values: Counter[int] = Counter()
        #: Questions answered for each word, by rank, since somebody asked for them.
        self._answered: dict[int, Counter[int]] = defaultdict(Counter)
        self._opened = 0
        self._lock = threading.Lock()
        self._clients: weakref.WeakSet[ServedCounter] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._answers: list[tuple[MPI.Request, Any]] = []
        self._threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        if here.rank == OWNER and here.size > 1 and not self._threaded:
            log.warning(
                "MPI was started without MPI_THREAD_MULTIPLE: other ranks may wait for their tickets until rank 0 "
                "has done its local step"
            )
            here.background.append(self.serve)

    def open_for(self, word: ServedCounter) -> int:
        """Return the place of a new word, the same on all ranks; it is served as long as `word` lives."""
        with self._lock:
            self._opened += 1
            self._clients.add(word)
            alone = self._here.size == 1 or self._here.rank != OWNER
            if self._thread is None and self._threaded and not alone:
                self._thread = threading.Thread(target=self._work, name="hpctk shared word", daemon=True)
                self._thread.start()
            return self._opened - 1

    def add(self, place: int, value: int) -> int:
        """Add on behalf of rank 0 itself."""
        if not self._threaded:
            self.serve()
        return self._add(place, value)

    def _add(self, place: int, value: int) -> int:
        with self._lock:
            before = self._values[place]
            self._values[place] += value
            return before

    def take_answered(self, place: int) -> dict[int, int]:
        """Return how often each rank was answered since the last call."""
        with self._lock:
            return self._answered.pop(place, {})

    def _work(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                if not self._clients:
                    self._thread = None
                    return
            try:
                with ONE_IN_MPI:
                    self.serve()
            except MPI.Exception:
                # A rank is lost: those that are left find that out, too, and make a word of their own.
                return
            time.sleep(POLL_S)

    def serve(self) -> bool:
        """Answer what has been asked; return whether there was anything."""
        status, any_asked = MPI.Status(), False
        while self.comm.Iprobe(MPI.ANY_SOURCE, ASK, status):
            question = np.empty(2, np.int64)
            self.comm.Recv([question, MPI.INT64_T], status.Get_source(), ASK)
            place, value = map(int, question)
            before = np.array([self._add(place, value)], np.int64)
            with self._lock:
                self._answered[place][status.Get_source()] += 1
            self._answers.append((self.comm.Isend([before, MPI.INT64_T], status.Get_source(), TICKET), before))
            any_asked = True
        self._answers = [(request, data) for request, data in self._answers if not request.Test()]
        return any_asked

    def close(self) -> None:
        """Stop answering."""
        self._closing.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def free(self) -> None:
        self.close()
        if self.serve in self._here.background:
            self._here.background.remove(self.serve)
        if not self._borrowed:
            self.comm.Free()


_exiting = threading.Event()
_servers: weakref.WeakSet[_CounterServer] = weakref.WeakSet()
_keyvals: dict[type, int] = {}


def _kept(here: MpiWorld, kind: Any) -> Any:
    """Return what a communicator keeps of a kind, made at the first call. Collective over the communicator then."""
    if kind in here.attached:
        return here.attached[kind]
    if not _keyvals:
        # Exit functions run last first: threads end before World frees its communicators, and before MPI.
        atexit.register(_at_exit)
    if kind not in _keyvals:
        # Freeing is collective: MPI tells us when the communicator is freed, which is collective too.
        _keyvals[kind] = MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, kept: kept.free())
    made = here.attached[kind] = kind(here)
    here.data.Set_attr(_keyvals[kind], made)
    if isinstance(made, _CounterServer):
        _servers.add(made)
    return made


def _at_exit() -> None:
    _exiting.set()
    # A thread of the rank's is not there in what was forked off it.
    for server in () if forked.is_child() else _servers:
        server.close()
