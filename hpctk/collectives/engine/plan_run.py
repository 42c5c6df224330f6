"""One plan at work on one rank: messages cut into segments, each going on as soon as it may.

The tensor is laid on a grid of segments. A message is a row of segments, and what a plan orders
between rounds is needed only between messages that touch the same segment: a segment is sent on as
soon as it is combined, whatever the rest of its block does. So every plan is pipelined without
knowing it. On one segment, in the plan's order:

- a send waits for the receives before it;
- a received part is combined after the sends and receives before it (it may arrive earlier, into
  scratch memory: contributions are added in the plan's order, not in order of arrival);
- a part that is to be stored is received straight into its place, after all that stands before it.

Messages between two ranks are numbered as the plan orders them, and the number is the tag, so that
neither side needs to post them in order.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Protocol

from hpctk.collectives.engine.elements import InPlace
from hpctk.comm.transport import Transport
from hpctk.schedules.core.plan import Action, Plan, bounds
from hpctk.telemetry.traffic import Traffic

SEND, STORE, COMBINE, KEEP = range(4)
ACTIONS = {Action.COMBINE: COMBINE, Action.STORE: STORE, Action.KEEP: KEEP}

#: Segments that a run looks ahead in its plan, begun or waiting for others.
WINDOW = 1024
#: Messages of each direction that are looked at in turn: those that stand first in the plan. Looking at
#: all of them takes longer than it takes the network to bring one.
LOOK = 32
#: Segments of scratch memory for parts that arrive before they may be combined.
SCRATCH = 128

_NUMBER = attrgetter("number")


class Kept(Protocol):
    """Where parts go that a plan keeps apart, one part per sender."""

    def room(self, peer: int, lo: int, hi: int) -> Any:
        """Return the memory, as bytes, for the sender's elements lo .. hi-1."""

    def arrived(self, peer: int, lo: int, hi: int) -> None:
        """Take note that they are there: a chance to work while others are under way."""


class Item(Protocol):
    """What is sent or received in one go."""

    #: Its place in the plan's order.
    number: int
    peer: int
    tag: int


class Segment:
    """One segment of one message."""

    __slots__ = ("arrived", "cell", "hi", "kind", "lo", "number", "peer", "scratch", "started", "tag")

    def __init__(self, kind: int, cell: int, lo: int, hi: int, peer: int, tag: int) -> None:
        self.kind, self.cell, self.lo, self.hi, self.peer, self.tag = kind, cell, lo, hi, peer, tag
        self.number = 0
        self.started = self.arrived = False
        self.scratch: Any = None


class Flight:
    """Messages under way in one direction, in the plan's order."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._requests: list[Any] = []

    def add(self, item: Item, request: Any) -> None:
        """Add a message that has just been started."""
        position = bisect(self.items, item.number, key=_NUMBER)
        self.items.insert(position, item)
        self._requests.insert(position, request)

    def land(self, transport: Transport, look: int, wait: bool = False) -> list[Any]:
        """Take out and return those of the first `look` messages that are complete; wait for the first if need be."""
        if not self._requests:
            return []
        positions = transport.complete(self._requests[:look], wait)
        landed = [self.items[position] for position in positions]
        for position in sorted(positions, reverse=True):
            del self.items[position], self._requests[position]
        return landed


class Run(ABC):
    """One rank's part of a collective under way. Made and driven by the Engine.

    Attributes
    ----------
    sent_bytes, received_bytes, messages : int
    waiting_s, combining_s : float
        Seconds the caller waited for nothing but this; seconds spent on what came in.
    """

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.messages = 0
        self.waiting_s = self.combining_s = 0.0

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to do."""

    @abstractmethod
    def progress(self, *, wait: bool = False) -> bool:
        """Take in what is complete and start what may start; return whether anything happened.

        With `wait` it may wait for a message, where that is cheaper than asking.
        """

    @abstractmethod
    def peers(self) -> list[int]:
        """Return the ranks this run waits for."""


class PlanRun(Run):
    """One rank's part of a plan being run: what sends and receives have in common, whatever they carry.

    At most `flight` sends are under way at once; messages are counted in `traffic`.
    """

    def __init__(self, transport: Transport, flight: int, traffic: Sequence[Traffic]) -> None:
        super().__init__()
        self._transport, self._flight, self._traffic = transport, flight, traffic
        self._exhausted = False
        self._sending, self._receiving = Flight(), Flight()
        self._ready: list[tuple[int, int, Any]] = []
        self._queued = 0

    @abstractmethod
    def _outgoing(self, item: Any) -> Any:
        """Return the bytes of an item to be sent now."""

    def peers(self) -> list[int]:
        """Return the ranks this run waits for: those it receives from, else those it sends to."""
        flight = self._receiving if self._receiving.items else self._sending
        return list(dict.fromkeys(item.peer for item in flight.items))

    def _poll(self) -> list[Any]:
        finished = self._receiving.land(self._transport, LOOK)
        return finished + self._sending.land(self._transport, LOOK)

    def _queue(self, item: Item) -> None:
        """Queue an item to be sent in its turn."""
        self._queued += 1
        heappush(self._ready, (item.number, self._queued, item))

    def _send_ready(self) -> None:
        """Start sends in the plan's order, as many as may be under way.

        The one that stands first in the plan never waits for later ones: the others might wait for it.
        """
        flying = self._sending.items
        while self._ready and (len(flying) < self._flight or self._ready[0][0] < flying[0].number):
            item = heappop(self._ready)[2]
            data = self._outgoing(item)
            self.sent_bytes += len(data)
            self.messages += 1
            for traffic in self._traffic:
                traffic.outgoing[item.peer, len(data)] += 1
            self._sending.add(item, self._transport.isend(data, item.peer, item.tag))

    def _receive(self, item: Item, data: Any) -> None:
        """Start receiving an item into `data`."""
        self.received_bytes += len(data)
        for traffic in self._traffic:
            traffic.incoming[item.peer, len(data)] += 1
        self._receiving.add(item, self._transport.irecv(data, item.peer, item.tag))


class DenseRun(PlanRun):
    """A plan being run on `elements`, in place, by messages of at most `segment_bytes`, under `tags` of its own.

    `kept` is where each sender's part goes, for plans that keep parts apart.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        elements: InPlace,
        segment_bytes: int,
        tags: range,
        flight: int,
        kept: Kept | None = None,
        traffic: Sequence[Traffic] = (),
    ) -> None:
        super().__init__(transport, flight, traffic)
        self._plan, self._elements = plan, elements
        self._kept: Any = kept
        self._grid = max(1, segment_bytes // elements.itemsize)
        self._tags = tags
        self._numbers: dict[tuple[int, int], int] = defaultdict(int)
        self._program = self._segments()
        self._unfinished = self._number = 0
        self._cells: dict[int, list[Segment]] = {}
        self._starved: deque[Segment] = deque()
        self._free: list[Any] = []
        self._scratches = self._scratch_bytes = 0
        self._look_ahead()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._exhausted and self._unfinished == 0

    @property
    def extra_bytes(self) -> int:
        """Memory this run has held beside the tensor."""
        return self._scratch_bytes + self._elements.extra_bytes

    def progress(self, *, wait: bool = False) -> bool:
        """Take in what is complete and start what may start; return whether anything happened."""
        before = self._number
        finished = self._wait_for_first() if wait and self._transport.waits else self._poll()
        for segment in finished:
            self._arrive(segment)
        self._send_ready()
        self._look_ahead()
        return bool(finished) or self._number > before

    def _outgoing(self, item: Segment) -> Any:
        return self._elements.outgoing(item.lo, item.hi)

    def _wait_for_first(self) -> list[Any]:
        """Wait for the message that stands first in the plan: no other rank waits for a later one of ours."""
        flights = [flight for flight in (self._sending, self._receiving) if flight.items]
        if not flights:
            return []
        began = time.perf_counter()
        landed = min(flights, key=lambda f: f.items[0].number).land(self._transport, 1, True)
        self.waiting_s += time.perf_counter() - began
        return landed

    def _segments(self) -> Iterator[Segment]:
        """Yield this rank's segments in the plan's order.

        Within a round sends and receives take turns: a window full of sends alone would leave two
        ranks that send to each other both without a receive.
        """
        plan, n = self._plan, self._elements.n
        for step in plan.rounds(self._transport.rank):
            messages = [self._cut(SEND, send.peer, *bounds(n, plan.blocks, send.blocks)) for send in step.sends]
            messages += [
                self._cut(ACTIONS[recv.action], recv.peer, *bounds(n, plan.blocks, recv.blocks)) for recv in step.recvs
            ]
            for turn in zip_longest(*messages):
                yield from (segment for segment in turn if segment is not None)

    def _cut(self, kind: int, peer: int, lo: int, hi: int) -> Iterator[Segment]:
        grid, direction = self._grid, int(kind == SEND)
        while lo < hi:
            cell = lo // grid
            end = min((cell + 1) * grid, hi)
            number = self._numbers[peer, direction]
            self._numbers[peer, direction] = number + 1
            yield Segment(kind, cell, lo, end, peer, self._tags[number % len(self._tags)])
            lo = end

    def _look_ahead(self) -> None:
        # A few at a time: what came in meanwhile wants to be looked at.
        for _ in range(LOOK):
            if self._exhausted or self._unfinished >= WINDOW:
                return
            segment = next(self._program, None)
            if segment is None:
                self._exhausted = True
                return
            self._unfinished += 1
            self._number += 1
            segment.number = self._number
            if segment.kind != KEEP:
                self._cells.setdefault(segment.cell, []).append(segment)
            self._try_start(segment)

    def _try_start(self, segment: Segment) -> None:
        kind, elements = segment.kind, self._elements
        if kind == SEND:
            if not self._blocked(segment):
                segment.started = True
                self._queue(segment)
                self._send_ready()
            return
        if kind == STORE:
            if self._blocked(segment):
                return
            data = elements.incoming(segment.lo, segment.hi)
        elif kind == COMBINE:
            data = self._take_scratch(segment)
            if data is None:
                return
        else:
            data = self._kept.room(segment.peer, segment.lo, segment.hi)
        segment.started = True
        self._receive(segment, data)

    def _blocked(self, segment: Segment) -> bool:
        """Return whether an unfinished message before `segment` must come first.

        Only where both touch the same elements: two blocks may share a segment of the grid, and
        waiting for the other block's message would let two ranks wait for each other.
        """
        for other in self._cells[segment.cell]:
            if other is segment:
                return False
            if other.lo < segment.hi and segment.lo < other.hi and (other.kind != SEND or segment.kind != SEND):
                return True
        return False

    def _take_scratch(self, segment: Segment) -> Any:
        nbytes = (segment.hi - segment.lo) * self._elements.itemsize
        fitting = next((i for i, kept in enumerate(self._free) if len(kept) >= nbytes), None)
        if fitting is not None:
            segment.scratch = self._free.pop(fitting)
        elif self._free or self._scratches < SCRATCH:
            # One that is too short makes room for one that fits.
            if self._free:
                self._scratch_bytes -= len(self._free.pop())
            else:
                self._scratches += 1
            segment.scratch = self._elements.scratch(nbytes)
            self._scratch_bytes += nbytes
        else:
            self._starved.append(segment)
            return None
        return segment.scratch[:nbytes]

    def _arrive(self, segment: Segment) -> None:
        segment.arrived = True
        if segment.kind == KEEP:
            self._unfinished -= 1
            began = time.perf_counter()
            self._kept.arrived(segment.peer, segment.lo, segment.hi)
            self.combining_s += time.perf_counter() - began
        elif segment.kind == COMBINE:
            self._advance(segment.cell)
        else:
            if segment.kind == STORE:
                self._elements.stored(segment.lo, segment.hi)
            self._finish(segment)
            self._advance(segment.cell)

    def _finish(self, segment: Segment) -> None:
        self._unfinished -= 1
        waiting = self._cells[segment.cell]
        waiting.remove(segment)
        if not waiting:
            del self._cells[segment.cell]

    def _advance(self, cell: int) -> None:
        """Do what has become possible on a segment of the grid."""
        for segment in list(self._cells.get(cell, ())):
            if segment.kind == COMBINE:
                if segment.arrived and not self._blocked(segment):
                    self._combine(segment)
            elif not segment.started:
                self._try_start(segment)

    def _combine(self, segment: Segment) -> None:
        received = segment.scratch[: (segment.hi - segment.lo) * self._elements.itemsize]
        began = time.perf_counter()
        self._elements.combine(segment.lo, segment.hi, received)
        self.combining_s += time.perf_counter() - began
        self._free.append(segment.scratch)
        segment.scratch = None
        self._finish(segment)
        if self._starved:
            self._try_start(self._starved.popleft())
