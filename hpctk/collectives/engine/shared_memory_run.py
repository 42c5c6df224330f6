"""An all-reduce through memory that all ranks share: no messages, for the ranks of one node.

The tensor is cut into chunks, a chunk into as many shares as there are ranks. Of each chunk a rank

1. copies in: what others are to sum, all but its own share, goes from its tensor into its slot of the window;
2. reduces: it sums its own share of all ranks, in the order of ranks, into the same slot, and takes the result;
3. copies out: it takes the other shares' results from the other ranks' slots.

Chunks follow each other through the slots, so that what one rank writes is still in the cache when another reads it.
Each rank counts the chunks it has copied in, reduced and copied out; a slot is written again once all ranks have copied
out what was in it.

Bytes read and written by each rank: those of the tensor twice, and twice again within the cache. Same bits everywhere:
a share is summed once, x[0] + x[1] + ... + x[P-1], and copied. float16 and others that are summed in float32 are
rounded once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctk.collectives.engine.plan_run import Run
from hpctk.comm import buffers
from hpctk.comm.buffers import Dtype
from hpctk.comm.shared_window import SLOTS, SharedWindow
from hpctk.telemetry.traffic import Traffic

COPIED_IN, REDUCED, COPIED_OUT = range(3)
#: Seconds for which a rank that waits for nothing else looks at counters alone.
SPIN_S = 1e-4
#: The smallest chunk that is worth its share of Python.
LEAST_BYTES = 2**17


class SharedMemoryRun(Run):
    """One rank's part of an all-reduce of flat host memory through a shared window, in place.

    Runs on one window take turns in the order in which they were started, which is the same on all ranks.
    """

    def __init__(self, window: SharedWindow, flat: Any, dtype: Dtype, op: str, traffic: Sequence[Traffic] = ()) -> None:
        super().__init__()
        self._window, self._traffic = window, traffic
        self._sum = (WidenedSum if dtype.widened else Sum)(window, flat, dtype, op)
        # In units that are summed: a complex number's two parts may end in two chunks. A few chunks at least: while
        # one is copied in, another is reduced.
        nbytes = min(window.slot_bytes, max(LEAST_BYTES, self._sum.n * self._sum.itemsize // 16))
        self._per_chunk = nbytes // self._sum.itemsize
        self._chunks = -(-self._sum.n // self._per_chunk)
        self._base = window.started
        window.started += self._chunks
        self._done = [0, 0, 0]
        self._ended = self._chunks == 0
        if not self._ended:
            window.queue.append(self)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._ended

    def peers(self) -> list[int]:
        """Return the ranks this run waits for."""
        window, (copied_in, reduced, copied_out) = self._window, self._done
        if copied_out < reduced:
            return window.behind(REDUCED, self._base + copied_out + 1)
        if reduced < copied_in:
            return window.behind(COPIED_IN, self._base + reduced + 1)
        return window.behind(COPIED_OUT, self._base + copied_in - SLOTS + 1)

    def progress(self, *, wait: bool = False) -> bool:
        """Do what may be done; return whether that was anything. With `wait` look for a moment longer."""
        if self._ended or self._window.queue[0] is not self:
            return False
        moved: bool = self._step()
        if not moved and wait:
            until = time.monotonic() + SPIN_S
            while not (moved := self._step()) and time.monotonic() < until:
                os.sched_yield()
        if moved:
            while not self._ended and self._step():
                pass
        return moved

    def _step(self) -> bool:
        """Do one thing to one chunk, the furthest first; return whether there was one."""
        window, base, (copied_in, reduced, copied_out) = self._window, self._base, self._done
        if copied_out < reduced and window.reached(REDUCED, base + copied_out + 1):
            self._copy_out(copied_out)
            which = COPIED_OUT
        elif reduced < copied_in and window.reached(COPIED_IN, base + reduced + 1):
            self._reduce(reduced)
            which = REDUCED
        elif copied_in < self._chunks and window.reached(COPIED_OUT, base + copied_in - SLOTS + 1):
            self._copy_in(copied_in)
            which = COPIED_IN
        else:
            return False
        self._done[which] += 1
        window.advance(which, base + self._done[which])
        if self._done[COPIED_OUT] == self._chunks:
            self._ended = True
            window.queue.pop(0)
        return True

    def _place(self, chunk: int) -> tuple[int, int, int, int, int]:
        """Return a chunk's slot, its first unit and its units, and where in it this rank's share begins and ends."""
        lo = chunk * self._per_chunk
        n = min(self._per_chunk, self._sum.n - lo)
        rank, size = self._window.rank, self._window.size
        return (self._base + chunk) % SLOTS, lo, n, rank * n // size, (rank + 1) * n // size

    def _copy_in(self, chunk: int) -> None:
        slot, lo, n, first, end = self._place(chunk)
        self._sum.copy_in(slot, lo, 0, first)
        self._sum.copy_in(slot, lo, end, n)
        self._count(n, end - first)

    def _reduce(self, chunk: int) -> None:
        slot, lo, _, first, end = self._place(chunk)
        if end > first:
            began = time.perf_counter()
            self._sum.reduce(slot, lo, first, end)
            self.combining_s += time.perf_counter() - began

    def _copy_out(self, chunk: int) -> None:
        slot, lo, n, _, _ = self._place(chunk)
        size, me = self._window.size, self._window.rank
        for rank in range(size):
            if rank != me:
                self._sum.copy_out(rank, slot, lo, rank * n // size, (rank + 1) * n // size)

    def _count(self, n: int, own: int) -> None:
        """Count what a chunk moves between ranks: each one's part of a share to its owner, and the result back."""
        size, me, itemsize = self._window.size, self._window.rank, self._sum.itemsize
        self.sent_bytes += (n - own + (size - 1) * own) * itemsize
        self.received_bytes += ((size - 1) * own + n - own) * itemsize
        self.messages += 2 * (size - 1)
        for traffic in self._traffic:
            for peer in range(size):
                if peer != me:
                    theirs = ((peer + 1) * n // size - peer * n // size) * itemsize
                    for mine, other in ((theirs, own * itemsize), (own * itemsize, theirs)):
                        traffic.outgoing[peer, mine] += 1
                        traffic.incoming[peer, other] += 1


class Sum:
    """The arithmetic on units that are summed where they lie.

    Attributes
    ----------
    n, itemsize : int
        Units, and the bytes of one.
    """

    def __init__(self, window: SharedWindow, flat: Any, dtype: Dtype, op: str) -> None:
        self._rank, self._size = window.rank, window.size
        memory = buffers.as_bytes(flat)
        self._own = self._units(memory, dtype)
        self._slots = [[self._units(slot, dtype) for slot in row] for row in window.slots]
        self.n = len(self._own)
        self.itemsize = len(memory) // self.n if self.n else dtype.itemsize
        self._op = op

    def _units(self, memory: Any, dtype: Dtype) -> Any:
        return memory[: len(memory) // np.dtype(dtype.unit).itemsize * np.dtype(dtype.unit).itemsize].view(dtype.unit)

    def copy_in(self, slot: int, lo: int, first: int, end: int) -> None:
        """Copy this rank's units, of a chunk that begins at `lo`, into its slot."""
        if end > first:
            self._slots[self._rank][slot][first:end] = self._own[lo + first : lo + end]

    def copy_out(self, rank: int, slot: int, lo: int, first: int, end: int) -> None:
        """Take a rank's result."""
        if end > first:
            self._own[lo + first : lo + end] = self._slots[rank][slot][first:end]

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Sum this rank's share of all ranks into its slot, and take it."""
        mine = self._own[lo + first : lo + end]
        result = self._slots[self._rank][slot][first:end]
        parts = [mine if rank == self._rank else self._slots[rank][slot][first:end] for rank in range(self._size)]
        combine = np.maximum if self._op == "max" else np.add
        if self._size == 1:
            np.copyto(result, mine)
        else:
            combine(parts[0], parts[1], out=result)
        for part in parts[2:]:
            combine(result, part, out=result)
        if self._op == "mean":
            buffers.divide(result, self._size)
        mine[...] = result


class WidenedSum(Sum):
    """The arithmetic on units of 1 or 2 bytes: summed in float32, rounded once."""

    def _units(self, memory: Any, dtype: Dtype) -> Any:
        import torch

        return torch.from_numpy(memory[: len(memory) // dtype.itemsize * dtype.itemsize]).view(
            getattr(torch, dtype.name)
        )

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Sum this rank's share of all ranks into its slot, and take it."""
        import torch

        mine = self._own[lo + first : lo + end]
        parts = [mine if rank == self._rank else self._slots[rank][slot][first:end] for rank in range(self._size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = torch.maximum(total, part.float()) if self._op == "max" else total.add_(part.float())
        if self._op == "mean":
            total /= self._size
        mine.copy_(total)
        self._slots[self._rank][slot][first:end] = mine
