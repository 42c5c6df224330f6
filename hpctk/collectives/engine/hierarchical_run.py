"""An all-reduce over several nodes: through shared memory inside them, by messages between them.

The same three levels as the plan of schedules.hierarchical, without messages inside nodes. m is the number of ranks of
the smallest node. The tensor is cut into pieces, each of which passes through three stages:

1. inside every node, through its window: the node's j-th rank, j < m, sums its share of all local ranks, in order;
2. between nodes: the j-th ranks of all nodes form rail j, a ring that all-reduces these shares;
3. inside every node, through its window: the j-th rank gives the result to all others.

While one piece is under way between nodes, the next is summed inside them: the window is used in the order 1 of piece
0, 1 of piece 1, 3 of piece 0, 1 of piece 2, 3 of piece 1, ..., the same on all ranks, so two pieces at most are
anywhere between the first stage and the last. That is the extra memory: two shares of a piece.

Same bits everywhere: a node's sum of an element is computed by one rank, its sum along the rail once, and copied.
float16 and others that are summed in float32 stay so between nodes, at twice or four times the bytes, and are rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.plan_run import DenseRun, Run
from hpctk.collectives.engine.shared_memory_run import SharedMemoryRun, Sum, summing
from hpctk.comm import buffers
from hpctk.comm.buffers import Dtype
from hpctk.comm.shared_window import SharedWindow
from hpctk.telemetry.traffic import Traffic

#: The least bytes of a piece: its stages have to be worth their share of Python.
PIECE_BYTES = 2**22
#: Messages that a rank sends in each round of a rail, at least, where the tensor is long enough.
MESSAGES = 2
#: Pieces that may be between the first stage and the last.
UNDER_WAY = 2

#: Starts the all-reduce along this rank's rail of the piece with that number.
StartRail = Callable[[InPlace, int], DenseRun]


class Piece:
    """A piece of the tensor on this rank: its first stage, its share along the rail, its last stage."""

    def __init__(self, number: int, flat: Any, dtype: Dtype, op: str, size: int) -> None:
        self.number, self.is_between = number, False
        self._flat, self._dtype, self._op, self._size = flat, dtype, op, size

    def collect(self, window: SharedWindow, owners: int, traffic: Sequence[Traffic]) -> None:
        """Take the next turns at the window for the first stage."""
        self._sums = summing(window, self._flat, self._dtype, self._op)
        self._collecting = Collecting(self._sums)
        self.first = SharedMemoryRun(window, self._collecting, traffic, owners)

    def spread(self, window: SharedWindow, owners: int, traffic: Sequence[Traffic]) -> None:
        """Take the next turns at the window for the last stage."""
        self._spreading = Spreading(self._sums)
        self.last = SharedMemoryRun(window, self._spreading, traffic, owners)

    def put_share(self, room: Any) -> None:
        """Let this rank's share, of units that are summed, lie in an array's first elements."""
        flat = room[: self.first.owned]
        self._collecting.part = self._spreading.part = self._sums.wide(flat)
        self.share = InPlace(flat, flat.itemsize, self._dtype.unit, self._op, self._size)


class HierarchicalRun(Run):
    """One rank's part of an all-reduce of flat host memory over several nodes, in place.

    `window` is that of this rank's node, `nodes` are the ranks of each, `segment_bytes` is the longest message.
    """

    def __init__(
        self,
        window: SharedWindow,
        nodes: Sequence[Sequence[int]],
        flat: Any,
        dtype: Dtype,
        op: str,
        start_rail: StartRail,
        segment_bytes: int,
        traffic: Sequence[Traffic] = (),
    ) -> None:
        super().__init__()
        self._start_rail, owners = start_rail, min(map(len, nodes))
        memory = buffers.as_bytes(flat)
        per_piece = max(PIECE_BYTES, MESSAGES * owners * len(nodes) * segment_bytes) // dtype.itemsize * dtype.itemsize
        pieces = [
            Piece(number, memory[lo : lo + per_piece], dtype, op, sum(map(len, nodes)))
            for number, lo in enumerate(range(0, len(memory), per_piece))
        ]
        #: (piece, whether it is its last stage) in the order in which the window is used.
        self._stages: list[tuple[Piece, bool]] = []
        for number in range(len(pieces) + UNDER_WAY - 1 if pieces else 0):
            if number < len(pieces):
                pieces[number].collect(window, owners, traffic)
                self._stages.append((pieces[number], False))
            if number >= UNDER_WAY - 1:
                pieces[number - UNDER_WAY + 1].spread(window, owners, traffic)
                self._stages.append((pieces[number - UNDER_WAY + 1], True))
        # The first piece is the longest.
        rooms = [np.empty(pieces[0].first.owned, dtype.unit) for _ in pieces[:UNDER_WAY]]
        for piece in pieces:
            piece.put_share(rooms[piece.number % UNDER_WAY])
        self._at = 0
        #: What is under way along the rail.
        self._between: list[tuple[Piece, DenseRun]] = []

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._at == len(self._stages)

    def peers(self) -> list[int]:
        """Return the ranks this run waits for: those along the rail, else those of the node."""
        waited_for = [peer for _, rail in self._between for peer in rail.peers()]
        if waited_for or self.done:
            return waited_for
        piece, is_last = self._stages[self._at]
        return (piece.last if is_last else piece.first).peers()

    def progress(self, *, wait: bool = False) -> bool:
        """Do what may be done; return whether that was anything. With `wait` look at the window a moment longer."""
        moved = self._advance_rails()
        while not self.done:
            piece, is_last = self._stages[self._at]
            if is_last and piece.is_between:
                break
            run = piece.last if is_last else piece.first
            if run.progress(wait=wait and not moved and not self._between):
                moved = True
            if not run.done:
                break
            self._at += 1
            self._add_up(run)
            if not is_last and piece.share.n:
                piece.is_between = True
                self._between.append((piece, self._start_rail(piece.share, piece.number)))
        return moved

    def _advance_rails(self) -> bool:
        moved = False
        for piece, rail in self._between:
            moved = rail.progress() or moved
            if rail.done:
                piece.share.finish()
                piece.is_between = False
                self._add_up(rail)
        self._between = [(piece, rail) for piece, rail in self._between if piece.is_between]
        return moved

    def _add_up(self, run: Run) -> None:
        """Count a part of this run that is over."""
        self.sent_bytes += run.sent_bytes
        self.received_bytes += run.received_bytes
        self.messages += run.messages
        self.combining_s += run.combining_s


class Collecting:
    """The first stage: this rank's share of all local ranks, summed into `part`."""

    collects, spreads = True, False
    part: Any

    def __init__(self, sums: Sum) -> None:
        self._sums, self.n, self.itemsize = sums, sums.n, sums.itemsize
        self.copy_in = sums.copy_in
        self._at = 0

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Sum this rank's share of a chunk; chunks come one after the other."""
        out = self.part[self._at : self._at + end - first]
        self._at += end - first
        self._sums.total(slot, lo, first, end, out)

    def copy_out(self, rank: int, slot: int, lo: int, first: int, end: int) -> None:
        """Take nothing: the result is not there yet."""


class Spreading:
    """The last stage: every rank's share of the result, from `part`, to all local ranks."""

    collects, spreads = False, True
    part: Any

    def __init__(self, sums: Sum) -> None:
        self._sums, self.n, self.itemsize = sums, sums.n, sums.itemsize
        self.copy_out = sums.copy_out
        self._at = 0

    def copy_in(self, slot: int, lo: int, first: int, end: int) -> None:
        """Give nothing but the share."""

    def reduce(self, slot: int, lo: int, first: int, end: int) -> None:
        """Take this rank's share of a chunk, and give it to all."""
        values = self.part[self._at : self._at + end - first]
        self._at += end - first
        self._sums.place(slot, lo, first, end, values)
