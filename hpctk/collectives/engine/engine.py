"""The engine: runs any plan on any transport, several at a time, and reports every call.

All runs of an engine make progress whenever one of them is waited for, so ranks may wait for their
runs in different orders. They must start them in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hpctk.collectives.engine.call_recording import CallRecording, emit
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.handle import Handle
from hpctk.collectives.engine.hierarchical_run import UNDER_WAY, HierarchicalRun
from hpctk.collectives.engine.plan_run import DenseRun, Kept, Run
from hpctk.collectives.engine.ragged_run import RaggedBlocks, RaggedRun
from hpctk.collectives.engine.shared_memory_run import SharedMemoryRun
from hpctk.collectives.tuning import auto
from hpctk.comm import buffers
from hpctk.comm.agreement import OneThread
from hpctk.comm.buffers import Dtype
from hpctk.comm.shared_window import SharedWindow
from hpctk.comm.transport import Transport
from hpctk.comm.world import World
from hpctk.schedules import hierarchical
from hpctk.schedules.core.plan import Plan, bounds
from hpctk.schedules.core.registry import HIERARCHICAL, SHARED_MEMORY
from hpctk.schedules.cost.machine import Machine
from hpctk.telemetry.recorder import Call, Recorder, Recorders, Span

#: Runs that may be under way at once; each has tags of its own.
LANES = 16
#: Lanes that are reserved for runs which ranks start in different orders, see `reserve`.
RESERVED = 4096


class Entry(NamedTuple):
    """A run under way, and who records it when it is over."""

    run: Run
    call: Call
    recorders: list[Recorder]
    span: Span | None


class Engine(CallRecording):
    """Runs plans over a transport.

    Every call goes to `recorders`, to which the engine adds its own `counter`; `one_thread` is held by whoever uses the
    transport, and `machine` returns the longest message and the sends of a run that are under way at once: enough to
    fill the network both ways; more would let the streams to several ranks share a link, unevenly, instead of following
    each other as the plan has it.
    """

    def __init__(
        self,
        transport: Transport,
        recorders: Recorders | None = None,
        one_thread: OneThread | None = None,
        machine: Callable[[], Machine] = Machine,
    ) -> None:
        self.transport, self._machine = transport, machine
        super().__init__(transport.size, recorders)
        self.one_thread = one_thread or OneThread()
        #: What is under way.
        self._running: list[Entry] = []
        #: Whether anything may be under way while a rank calls another collective: once this is so, no rank blocks in
        #: the library's own ones. Not whether something is: ranks see that at different times, and a call that blocks
        #: matches none that does not.
        self.overlaps = False
        self._started = 0
        self._lanes: dict[int, Run] = {}
        self._workspaces: dict[str, Any] = {}
        # One half of the tags for runs in order, the other for those with a lane of their own.
        self._half = (transport.tag_limit + 1) // 2
        self._reserved = 0

    def start(
        self,
        plan: Plan,
        elements: InPlace,
        *,
        segment_bytes: int | None = None,
        flight: int | None = None,
        kept: Kept | None = None,
        lane: int | None = None,
        overhead: bool = False,
        payload_bytes: int | None = None,
    ) -> DenseRun:
        """Start running `plan` on `elements`, in place. Collective over the transport's ranks.

        All ranks start their runs in the same order, but for those with a `lane` that was reserved for them.
        `overhead` says of a few numbers that they are not what the caller wants to have exchanged. Where elements are
        bytes of messages, `payload_bytes` are those of this rank's; what they stand for, a span says.
        """
        longest = self._longest(segment_bytes)
        n = elements.n
        lo, hi = bounds(n, plan.blocks, plan.held(self.transport.rank))
        with self.one_thread:
            if payload_bytes is None:
                call = self.opened_array(plan.kind, plan.name, n, elements.itemsize, own=hi - lo, overhead=overhead)
            else:
                call = self.opened(plan.kind, plan.name, payload_bytes)
            tags = self._take_lane() if lane is None else self.tags(lane)
            began = time.perf_counter()
            run = DenseRun(
                self.transport, plan, elements, longest, tags, flight or self.machine.sends, kept, self.traffic()
            )
            self._add(run, call, in_order=lane is None)
            self.recorders.exposed_s += time.perf_counter() - began
            self._retire()
        return run

    def start_shared(
        self, run: SharedMemoryRun, n: int, itemsize: int, kind: str = "allreduce", own: int | None = None
    ) -> None:
        """Start a run through a shared window on n elements of host memory. Collective over the ranks.

        `own` is how many of them this rank contributes, all where not given.
        """
        with self.one_thread:
            call = self.opened_array(kind, SHARED_MEMORY, n, itemsize, own=n if own is None else own)
            self._set_off(run, call, time.perf_counter(), in_order=False)

    def start_hierarchical(
        self, window: SharedWindow, nodes: Sequence[Sequence[int]], flat: Any, dtype: Dtype, op: str
    ) -> HierarchicalRun:
        """Start an all-reduce of flat host memory, in place: in nodes through their windows, by messages between them.

        Collective over the ranks.
        """
        with self.one_thread:
            call = self.opened_array("allreduce", HIERARCHICAL, len(flat), dtype.itemsize, own=len(flat))
            plan, tags, longest = _rails(nodes), self._take_lane(), self._longest(None)
            width, traffic = len(tags) // UNDER_WAY, self.traffic()

            def start_rail(share: InPlace, number: int) -> DenseRun:
                own = tags[number % UNDER_WAY * width :][:width]
                return DenseRun(self.transport, plan, share, longest, own, self.machine.sends, traffic=traffic)

            began = time.perf_counter()
            run = HierarchicalRun(window, nodes, flat, dtype, op, start_rail, longest, traffic)
            self._set_off(run, call, began, in_order=True)
        return run

    def _set_off(self, run: Run, call: Call, began: float, *, in_order: bool) -> None:
        self._add(run, call, in_order=in_order)
        run.progress()
        self.recorders.exposed_s += time.perf_counter() - began
        self._retire()

    def reserve(self, count: int) -> range:
        """Return lanes for runs that ranks may start at different times, one at a time in each lane.

        All ranks reserve in the same order. Lanes come round again after thousands of others.
        """
        first = self._reserved
        self._reserved += count
        return range(first, first + count)

    def tags(self, lane: int) -> range:
        """Return the tags of a reserved lane."""
        width = max(1, self._half // RESERVED)
        first = self._half + lane % RESERVED * width
        return range(first, first + width)

    def run_ragged(
        self, plan: Plan, blocks: RaggedBlocks, *, payload_bytes: int, segment_bytes: int | None = None
    ) -> RaggedRun:
        """Run `plan` on blocks of any length to its end. Collective over the transport's ranks.

        `payload_bytes` are those that this rank contributes; what they stand for, a span says.
        """
        with self.one_thread:
            run = self._start_ragged(plan, blocks, payload_bytes, segment_bytes, None)
            self.complete(run, f"{plan.name} {plan.kind} of blocks of any length")
            self._retire()
        return run

    @property
    def machine(self) -> Machine:
        """What plans are run by. Collective over the transport's ranks at the first call."""
        return self._machine()

    @property
    def segment_bytes(self) -> int:
        """The longest message where a run names none."""
        return self._longest(None)

    def handle_ragged(
        self, plan: Plan, blocks: RaggedBlocks, finish: Callable[[], Any], *, payload_bytes: int, lane: int
    ) -> Handle:
        """Start running `plan` on blocks of any length, in a reserved lane; waiting returns what `finish` does.

        Collective over the transport's ranks.
        """
        with self.one_thread:
            run = self._start_ragged(plan, blocks, payload_bytes, None, lane)
            self._retire()
        name = f"{plan.name} {plan.kind} of blocks of any length"

        def is_done() -> bool:
            self.progress()
            return run.done

        def wait() -> Any:
            self.complete(run, name)
            return finish()

        return Handle(name, is_done, wait)

    def _start_ragged(
        self, plan: Plan, blocks: RaggedBlocks, payload_bytes: int, segment_bytes: int | None, lane: int | None
    ) -> RaggedRun:
        longest = self._longest(segment_bytes)
        call = self.opened(plan.kind, plan.name, payload_bytes)
        tags = self._take_lane() if lane is None else self.tags(lane)
        run = RaggedRun(self.transport, plan, blocks, longest, tags, self.machine.sends, self.traffic())
        self._add(run, call, in_order=lane is None)
        return run

    def _longest(self, segment_bytes: int | None) -> int:
        return min(segment_bytes or self.machine.segment_bytes, buffers.COUNT_LIMIT)

    def _add(self, run: Run, call: Call, *, in_order: bool) -> None:
        self._running.append(Entry(run, call, list(self.recorders), self._span))
        if in_order:
            self._lanes[(self._started - 1) % LANES] = run

    def _take_lane(self) -> range:
        lane = self._started % LANES
        self._started += 1
        # The tags may still be in use; all ranks take the same lane, so none may just take a free one.
        if lane in self._lanes:
            self.complete(self._lanes[lane], "a collective started earlier")
        width = self._half // LANES
        return range(lane * width, (lane + 1) * width)

    def run(self, plan: Plan, elements: InPlace, **settings: Any) -> DenseRun:
        """Run `plan` to its end; settings as in `start`. Collective over the transport's ranks."""
        run = self.start(plan, elements, **settings)
        self.complete(run, f"{plan.name} {plan.kind} of {elements.n} elements")
        elements.finish()
        return run

    def handle(self, plan: Plan, elements: InPlace, finish: Callable[[], Any], *, lane: int | None = None) -> Handle:
        """Start running `plan`; waiting for the handle runs it to its end and returns what `finish` does.

        Collective over the transport's ranks.
        """
        run = self.start(plan, elements, lane=lane)
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
        """Drive all runs; return whether any made progress. With `wait` a single run may wait for a message."""
        if not self._running:
            # Asked while a rank waits for something else: at once, without a look at threads.
            return False
        with self.one_thread:
            # Two runs must not: another rank may wait for a message of the one while this one waits in the other.
            alone = wait and len(self._running) == 1
            moved = [entry.run.progress(wait=alone) for entry in self._running]
            if any(moved):
                self._retire()
                return True
            return False

    def complete(self, run: Run, operation: str) -> None:
        """Return once `run` is done; PeerError at the deadline."""
        if run.done:
            return
        with self.one_thread:
            waiter = self.transport.waiter(operation)
            began = before = time.perf_counter()
            try:
                while not run.done:
                    if self.progress(wait=True):
                        waiter.progress()
                        before = time.perf_counter()
                    else:
                        combined_s = run.combining_s
                        waiter.pause(run.peers)
                        now = time.perf_counter()
                        # A pause lets runs make progress, this one, too.
                        run.waiting_s += now - before - (run.combining_s - combined_s)
                        before = now
            finally:
                self.recorders.exposed_s += time.perf_counter() - began

    def _retire(self) -> None:
        done = [entry for entry in self._running if entry.run.done]
        if not done:
            return
        self._running = [entry for entry in self._running if not entry.run.done]
        # A run that is over must not keep its tensor in memory.
        self._lanes = {lane: run for lane, run in self._lanes.items() if not run.done}
        now = time.perf_counter()
        for entry in done:
            call, run = entry.call, entry.run
            call.sent_bytes, call.received_bytes = run.sent_bytes, run.received_bytes
            call.messages = run.messages
            call.seconds = now - call.began_s
            call.waiting_s, call.combining_s = run.waiting_s, run.combining_s
            emit(call, entry.recorders, entry.span)

    def workspace(self, name: str, nbytes: int) -> Any:
        """Return memory that is kept for the next call under the same name: new pages cost more than adding."""
        kept = self._workspaces.get(name)
        if kept is None or len(kept) < nbytes:
            kept = self._workspaces[name] = np.empty(nbytes, np.uint8)
        return kept[:nbytes]


#: As `hierarchical.rails`; a plan is data, so one may serve many times.
_rails = lru_cache(maxsize=16)(hierarchical.rails)


def engine_of(world: World) -> Engine:
    """Return the engine over a world's ranks, made at the first call."""
    engine: Engine | None = world.attached.get(Engine)
    if engine is None:
        engine = Engine(
            world.transport(),
            world.recorders,
            world.one_thread,
            # Collective at the first call, as starting a plan is.
            machine=lambda: (world.attached.get(auto.Choice) or auto.current(world)).calibration.machine,
        )
        world.attached[Engine] = engine
        # Ranks may wait for different things: whatever this one waits for, its runs go on.
        world.background.append(engine.progress)
    return engine


@contextmanager
def counted(world: World, *listeners: Recorder) -> Iterator[None]:
    """Record the calls that are made inside in `listeners`, too. Local; may be nested."""
    recorders = engine_of(world).recorders
    # By identity: counters with equal numbers are equal. A closure's backward is inside a step.
    new = [one for one in listeners if not any(recorder is one for recorder in recorders)]
    recorders += new
    try:
        yield
    finally:
        recorders[:] = [recorder for recorder in recorders if not any(recorder is one for one in new)]
