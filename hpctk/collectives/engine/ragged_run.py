"""One plan at work on blocks that are byte strings of any length: sparse vectors, packets.

Where a DenseRun cuts a tensor of known size into blocks, here only the sender knows how long a block
is. A message is a header with the lengths of its blocks (8 bytes each), then the blocks in segments,
all under one tag: messages of one tag arrive in order, so nobody has to know
beforehand how many follow. Any plan runs so, whether its blocks grow on the way or not.

What a plan orders is kept block by block: a send waits for the receives of its blocks before it, a
received block is applied after the receives and the sends of its block before it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from hpctk.collectives.engine.plan_run import ACTIONS, COMBINE, SEND, PlanRun
from hpctk.comm.transport import Transport
from hpctk.errors import PeerError
from hpctk.schedules.core.plan import Plan
from hpctk.telemetry.traffic import Traffic

LENGTH_BYTES = 8
#: Messages that a run looks ahead in its plan.
WINDOW = 128


class RaggedBlocks(Protocol):
    """The blocks of a plan, as byte strings."""

    def outgoing(self, block: int) -> Any:
        """Return the block as uint8; those bytes are never changed afterwards."""

    def combine(self, block: int, data: Any) -> None:
        """Combine another rank's block with one's own."""

    def store(self, block: int, data: Any) -> None:
        """Take over another rank's block."""


class Message:
    """Some blocks on their way, seen by one of the two ranks."""

    __slots__ = ("blocks", "data", "finished", "kind", "number", "peer", "pending", "started", "tag")

    def __init__(self, kind: int, number: int, peer: int, blocks: range, tag: int) -> None:
        self.kind, self.number, self.peer, self.blocks, self.tag = kind, number, peer, blocks, tag
        #: A send whose bytes are fixed, or a receive.
        self.started = kind != SEND
        self.finished = False
        #: The bytes of each block.
        self.data: list[Any] = []
        #: Pieces that are not complete yet.
        self.pending = 0

    @property
    def arrived(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self.started and self.pending == 0

    def touches(self, other: Message) -> bool:
        """Return whether both have a block in common."""
        return self.blocks.start < other.blocks.stop and other.blocks.start < self.blocks.stop


class Piece:
    """One header or segment of a message."""

    __slots__ = ("data", "is_header", "message", "number", "peer", "tag")

    def __init__(self, message: Message, data: Any, is_header: bool) -> None:
        self.message, self.data, self.is_header = message, data, is_header
        self.number, self.peer, self.tag = message.number, message.peer, message.tag


class RaggedRun(PlanRun):
    """A plan being run on blocks of any length; arguments as of a DenseRun."""

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        blocks: RaggedBlocks,
        segment_bytes: int,
        tags: range,
        flight: int,
        traffic: Sequence[Traffic] = (),
    ) -> None:
        super().__init__(transport, flight, traffic)
        self._blocks, self._segment_bytes = blocks, segment_bytes
        self._program = _messages(plan, transport.rank, tags)
        #: Unfinished messages in the plan's order.
        self._open: list[Message] = []
        self._look_ahead()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._exhausted and not self._open

    def progress(self, *, wait: bool = False) -> bool:
        """Take in what is complete and start what may start; return whether anything happened.

        Never waits: what was sent may go on its way only when its header has been read at the other end.
        """
        finished = self._poll()
        for piece in finished:
            self._arrive(piece)
        if finished:
            self._advance()
        self._send_ready()
        self._look_ahead()
        return bool(finished)

    def _outgoing(self, item: Piece) -> Any:
        return item.data

    def _look_ahead(self) -> None:
        while not self._exhausted and len(self._open) < WINDOW:
            message = next(self._program, None)
            if message is None:
                self._exhausted = True
                return
            self._open.append(message)
            if message.kind == SEND:
                self._try_send(message)
            else:
                self._receive_piece(message, np.empty(LENGTH_BYTES * len(message.blocks), np.uint8), True)

    def _try_send(self, message: Message) -> None:
        if self._blocked(message):
            return
        message.started = True
        message.data = [self._blocks.outgoing(block) for block in message.blocks]
        lengths = np.array([len(data) for data in message.data], "<i8")
        self._queue_piece(message, lengths.view(np.uint8), True)
        for data in message.data:
            for lo in range(0, len(data), self._segment_bytes):
                self._queue_piece(message, data[lo : lo + self._segment_bytes], False)
        self._send_ready()

    def _queue_piece(self, message: Message, data: Any, is_header: bool) -> None:
        message.pending += 1
        self._queue(Piece(message, data, is_header))

    def _receive_piece(self, message: Message, data: Any, is_header: bool) -> None:
        message.pending += 1
        self._receive(Piece(message, data, is_header), data)

    def _arrive(self, piece: Piece) -> None:
        message = piece.message
        message.pending -= 1
        if not piece.is_header or message.kind == SEND:
            return
        for nbytes in piece.data.view("<i8").tolist():
            if nbytes < 0:
                raise PeerError(f"rank {message.peer} announced a block of {nbytes} bytes")
            data = np.empty(nbytes, np.uint8)
            message.data.append(data)
            for lo in range(0, nbytes, self._segment_bytes):
                self._receive_piece(message, data[lo : lo + self._segment_bytes], False)

    def _advance(self) -> None:
        """Do what has become possible, in the plan's order."""
        for message in self._open:
            if not message.started:
                self._try_send(message)
            elif message.arrived and (message.kind == SEND or not self._blocked(message)):
                self._finish(message)
        self._open = [message for message in self._open if not message.finished]

    def _blocked(self, message: Message) -> bool:
        """Return whether an unfinished message before this one must come first."""
        for other in self._open:
            if other is message:
                return False
            if other.finished or not other.touches(message):
                continue
            if other.kind != SEND or (message.kind != SEND and not other.started):
                return True
        return False

    def _finish(self, message: Message) -> None:
        message.finished = True
        if message.kind != SEND:
            act = self._blocks.combine if message.kind == COMBINE else self._blocks.store
            began = time.perf_counter()
            for block, data in zip(message.blocks, message.data, strict=True):
                act(block, data)
            self.combining_s += time.perf_counter() - began
        message.data = []


def _messages(plan: Plan, rank: int, tags: range) -> Iterator[Message]:
    """Yield this rank's messages in the plan's order; those between two ranks get the same tag on both."""
    counts: dict[tuple[int, bool], int] = defaultdict(int)
    number = 0
    for step in plan.rounds(rank):
        rows = [(SEND, send.peer, send.blocks) for send in step.sends]
        rows += [(ACTIONS[recv.action], recv.peer, recv.blocks) for recv in step.recvs]
        for kind, peer, blocks in rows:
            direction = peer, kind == SEND
            yield Message(kind, number, peer, blocks, tags[counts[direction] % len(tags)])
            counts[direction] += 1
            number += 1
