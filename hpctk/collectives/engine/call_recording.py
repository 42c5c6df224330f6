"""What is recorded of the calls of an engine: which tensors they carry, how long they took, what moved.

A call is opened where it begins and reported when it is over; spans (telemetry.recorder) say what surrounds it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from hpctk.telemetry.recorder import Call, Counter, Recorder, Recorders, Span, dense_sent
from hpctk.telemetry.traffic import Traffic


def label(names: Collection[str], what: str = "tensors") -> str:
    """Return what statistics call some tensors that travel together."""
    return next(iter(names)) if len(names) == 1 else f"{len(names)} {what}"


class CallRecording:
    """Opens calls among `size` ranks, and gives them to `recorders` when they are over.

    Attributes
    ----------
    recorders : Recorders
    counter : Counter
        The one that is always among them.
    """

    def __init__(self, size: int, recorders: Recorders | None) -> None:
        self._size = size
        self.counter = Counter()
        self.recorders = Recorders() if recorders is None else recorders
        self.recorders.append(self.counter)
        self._span: Span | None = None

    @contextmanager
    def span(
        self, tensor: str = "", compressor: str = "", *, elements: int = 0, dense_bytes: int | None = None
    ) -> Iterator[Span]:
        """Open a span: the calls inside belong to these tensors; see Span. Local."""
        span = self._span = Span(self._span, tensor, compressor, elements, dense_bytes)
        try:
            yield span
        finally:
            self._span = span.outer
            for call, recorders in span.close():
                emit(call, recorders, span.outer)

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Count the seconds inside as staging, where a span is open."""
        with self._span.staging() if self._span is not None else nullcontext():
            yield

    def opened(self, operation: str, schedule: str, payload_bytes: int, *, overhead: bool = False) -> Call:
        """Return a call that begins now and carries so many bytes; whoever makes it reports it when it is over."""
        began_s = time.perf_counter()
        call = Call(operation=operation, schedule=schedule, payload_bytes=payload_bytes, began_s=began_s)
        if self._span is not None:
            self._span.open(call, self._size, overhead=overhead)
        return call

    def opened_array(
        self, kind: str, schedule: str, n: int, itemsize: int, *, own: int, overhead: bool = False
    ) -> Call:
        """Return a call that begins now, on an array of n elements of which this rank contributes `own`."""
        size = self._size
        began_s = time.perf_counter()
        call = Call(operation=kind, schedule=schedule, payload_bytes=own * itemsize, began_s=began_s)
        if not overhead:
            call.elements, call.dense_bytes = own, own * itemsize
            call.dense_sent_bytes = dense_sent(kind, n * itemsize, size)
        if self._span is not None:
            self._span.open(call, size, overhead=overhead)
        return call

    def report(self, call: Call, over_s: float | None = None) -> None:
        """Record a call that was `opened` and is over: now, or since a moment of time.perf_counter()."""
        call.seconds = (time.perf_counter() if over_s is None else over_s) - call.began_s
        emit(call, self.recorders, self._span)

    def report_allreduce(self, schedule: str, n: int, itemsize: int, began_s: float) -> None:
        """Record an all-reduce of n elements by a library of which only the duration is known; it is over now.

        As `opened_array` and `report`, in fewer calls of Python: for all-reduces of a few bytes they are what counts.
        """
        seconds = time.perf_counter() - began_s
        recorders, span = self.recorders, self._span
        recorders.exposed_s += seconds
        if span is None and len(recorders) == 1:
            counter = self.counter
            counter.calls += 1
            counter.uncounted_calls += 1
            counter.seconds += seconds
            counter.by_operation["allreduce"] = counter.by_operation.get("allreduce", 0) + 1
            return
        nbytes = n * itemsize
        call = Call(
            operation="allreduce", schedule=schedule, payload_bytes=nbytes, began_s=began_s, seconds=seconds,
            waiting_s=seconds, elements=n, dense_bytes=nbytes,
            dense_sent_bytes=dense_sent("allreduce", nbytes, self._size),
        )  # fmt: skip
        if span is not None:
            span.open(call, self._size, overhead=False)
        emit(call, recorders, span)

    def count(self, peer: int, sent_bytes: int, received_bytes: int, messages: int = 1) -> None:
        """Count messages to and from a peer that did not go through a plan, each of so many bytes."""
        for traffic in self.traffic():
            traffic.outgoing[peer, sent_bytes] += messages
            traffic.incoming[peer, received_bytes] += messages

    def traffic(self) -> Sequence[Traffic]:
        """Return where messages are counted."""
        return [recorder.traffic for recorder in self.recorders if recorder.traffic is not None]


def emit(call: Call, recorders: list[Recorder], span: Span | None) -> None:
    """Report a call, or keep it while a span is open that it belongs to."""
    while span is not None and not span.is_open:
        span = span.outer
    if span is not None:
        # A copy: the engine's own list changes.
        span.calls.append((call, list(recorders)))
        return
    for recorder in recorders:
        recorder.record(call)
