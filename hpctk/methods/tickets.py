"""The tickets of asynchronous GRAWA: a counter that all ranks share, without a server process.

Who takes a ticket learns what to do next. Of every size*(period+1) tickets in a row, a cycle, the first
size*period mean "do a local step" and the last `size` mean "join the round" (Dimlioglu, Choromanska, AISTATS 2024,
arXiv 2403.04206). The round waits for all, so each rank takes one of those; fast ranks take more local steps.

The first `size` tickets of a cycle are dealt, one to each rank, which is what comes of the protocol when every
rank takes its next ticket as it leaves the round: a rank joins at most one round in a step, and nobody asks rank 0
for what is known. The others are counted by a word in rank 0's memory, to which ranks add by atomic remote
operations. In a round all ranks are together, and rank 0 sets the word back to 0; so a rank without data may join
the round without a ticket, and the one it holds is lost.
"""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from typing import Any

import numpy as np
from mpi4py import MPI

from hpctk.errors import HpctkError
from hpctk.world import World

OWNER = 0
#: Words of a window, one for each run that ever counts on these ranks. Only rank 0 pays for them.
WORDS = 2**16
#: Seconds between two looks of the owner's progress thread.
POLL_S = 1e-3
#: A tag nobody sends on COMM_SELF: the look is for MPI's progress, not for a message.
NOBODYS_TAG = 32766


def meaning(number: int, size: int, period: int) -> str:
    """Return what ticket `number`, counted from 0, tells its holder: "local" or "round"."""
    return "local" if number % (size * (period + 1)) < size * period else "round"


class Tickets:
    """The way of one rank to the tickets of a run. Collective over the communicator to make.

    Attributes
    ----------
    number : int
        Of the ticket this rank holds, from 0. The first is "local".
    """

    def __init__(self, here: World, period: int) -> None:
        self._here, self._period = here, period
        self._cycle = 0
        self._word = SharedWord(here)
        self.number = here.rank

    def take(self) -> str:
        """Take the next ticket and return what it means. Not collective; needs rank 0 to be alive."""
        taken = self._here.size + self._word.add(1)
        self.number = self._first + taken
        return meaning(taken, self._here.size, self._period)

    def new_cycle(self) -> None:
        """Start the next cycle, of which each rank holds a ticket then.

        To be called on all ranks inside a round, between two collectives: nobody may add before rank 0 has set
        the word back.
        """
        if self._here.rank == OWNER:
            self._word.add(-self._word.add(0))
        self._cycle += 1
        self.number = self._first + self._here.rank

    @property
    def _first(self) -> int:
        """The first number of this cycle."""
        return self._cycle * self._here.size * (self._period + 1)


class SharedWord:
    """An integer in rank 0's memory, 0 at first. Collective over the communicator to make."""

    def __init__(self, here: World) -> None:
        self._here = here
        self._window = _window(here)
        self._place = self._window.next_word()
        if here.size > 1 and here.rank == OWNER:
            _keep_mpi_going(self)

    def add(self, value: int) -> int:
        """Add to the word in one atomic step, and return what it was before. Not collective.

        PeerError where rank 0 has left, or does not answer before the deadline.
        """
        mine, before = np.array([value], np.int64), np.empty(1, np.int64)
        # Fetch_and_op is completed by a flush, which blocks in MPI for ever if rank 0 is dead; a request is not.
        request = self._window.win.Rget_accumulate(
            [mine, MPI.INT64_T], [before, MPI.INT64_T], OWNER, (self._place, 1, MPI.INT64_T), MPI.SUM
        )
        self._here.wait([request], "taking a ticket", [OWNER])
        return int(before[0])


class _Window:
    """The memory of all shared words of a communicator. Collective over the communicator to make."""

    def __init__(self, here: World) -> None:
        words = WORDS if here.rank == OWNER else 0
        self.win = MPI.Win.Allocate(8 * words, 8, comm=here.data)
        if words:
            self.win.tomemory()[:] = bytes(8 * words)
        # Nobody ever asks for an exclusive lock: no need to tell rank 0 of this one.
        self.win.Lock_all(MPI.MODE_NOCHECK)
        self.win.Sync()
        here.barrier("making a shared counter")
        self._used = 0

    def next_word(self) -> int:
        """Return the place of a word that is still 0, the same on all ranks."""
        if self._used == WORDS:
            raise HpctkError(f"more than {WORDS} asynchronous optimizers on one communicator: duplicate it")
        self._used += 1
        return self._used - 1

    def free(self) -> None:
        """Free the memory. Collective over the communicator."""
        self.win.Unlock_all()
        self.win.Free()


_keyval: int | None = None


def _window(here: World) -> _Window:
    """Return the window of a communicator, made at the first call. Collective over the communicator then."""
    global _keyval
    if _Window not in here.attached:
        if _keyval is None:
            # Freeing is collective: MPI tells us when the communicator is freed, which is collective too.
            _keyval = MPI.Comm.Create_keyval(delete_fn=_on_free)
            # Exit functions run last first: threads end before World frees its communicators, and before MPI.
            atexit.register(_stop_threads)
        made = here.attached[_Window] = _Window(here)
        here.data.Set_attr(_keyval, made)
    kept: _Window = here.attached[_Window]
    return kept


def _on_free(comm: MPI.Comm, keyval: int, kept: _Window) -> None:
    # At exit the ranks leave at different times, and some without freeing anything: this would wait for them.
    if not _stop.is_set():
        kept.free()


_stop = threading.Event()
_threads: list[threading.Thread] = []
_warned = False


def _keep_mpi_going(word: SharedWord) -> None:
    """Let MPI serve the others while this rank computes, as long as the word is in use.

    Over TCP, Open MPI's owner of a window answers only from within MPI calls: a ticket was seen to wait 6.6 s.
    """
    global _warned
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        if not _warned:
            warnings.warn(
                "MPI was started without MPI_THREAD_MULTIPLE: over a network other ranks may wait for their tickets "
                "until rank 0 has done its local step",
                RuntimeWarning,
                stacklevel=2,
            )
        _warned = True
        return
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    thread = threading.Thread(
        target=_poll, args=(weakref.ref(word),), name="hpctk ticket progress", daemon=True
    )
    _threads.append(thread)
    thread.start()


def _poll(word: Any) -> None:
    while word() is not None and not _stop.wait(POLL_S):
        MPI.COMM_SELF.Iprobe(0, NOBODYS_TAG)


def _stop_threads() -> None:
    _stop.set()
    for thread in _threads:
        thread.join()
