"""Memory that all ranks of a node reach, and counters in it by which they tell each other how far they are.

A file in memory (/dev/shm) that all ranks map; it has no name any more once they have opened it. Not an MPI window:
Open MPI 5.0 with UCX prints an error whenever one is made on a machine that UCX does not know, and goes on. Each rank
has some slots, which it alone writes, and a row of counters, which it alone raises. A rank that has written raises a
counter; whoever has seen that may read.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctk.comm.shared_window import COUNTERS, SLOTS
from hpctk.errors import HpctkError
from hpctk.log import log

if TYPE_CHECKING:
    from hpctk.comm.mpi.world import MpiWorld

#: Two lines of a processor's cache: counters of two ranks must not share one.
LINE = 128
#: The bytes of a slot: what all ranks have in theirs should stay in the cache.
SLOT_BYTES = 2**19
#: Of one rank, in whole pages.
HEAD = 4096
RANK_BYTES = HEAD + SLOTS * SLOT_BYTES
FOLDER = Path("/dev/shm")
#: Processors that let others see stores in the order in which they were made.
ORDERED = ("x86_64", "AMD64", "i686", "s390x")


def shared_window(here: MpiWorld) -> MpiSharedWindow | None:
    """Return new memory that the ranks of this rank's node share; None where it cannot be had on every node.

    Collective over the communicator.
    """
    made: MpiSharedWindow | None = None
    ranks = next(node for node in here.nodes if here.rank in node)
    leads, file = here.rank == ranks[0], -1
    try:
        # A name that nobody else knows; each node has a file of its own.
        name = here.run_on_root("making shared memory", lambda: f"hpctk-{secrets.token_hex(8)}")
        path = (FOLDER if FOLDER.is_dir() else Path(tempfile.gettempdir())) / f"{name}-{ranks[0]}"
        try:
            with here.shared_errors("making shared memory"):
                if leads:
                    file = open_file(path, os.O_CREAT | os.O_EXCL)
            with here.shared_errors("opening shared memory"):
                if not leads:
                    file = open_file(path)
        finally:
            # Before there is anything in it: a rank that is killed leaves an empty file at worst.
            if leads:
                with suppress(OSError):
                    path.unlink()
        with here.shared_errors("allocating shared memory"):
            if leads:
                # Now, as an error: a page that cannot be had later ends the process.
                os.posix_fallocate(file, 0, len(ranks) * RANK_BYTES)
        with here.shared_errors("mapping shared memory"):
            made = MpiSharedWindow(ranks, here.rank, file)
    except HpctkError as error:
        if here.expects_losses and here.is_broken():
            raise
        if here.rank == 0:
            log.warning("no memory that the ranks of a node share: they send each other messages (%s)", error)
        return None
    finally:
        if file >= 0:
            os.close(file)
    return made


def open_file(path: Path, flags: int = 0) -> int:
    """Open a file that only this user may open. OSError where that cannot be."""
    return os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)


class MpiSharedWindow:
    """The slots and counters of the ranks of a node, mapped from a file. Attributes as in SharedWindow."""

    def __init__(self, ranks: Sequence[int], me: int, file: int) -> None:
        self.ranks, self.slot_bytes = tuple(ranks), SLOT_BYTES
        self.rank, self.size = rank, size = self.ranks.index(me), len(ranks)
        memory: Any = np.frombuffer(mmap.mmap(file, size * RANK_BYTES), np.uint8).reshape(size, RANK_BYTES)
        self.slots = [[row[HEAD + i * SLOT_BYTES :][:SLOT_BYTES] for i in range(SLOTS)] for row in memory]
        # Views of Python's own: reading one number from an array of numpy's takes longer.
        self._counters: list[list[Any]] = [
            [memoryview(row[LINE * which :][:8]).cast("q") for row in memory] for which in COUNTERS
        ]
        self._mine = [row[rank] for row in self._counters]
        self._least = [0] * len(COUNTERS)
        self.started = 0
        self.queue: list[Any] = []
        self._lock = None if platform.machine() in ORDERED else threading.Lock()
        # Pages belong to the part of memory that is next to whoever writes them first.
        memory[rank] = 0

    def reached(self, which: int, value: int) -> bool:
        """Return whether every rank's counter is at `value` or above; what they wrote before may be read then."""
        if self._least[which] >= value:
            return True
        least: int = min([counter[0] for counter in self._counters[which]])
        if least > self._least[which]:
            self._fence()
            self._least[which] = least
        return least >= value

    def behind(self, which: int, value: int) -> list[int]:
        """Return the ranks, as the World counts them, whose counters are below `value`."""
        counters = self._counters[which]
        return [rank for rank, counter in zip(self.ranks, counters, strict=True) if counter[0] < value]

    def furthest(self, which: int) -> int:
        """Return the highest of the ranks' counters."""
        most: int = max(counter[0] for counter in self._counters[which])
        return most

    def advance(self, which: int, value: int) -> None:
        """Raise this rank's counter to `value`, after all that it has written."""
        self._fence()
        self._mine[which][0] = value

    def _fence(self) -> None:
        """Let nothing that comes after this be seen before what came before it."""
        if self._lock is not None:
            # A release and the next acquire of the same lock stay in order, and nothing passes the two.
            for _ in range(2):
                with self._lock:
                    pass
