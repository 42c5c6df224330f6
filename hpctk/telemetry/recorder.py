"""A collective call as it is recorded, and the counter in memory that always takes them.

Every call of a collective ends in one `Call`, whatever moved the bytes. A recorder takes them; the
Counter adds them up in constant memory and is there from the start.

What surrounds calls and is recorded in them: which tensors, which compressor, seconds beside the communication.

    with engine.span(tensor="12 gradients", compressor="TopK", elements=n, dense_bytes=4 * n) as span:
        with span.compressing():
            ...
        ...                              # collectives
        with span.decompressing():
            ...

Calls that are over while a span is open are kept until it closes: seconds spent after a call belong to it, too. Spans
may be nested; what an inner one does not say, the outer one does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from hpctk.telemetry.traffic import Traffic


@dataclass(slots=True, kw_only=True)
class Call:
    """One collective call as one rank saw it; the columns of schema.CALLS.

    `sent_bytes` is None where the bytes cannot be known: MPI's own collectives do not report them.
    """

    operation: str
    schedule: str
    compressor: str = ""
    tensor: str = ""
    elements: int = 0
    dense_bytes: int = 0
    dense_sent_bytes: int = 0
    payload_bytes: int = 0
    sent_bytes: int | None = None
    received_bytes: int | None = None
    messages: int = 0
    began_s: float = 0.0
    seconds: float = 0.0
    waiting_s: float = 0.0
    combining_s: float = 0.0
    compressing_s: float = 0.0
    decompressing_s: float = 0.0
    staging_s: float = 0.0


class Recorder(Protocol):
    """Takes calls; must be quick and must not communicate.

    `traffic` is where every message is counted, None for a recorder that does not count them. `flags` says whether it
    takes the calls of the few bytes by which ranks agree in a step, too.
    """

    @property
    def traffic(self) -> Traffic | None: ...

    @property
    def flags(self) -> bool: ...

    def record(self, call: Call) -> None:
        """Record one call."""


@dataclass
class Counter:
    """Sums over all calls on this rank; messages are those sent, as segments.

    `uncounted_calls` are those whose bytes only MPI knows; they are not in the byte totals.
    """

    calls: int = 0
    messages: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    uncounted_calls: int = 0
    waiting_s: float = 0.0
    by_operation: dict[str, int] = field(default_factory=dict)
    traffic: Traffic | None = field(default=None, init=False, repr=False)
    flags: bool = field(default=False, init=False, repr=False)

    def record(self, call: Call) -> None:
        """Add one call to the totals."""
        self.calls += 1
        self.messages += call.messages
        self.seconds += call.seconds
        self.waiting_s += call.waiting_s
        self.by_operation[call.operation] = self.by_operation.get(call.operation, 0) + 1
        if call.sent_bytes is None or call.received_bytes is None:
            self.uncounted_calls += 1
        else:
            self.sent_bytes += call.sent_bytes
            self.received_bytes += call.received_bytes


class Recorders(list[Recorder]):
    """Those that take the calls among some ranks.

    `exposed_s` are the seconds that whoever called spent in communication instead of computing; `library` is the name
    of the schedule by which what joins the ranks moves a few bytes.
    """

    def __init__(self, library: str = "") -> None:
        super().__init__()
        self.library, self.exposed_s = library, 0.0

    def record_control(self, operation: str, why: str, nbytes: int, began_s: float) -> None:
        """Record the few bytes by which ranks agree, where a recorder wants them. The library moved them."""
        seconds = time.perf_counter() - began_s
        self.exposed_s += seconds
        for recorder in self:
            if recorder.flags:
                recorder.record(
                    Call(
                        operation=operation, schedule=self.library, tensor=why, payload_bytes=nbytes,
                        began_s=began_s, seconds=seconds, waiting_s=seconds,
                    )
                )  # fmt: skip


class Span:
    """Calls that belong together.

    Parameters
    ----------
    outer : Span or None
    tensor, compressor : str
        Where empty, those of `outer`.
    elements, dense_bytes : int
        What all its calls together carry, uncompressed: recorded in the first of them. None: what each call carries.
    """

    __slots__ = (
        "_before", "calls", "compressor", "elements", "is_open", "outer", "tensor", "unclaimed_bytes",
    )  # fmt: skip

    def __init__(
        self, outer: Span | None, tensor: str = "", compressor: str = "", elements: int = 0,
        dense_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.outer = outer
        self.tensor: str = tensor or (outer.tensor if outer else "")
        self.compressor: str = compressor or (outer.compressor if outer else "")
        self.elements, self.unclaimed_bytes = elements, dense_bytes
        self.calls: list[tuple[Call, list[Recorder]]] = []
        self.is_open = True
        #: Seconds before the next call that belong to it.
        self._before = {"compressing_s": 0.0, "decompressing_s": 0.0, "staging_s": 0.0}

    def open(self, call: Call, size: int, *, overhead: bool) -> None:
        """Write into a call that begins what surrounds it; `overhead` is what the tensors alone would not need."""
        call.tensor, call.compressor = call.tensor or self.tensor, self.compressor
        span: Span | None = self
        while span is not None:
            for name, seconds in span._before.items():
                if seconds:
                    setattr(call, name, getattr(call, name) + seconds)
                    span._before[name] = 0.0
            span = span.outer
        # The innermost span that says what is carried.
        span = self
        while span is not None and span.unclaimed_bytes is None:
            span = span.outer
        if overhead or span is None or span.unclaimed_bytes is None:
            return
        call.elements, call.dense_bytes = span.elements, span.unclaimed_bytes
        call.dense_sent_bytes = dense_sent("allreduce", span.unclaimed_bytes, size)
        span.elements = span.unclaimed_bytes = 0

    def close(self) -> list[tuple[Call, list[Recorder]]]:
        """Return the calls to report, each with its recorders."""
        self.is_open = False
        calls, self.calls = self.calls, []
        return calls

    def spent(self, name: str, seconds: float) -> None:
        """Add seconds to the call that was over last; to the next where there is none yet."""
        if not self.calls:
            self._before[name] += seconds
            return
        call = self.calls[-1][0]
        setattr(call, name, getattr(call, name) + seconds)

    @contextmanager
    def compressing(self) -> Iterator[None]:
        """Record the seconds inside as compressing, in the next call."""
        began = time.perf_counter()
        yield
        self._before["compressing_s"] += time.perf_counter() - began

    def decompressing(self) -> AbstractContextManager[None]:
        """Record the seconds inside as decompressing, in the last call."""
        return self._spending("decompressing_s")

    def staging(self) -> AbstractContextManager[None]:
        """Record the seconds inside as staging: in the last call, or in the next where there is none yet."""
        return self._spending("staging_s")

    @contextmanager
    def _spending(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent(name, time.perf_counter() - began)


def dense_sent(kind: str, nbytes: int, size: int) -> int:
    """Return the bytes each rank sends, on average, by a schedule that sends least; `nbytes` are those of all."""
    rounds = 2 if kind == "allreduce" else 1
    return rounds * (size - 1) * nbytes // size
