"""The engine: runs any plan on any transport, several at a time, and reports every call.

All runs of an engine make progress whenever one of them is waited for, so ranks may wait for their
runs in different orders. They must start them in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hpctk import buffers
from hpctk.collectives.elements import Elements
from hpctk.collectives.handle import Handle
from hpctk.collectives.parcel_run import ParcelRun, Parcels
from hpctk.collectives.run import Kept, Run
from hpctk.schedules.plan import Plan
from hpctk.stats.recorder import Call, Counter, Recorder
from hpctk.transport import Transport
from hpctk.world import World

#: Runs that may be under way at once; each has tags of its own.
LANES = 16
#: Lanes that are reserved for runs which ranks start in different orders, see `reserve`.
RESERVED = 4096
#: The longest message. Below the eager limit of Open MPI's TCP, so that two ranks that send to each
#: other at once both get the full bandwidth; long enough that the work per message does not count.
SEGMENT_BYTES = 61440
#: Sends of a run under way at once. Enough to fill the network both ways; more would let the streams to
#: several ranks share a link, unevenly, instead of following each other as the plan has it.
FLIGHT = 24


Work = Run | ParcelRun


class Engine:
    """Runs plans over a transport.

    Parameters
    ----------
    transport : Transport
    recorder : Recorder, optional
        Told of every call, beside the engine's own `counter`.
    """

    def __init__(self, transport: Transport, recorder: Recorder | None = None) -> None:
        self.transport = transport
        self.counter = Counter()
        self.recorders: list[Recorder] = [self.counter] + ([recorder] if recorder else [])
        self._running: list[tuple[Work, Call, list[Recorder]]] = []
        self._started = 0
        self._lanes: dict[int, Work] = {}
        self._workspaces: dict[str, Any] = {}
        # One half of the tags for runs in order, the other for those with a lane of their own.
        self._half = (transport.tag_limit + 1) // 2
        self._reserved = 0

    def start(
        self,
        plan: Plan,
        elements: Elements,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        flight: int = FLIGHT,
        kept: Kept | None = None,
        lane: int | None = None,
    ) -> Run:
        """Start running `plan` on `elements`, in place. Collective over the transport's ranks.

        All ranks start their runs in the same order, but for those with a `lane` that was reserved for them.
        """
        longest = min(segment_bytes, buffers.COUNT_LIMIT)
        opening = _opening(plan, elements.n, elements.n * elements.itemsize)
        tags = self._take_lane() if lane is None else self._reserved_tags(lane)
        run = Run(self.transport, plan, elements, longest, tags, flight, kept)
        self._running.append((run, opening, list(self.recorders)))
        if lane is None:
            self._lanes[(self._started - 1) % LANES] = run
        self._retire()
        return run

    def reserve(self, count: int) -> range:
        """Return lanes for runs that ranks may start at different times, one at a time in each lane.

        All ranks reserve in the same order. Lanes come round again after thousands of others.
        """
        first = self._reserved
        self._reserved += count
        return range(first, first + count)

    def _reserved_tags(self, lane: int) -> range:
        width = max(1, self._half // RESERVED)
        first = self._half + lane % RESERVED * width
        return range(first, first + width)

    def run_parcels(
        self,
        plan: Plan,
        parcels: Parcels,
        *,
        elements: int,
        dense_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        flight: int = FLIGHT,
    ) -> ParcelRun:
        """Run `plan` on blocks of any length to its end. Collective over the transport's ranks.

        `elements` and `dense_bytes` say what travels in so few bytes; for the statistics.
        """
        longest = min(segment_bytes, buffers.COUNT_LIMIT)
        opening = _opening(plan, elements, dense_bytes)
        run = ParcelRun(self.transport, plan, parcels, longest, self._take_lane(), flight)
        self._running.append((run, opening, list(self.recorders)))
        self._lanes[(self._started - 1) % LANES] = run
        self.complete(run, f"{plan.name} {plan.kind} of parcels")
        self._retire()
        return run

    def _take_lane(self) -> range:
        lane = self._started % LANES
        self._started += 1
        # The tags may still be in use; all ranks take the same lane, so none may just take a free one.
        if lane in self._lanes:
            self.complete(self._lanes[lane], "a collective started earlier")
        width = self._half // LANES
        return range(lane * width, (lane + 1) * width)

    def run(self, plan: Plan, elements: Elements, **settings: Any) -> Run:
        """Run `plan` to its end; settings as in `start`. Collective over the transport's ranks."""
        run = self.start(plan, elements, **settings)
        self.complete(run, f"{plan.name} {plan.kind} of {elements.n} elements")
        elements.finish()
        return run

    def handle(
        self,
        plan: Plan,
        elements: Elements,
        finish: Callable[[], Any],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        lane: int | None = None,
    ) -> Handle:
        """Start running `plan`; waiting for the handle runs it to its end and returns what `finish` does.

        Collective over the transport's ranks.
        """
        run = self.start(plan, elements, segment_bytes=segment_bytes, lane=lane)
        name = f"{plan.name} {plan.kind} of {elements.n} elements"

        def is_done() -> bool:
            self.progress()
            return run.done

        def wait() -> Any:
            self.complete(run, name)
            elements.finish()
            return finish()

        return Handle(name, is_done, wait)

    def progress(self, *, wait: bool = False) -> bool:
        """Let all runs make progress; return whether any did. With `wait` a single run may wait for a message."""
        # Two runs must not: another rank may wait for a message of the one while this one waits in the other.
        alone = wait and len(self._running) == 1
        moved = [run.progress(wait=alone) for run, *_ in self._running]
        if any(moved):
            self._retire()
            return True
        return False

    def complete(self, run: Work, operation: str) -> None:
        """Return once `run` is done; PeerError at the deadline."""
        if run.done:
            return
        vigil = self.transport.vigil(operation)
        while not run.done:
            if self.progress(wait=True):
                vigil.progress()
            else:
                vigil.nap(run.peers)

    def _retire(self) -> None:
        done = [entry for entry in self._running if entry[0].done]
        if not done:
            return
        self._running = [entry for entry in self._running if not entry[0].done]
        # A run that is over must not keep its tensor in memory.
        self._lanes = {lane: run for lane, run in self._lanes.items() if not run.done}
        now = time.perf_counter()
        for run, opening, recorders in done:
            call = Call(
                opening.operation, opening.schedule, opening.elements, opening.dense_bytes,
                run.sent_bytes, run.received_bytes, run.messages, opening.began_s, now - opening.began_s,
            )  # fmt: skip
            for recorder in recorders:
                recorder.record(call)

    def workspace(self, name: str, nbytes: int) -> Any:
        """Return memory that is kept for the next call under the same name: new pages cost more than adding."""
        kept = self._workspaces.get(name)
        if kept is None or len(kept) < nbytes:
            kept = self._workspaces[name] = np.empty(nbytes, np.uint8)
        return kept[:nbytes]

    def report(self, call: Call) -> None:
        """Tell the recorders of a call."""
        for recorder in self.recorders:
            recorder.record(call)


def _opening(plan: Plan, elements: int, dense_bytes: int) -> Call:
    return Call(plan.kind, plan.name, elements, dense_bytes, None, None, 0, time.perf_counter(), 0.0)


def engine_of(world: World) -> Engine:
    """Return the engine over a world's ranks, made at the first call."""
    engine: Engine | None = world.attached.get(Engine)
    if engine is None:
        engine = world.attached[Engine] = Engine(world.transport())
        # Ranks may wait for different things: whatever this one waits for, its runs go on.
        world.background.append(engine.progress)
    return engine


@contextmanager
def counted(world: World, counter: Counter) -> Iterator[None]:
    """Let a counter, too, hear of the calls that are made inside. Local; may be nested."""
    recorders = engine_of(world).recorders
    # By identity: counters with equal numbers are equal. A closure's backward is inside a step.
    if any(recorder is counter for recorder in recorders):
        yield
        return
    recorders.append(counter)
    try:
        yield
    finally:
        recorders[:] = [recorder for recorder in recorders if recorder is not counter]
