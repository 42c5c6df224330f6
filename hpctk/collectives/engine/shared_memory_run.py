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
from typing import Any, Protocol

import numpy as np

from hpctk.collectives.engine.plan_run import Run
from hpctk.comm import buffers
from hpctk.comm.buffers import Dtype
from hpctk.comm.shared_window import COPIED_IN, COPIED_OUT, REDUCED, SLOTS, SharedWindow
from hpctk.telemetry.traffic import Traffic

#: Seconds for which a rank that waits for nothing else looks at counters alone.
SPIN_S = 1e-4
#: The smallest chunk that is worth its share of Python.
LEAST_BYTES = 2**17


class SharedMemoryRun(Run):
    """One rank's part of an all-reduce of flat host memory through a shared window, in place.

    Runs on one window take turns in the order in which they were started, which is the same on all ranks. `arithmetic`
    says what is done to a chunk; the first `owners` ranks, all unless told otherwise, have a share of it.
    """

    def __init__(
        self, window: SharedWindow, arithmetic: Arithmetic, traffic: Sequence[Traffic] = (), owners: int | None = None
    ) -> None:
        super().__init__()
        self._window, self._traffic, self._sum = window, traffic, arithmetic
        self._owners = owners or window.size
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

    @property
    def owned(self) -> int:
        """The units of all this rank's shares."""
        lengths = [self._place(chunk)[2] for chunk in range(self._chunks)]
        return sum(end - first for first, end in (self._share(self._window.rank, n) for n in lengths))

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

    def _place(self, chunk: int) -> tuple[int, int, int]:
        """Return a chunk's slot, its first unit and its units."""
        lo = chunk * self._per_chunk
        return (self._base + chunk) % SLOTS, lo, min(self._per_chunk, self._sum.n - lo)

    def _share(self, rank: int, n: int) -> tuple[int, int]:
        """Return where in a chunk of n units a rank's share begins and ends."""
        owners = self._owners
        return (rank * n // owners, (rank + 1) * n // owners) if rank < owners else (n, n)

    def _copy_in(self, chunk: int) -> None:
        slot, lo, n = self._place(chunk)
        first, end = self._share(self._window.rank, n)
        self._sum.copy_in(slot, lo, 0, first)
        self._sum.copy_in(slot, lo, end, n)
        self._count(n, end - first)

    def _reduce(self, chunk: int) -> None:
        slot, lo, n = self._place(chunk)
        first, end = self._share(self._window.rank, n)
        if end > first:
            began = time.perf_counter()
            self._sum.reduce(slot, lo, first, end)
            self.combining_s += time.perf_counter() - began

    def _copy_out(self, chunk: int) -> None:
        slot, lo, n = self._place(chunk)
        for rank in range(self._owners):
            if rank != self._window.rank:
                self._sum.copy_out(rank, slot, lo, *self._share(rank, n))

    def _count(self, n: int, own: int) -> None:
        """Count what a chunk moves between ranks: each one's part of a share to its owner, and the result back."""
        window, itemsize = self._window, self._sum.itemsize
        for position, peer in enumerate(window.ranks):
            if position == window.rank:
                continue
            first, end = self._share(position, n)
            theirs, mine = (end - first) * itemsize, own * itemsize
            ways = [(theirs, mine)] * self._sum.collects + [(mine, theirs)] * self._sum.spreads
            for sent, received in ways:
                self.sent_bytes += sent
                self.received_bytes += received
                self.messages += sent > 0
                for traffic in self._traffic:
                    if sent:
                        traffic.outgoing[peer, sent] += 1
                    if received:
                        traffic.incoming[peer, received] += 1


class Arithmetic(Protocol):
    """What a run does to chunks.

    Attributes
    ----------
    n, itemsize : int
        Units, and the bytes of one.
    collects, spreads : bool
        Whether shares come to their owners, and whether owners' results go to all.
    """

    n: int
    itemsize: int
    collects: bool
    spreads: bool

    def copy_in(self, slot: int, lo: int, first: int, end: int) -> None:
        """Copy this rank's units, of a chunk that begins at `lo`, into its slot."""

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Do what this rank does with its share of a chunk."""

    def copy_out(self, rank: int, slot: int, lo: int, first: int, end: int) -> None:
        """Take a rank's result."""


def summing(window: SharedWindow, flat: Any, dtype: Dtype, op: str, source: Any = None) -> Sum:
    """Return the arithmetic of an all-reduce of flat host memory, in place.

    Where a `source` is given, that is what this rank contributes, and the memory only takes the result.
    """
    return (WidenedSum if dtype.widened else Sum)(window, flat, dtype, op, source)


class Sum:
    """The arithmetic on units that are summed where they lie.

    Attributes
    ----------
    n, itemsize, collects, spreads
        As in Arithmetic.
    """

    collects = spreads = True

    def __init__(self, window: SharedWindow, flat: Any, dtype: Dtype, op: str, source: Any = None) -> None:
        self._rank, self._size = window.rank, window.size
        memory = buffers.as_bytes(flat)
        self._result = self._units(memory, dtype)
        self._own = self._result if source is None else self._units(buffers.as_bytes(source), dtype)
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
            self._result[lo + first : lo + end] = self._slots[rank][slot][first:end]

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Sum this rank's share of all ranks into its slot, and take it."""
        result = self._slots[self._rank][slot][first:end]
        self.total(slot, lo, first, end, result)
        if self._op == "mean":
            buffers.divide(result, self._size)
        self._result[lo + first : lo + end] = result

    def total(self, slot: int, lo: int, first: int, end: int, out: Any) -> None:
        """Write the sum, or maximum, of all ranks' units of a share into `out`."""
        parts = self._parts(slot, lo, first, end)
        combine = np.maximum if self._op == "max" else np.add
        if self._size == 1:
            np.copyto(out, parts[0])
        else:
            combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)

    def place(self, slot: int, lo: int, first: int, end: int, values: Any) -> None:
        """Take `values` as the result of this rank's share, and put it into the slot."""
        mine = self._result[lo + first : lo + end]
        mine[...] = values
        self._slots[self._rank][slot][first:end] = mine

    def wide(self, flat: Any) -> Any:
        """Return units that `total` may write into, over an array of what is summed."""
        return flat

    def _parts(self, slot: int, lo: int, first: int, end: int) -> list[Any]:
        parts = [row[slot][first:end] for row in self._slots]
        parts[self._rank] = self._own[lo + first : lo + end]
        return parts


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

        total = torch.empty(end - first)
        self.total(slot, lo, first, end, total)
        if self._op == "mean":
            total /= self._size
        self.place(slot, lo, first, end, total)

    def total(self, slot: int, lo: int, first: int, end: int, out: Any) -> None:
        """Write the sum, or maximum, of all ranks' units of a share into `out`, float32."""
        import torch

        parts = self._parts(slot, lo, first, end)
        out.copy_(parts[0])
        for part in parts[1:]:
            torch.maximum(out, part.float(), out=out) if self._op == "max" else out.add_(part.float())

    def wide(self, flat: Any) -> Any:
        """Return units that `total` may write into, over an array of float32."""
        import torch

        return torch.from_numpy(flat)
