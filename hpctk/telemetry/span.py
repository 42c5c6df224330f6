"""What surrounds calls and is told in them: which tensors, which compressor, seconds beside the communication.

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
from contextlib import contextmanager

from hpctk.telemetry.recorder import Call, Recorder


class Span:
    """Calls that belong together.

    Parameters
    ----------
    outer : Span or None
    tensor, compressor : str
        Where empty, those of `outer`.
    elements, dense_bytes : int
        What is carried by all its calls together, as it is: told in the first of them. None: what each call carries.
    """

    __slots__ = (
        "_before",
        "calls",
        "compressor",
        "elements",
        "is_open",
        "outer",
        "tensor",
        "unclaimed_bytes",
    )

    def __init__(
        self,
        outer: Span | None,
        tensor: str = "",
        compressor: str = "",
        elements: int = 0,
        dense_bytes: int | None = None,
    ) -> None:
        self.outer = outer
        self.tensor: str = tensor or (outer.tensor if outer else "")
        self.compressor: str = compressor or (outer.compressor if outer else "")
        self.elements, self.unclaimed_bytes = elements, dense_bytes
        self.calls: list[tuple[Call, list[Recorder]]] = []
        self.is_open = True
        #: Seconds before the next call that belong to it.
        self._before = {"compressing_s": 0.0, "decompressing_s": 0.0, "staging_s": 0.0}

    def open(self, call: Call, size: int, *, overhead: bool) -> None:
        """Tell a call that begins what surrounds it; `overhead` is what the tensors alone would not need."""
        call.tensor, call.compressor = call.tensor or self.tensor, self.compressor
        self._hand_over(call)
        teller = self._teller()
        if overhead or teller is None:
            return
        assert teller.unclaimed_bytes is not None
        call.elements, call.dense_bytes = teller.elements, teller.unclaimed_bytes
        call.dense_sent_bytes = dense_sent("allreduce", teller.unclaimed_bytes, size)
        teller.elements = teller.unclaimed_bytes = 0

    def _hand_over(self, call: Call) -> None:
        """Tell a call of the seconds spent for it, here and outside."""
        for name, seconds in self._before.items():
            if seconds:
                setattr(call, name, getattr(call, name) + seconds)
                self._before[name] = 0.0
        if self.outer is not None:
            self.outer._hand_over(call)

    def _teller(self) -> Span | None:
        """Return the innermost span that says what is carried."""
        span: Span | None = self
        while span is not None and span.unclaimed_bytes is None:
            span = span.outer
        return span

    def close(self) -> list[tuple[Call, list[Recorder]]]:
        """Return the calls to report, with who is to hear of them."""
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
        """Let the seconds inside be told as compressing, in the next call."""
        began = time.perf_counter()
        yield
        self._before["compressing_s"] += time.perf_counter() - began

    @contextmanager
    def decompressing(self) -> Iterator[None]:
        """Let the seconds inside be told as decompressing, in the last call."""
        began = time.perf_counter()
        yield
        self.spent("decompressing_s", time.perf_counter() - began)

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Let the seconds inside be told as staging: in the last call, or in the next where there is none yet."""
        began = time.perf_counter()
        yield
        self.spent("staging_s", time.perf_counter() - began)


def dense_sent(kind: str, nbytes: int, size: int) -> int:
    """Return the bytes each rank sends, on average, by a schedule that sends least: `nbytes` are those of the whole."""
    rounds = 2 if kind == "allreduce" else 1
    return rounds * (size - 1) * nbytes // size
