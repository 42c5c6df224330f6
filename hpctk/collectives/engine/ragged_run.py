"""One plan at work on blocks that are byte strings of any length: sparse vectors, packets.

Where `run.Run` cuts a tensor of known size into blocks, here a block is a parcel whose length only
its sender knows. A message is a header with the lengths of its parcels (8 bytes each), then the
parcels in segments, all under one tag: messages of one tag arrive in order, so nobody has to know
beforehand how many follow. Any plan runs so, whether its blocks grow on the way or not.

What a plan orders is kept block by block: a send waits for the receives of its blocks before it, a
received parcel is applied after the receives and the sends of its block before it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Protocol

import numpy as np

from hpctk.collectives.engine.plan_run import ACTIONS, COMBINE, LOOK, SEND, Flight
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
    """A row of parcels on its way, seen by one of its two ranks."""

    __slots__ = ("blocks", "finished", "kind", "number", "parcels", "peer", "pending", "started", "tag")

    def __init__(self, kind: int, number: int, peer: int, blocks: range, tag: int) -> None:
        self.kind, self.number, self.peer, self.blocks, self.tag = kind, number, peer, blocks, tag
        #: A send whose bytes are fixed, or a receive.
        self.started = kind != SEND
        self.finished = False
        self.parcels: list[Any] = []
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

    __slots__ = ("data", "is_header", "message", "number", "peer")

    def __init__(self, message: Message, data: Any, is_header: bool) -> None:
        self.message, self.data, self.is_header = message, data, is_header
        self.number, self.peer = message.number, message.peer


class RaggedRun:
    """A plan being run on parcels. Made and driven by the Engine.

    Parameters
    ----------
    transport : Transport
    plan : Plan
    parcels : RaggedBlocks
    segment_bytes : int
        The longest message.
    tags : range
        Tags of its own.
    flight : int
        Sends that may be under way at once.
    traffic : sequence of Traffic
        Where its messages are counted.

    Attributes are those of `run.Run`.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        parcels: RaggedBlocks,
        segment_bytes: int,
        tags: range,
        flight: int,
        traffic: Sequence[Traffic] = (),
    ) -> None:
        self._transport, self._parcels = transport, parcels
        self._segment_bytes, self._flight = segment_bytes, flight
        self._program = _messages(plan, transport.rank, tags)
        self._exhausted = False
        #: Unfinished messages in the plan's order.
        self._open: list[Message] = []
        self._ready: list[tuple[int, int, Piece]] = []
        self._pieces = 0
        self._sending, self._receiving = Flight(), Flight()
        self._traffic = traffic
        self.sent_bytes = self.received_bytes = self.messages = 0
        self.waiting_s = self.combining_s = 0.0
        self._look_ahead()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._exhausted and not self._open

    def peers(self) -> list[int]:
        """Return the ranks this run waits for: those it receives from, else those it sends to."""
        flight = self._receiving if self._receiving.segments else self._sending
        return list(dict.fromkeys(piece.peer for piece in flight.segments))

    def progress(self, *, wait: bool = False) -> bool:
        """Take in what is complete and start what may start; return whether anything happened.

        Never waits: what was sent may go on its way only when its header has been read at the other end.
        """
        finished = self._poll()
        for piece in finished:
            self._arrive(piece)
        if finished:
            self._settle()
        self._send_ready()
        self._look_ahead()
        return bool(finished)

    def _poll(self) -> list[Any]:
        finished: list[Any] = self._receiving.land(self._transport, LOOK)
        return finished + self._sending.land(self._transport, LOOK)

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
                self._receive(message, np.empty(LENGTH_BYTES * len(message.blocks), np.uint8), True)

    def _try_send(self, message: Message) -> None:
        if self._blocked(message):
            return
        message.started = True
        message.parcels = [self._parcels.outgoing(block) for block in message.blocks]
        lengths = np.array([len(parcel) for parcel in message.parcels], "<i8")
        self._queue(message, lengths.view(np.uint8), True)
        for parcel in message.parcels:
            for lo in range(0, len(parcel), self._segment_bytes):
                self._queue(message, parcel[lo : lo + self._segment_bytes], False)
        self._send_ready()

    def _queue(self, message: Message, data: Any, is_header: bool) -> None:
        message.pending += 1
        self._pieces += 1
        heappush(self._ready, (message.number, self._pieces, Piece(message, data, is_header)))

    def _send_ready(self) -> None:
        """Start sends in the plan's order, as many as may be under way.

        The one that stands first in the plan never waits for later ones: the others might wait for it.
        """
        flying = self._sending.segments
        while self._ready and (len(flying) < self._flight or self._ready[0][0] < flying[0].number):
            piece: Any = heappop(self._ready)[2]
            self.sent_bytes += len(piece.data)
            self.messages += 1
            for traffic in self._traffic:
                traffic.outgoing[piece.peer, len(piece.data)] += 1
            self._sending.add(piece, self._transport.isend(piece.data, piece.message.peer, piece.message.tag))

    def _receive(self, message: Message, data: Any, is_header: bool) -> None:
        message.pending += 1
        piece: Any = Piece(message, data, is_header)
        self.received_bytes += len(data)
        for traffic in self._traffic:
            traffic.incoming[message.peer, len(data)] += 1
        self._receiving.add(piece, self._transport.irecv(data, message.peer, message.tag))

    def _arrive(self, piece: Any) -> None:
        message = piece.message
        message.pending -= 1
        if not piece.is_header or message.kind == SEND:
            return
        for nbytes in piece.data.view("<i8").tolist():
            if nbytes < 0:
                raise PeerError(f"rank {message.peer} announced a parcel of {nbytes} bytes")
            parcel = np.empty(nbytes, np.uint8)
            message.parcels.append(parcel)
            for lo in range(0, nbytes, self._segment_bytes):
                self._receive(message, parcel[lo : lo + self._segment_bytes], False)

    def _settle(self) -> None:
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
            act = self._parcels.combine if message.kind == COMBINE else self._parcels.store
            began = time.perf_counter()
            for block, parcel in zip(message.blocks, message.parcels, strict=True):
                act(block, parcel)
            self.combining_s += time.perf_counter() - began
        message.parcels = []


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
