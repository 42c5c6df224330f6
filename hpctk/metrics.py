"""What a step has cost on this rank, given to functions after each step: live, beside what the statistics files keep.

    opt.add_metrics(hpctk.metrics.TensorBoard("runs/board"))
    opt.add_metrics(lambda step: print(step.sent_bytes))

A function is called on every rank, by the thread that trains, after each of its steps: it should be quick, and must not
communicate. What it raises is logged once, and it is called no more; training goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hpctk.errors import SettingError


@dataclass(frozen=True)
class StepMetrics:
    """One step of one rank.

    Attributes
    ----------
    step, rank : int
        Steps count from 0.
    seconds : float
        Since the end of the step before.
    sent_bytes, received_bytes, messages : int
        Of its collectives. What MPI's own all-reduce moves cannot be counted.
    waiting_s, exposed_s : float
        Waiting for messages with nothing else to do; in communication instead of computing, on the thread that trains.
    loss : float, tensor or None
        Where it is known: what the closure returned, or what `step(loss=...)` was given. A tensor where asking for its
        value would wait for a device.
    counts : mapping
        What the method has counted in this step: rounds, uploads, skips, skipped_steps, fallbacks and the like.
    """

    step: int
    rank: int
    seconds: float
    sent_bytes: int
    received_bytes: int
    messages: int
    waiting_s: float
    exposed_s: float
    loss: Any = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def uploads(self) -> int:
        """Whether this rank has sent what its method sends, as a number: 0 in steps in which it had a reason not to."""
        return self.counts.get("uploads", self.counts.get("rounds", 0))

    def numbers(self) -> dict[str, float]:
        """Return all that is a number, by name; the loss where it is known."""
        named = ("seconds", "sent_bytes", "received_bytes", "messages", "waiting_s", "exposed_s", "uploads")
        found = {name: float(getattr(self, name)) for name in named}
        return found if self.loss is None else {**found, "loss": float(self.loss)}


#: What is called after each step.
OnStep = Callable[[StepMetrics], object]


class TensorBoard:
    """Write scalars hpctk/NAME for TensorBoard, each rank into a folder of its own.

    Parameters
    ----------
    folder : path
    every : int
        Steps between two that are written.
    ranks : iterable of int, optional
        Those that write; all where not given.
    """

    def __init__(self, folder: str | Path, *, every: int = 1, ranks: Any = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingError(
                f"hpctk.metrics.TensorBoard needs tensorboard: pip install 'hpctk[tensorboard]' ({error})"
            ) from None
        self._make, self._folder = SummaryWriter, Path(folder)
        self._every, self._ranks = _checked(every), None if ranks is None else frozenset(ranks)
        self._writer: Any = None

    def __call__(self, metrics: StepMetrics) -> None:
        """Write one step."""
        if metrics.step % self._every or (self._ranks is not None and metrics.rank not in self._ranks):
            return
        if self._writer is None:
            # When its rank is known.
            self._writer = self._make(str(self._folder / f"rank{metrics.rank:05d}"))
        for name, value in metrics.numbers().items():
            self._writer.add_scalar(f"hpctk/{name}", value, metrics.step)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()


class OpenTelemetry:
    """Feed instruments of OpenTelemetry, named hpctk.NAME, with the attribute `rank`.

    Counters for bytes, messages, seconds and what the method counts, a histogram of step seconds, a gauge for the loss.
    Where they go is the program's affair: set a MeterProvider with a reader and an exporter first.

    Parameters
    ----------
    meter : opentelemetry.metrics.Meter, optional
        The global provider's where not given.
    attributes : mapping, optional
        Further ones of all measurements, such as the run's name.
    """

    #: Name of a counter: its unit.
    COUNTERS: ClassVar[dict[str, str]] = {
        "sent_bytes": "By",
        "received_bytes": "By",
        "messages": "1",
        "waiting_s": "s",
        "exposed_s": "s",
    }

    def __init__(self, meter: Any = None, *, attributes: Mapping[str, str] | None = None) -> None:
        if meter is None:
            try:
                from opentelemetry import metrics
            except ImportError as error:
                raise SettingError(
                    f"hpctk.metrics.OpenTelemetry needs it: pip install 'hpctk[opentelemetry]' ({error})"
                ) from None
            meter = metrics.get_meter("hpctk")
        self._meter, self._attributes = meter, dict(attributes or {})
        self._counters = {name: meter.create_counter(f"hpctk.{name}", unit=u) for name, u in self.COUNTERS.items()}
        self._seconds = meter.create_histogram("hpctk.step_seconds", unit="s")
        self._loss = meter.create_gauge("hpctk.loss")
        self._counted: dict[str, Any] = {}

    def __call__(self, metrics: StepMetrics) -> None:
        """Feed one step."""
        attributes = {**self._attributes, "rank": metrics.rank}
        for name, counter in self._counters.items():
            counter.add(getattr(metrics, name), attributes)
        for name, count in metrics.counts.items():
            if name not in self._counted:
                self._counted[name] = self._meter.create_counter(f"hpctk.{name}")
            self._counted[name].add(count, attributes)
        self._seconds.record(metrics.seconds, attributes)
        if metrics.loss is not None:
            self._loss.set(float(metrics.loss), attributes)


def _checked(every: int) -> int:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingError(f"every={every!r}: need a whole number, 1 or more")
    return every
