"""A collective call as it is recorded, and the counter in memory that always takes them.

Every call of a collective ends in one `Call`, whatever moved the bytes. A recorder takes them; the
Counter adds them up in constant memory and is there from the start.
"""

from __future__ import annotations

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
    by_operation: dict[str, int] = field(default_factory=dict)
    traffic: Traffic | None = field(default=None, init=False, repr=False)
    flags: bool = field(default=False, init=False, repr=False)

    def record(self, call: Call) -> None:
        """Add one call to the totals."""
        self.calls += 1
        self.messages += call.messages
        self.seconds += call.seconds
        self.by_operation[call.operation] = self.by_operation.get(call.operation, 0) + 1
        if call.sent_bytes is None or call.received_bytes is None:
            self.uncounted_calls += 1
        else:
            self.sent_bytes += call.sent_bytes
            self.received_bytes += call.received_bytes
