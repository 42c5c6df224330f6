"""What an optimizer has done on this rank so far, whichever way training meets its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctk.stats.recorder import Counter


@dataclass(frozen=True)
class Stats:
    """What an optimizer has done on this rank so far.

    Attributes
    ----------
    steps : int
    sent_bytes, received_bytes, messages, seconds
        Of its collectives. What MPI's own all-reduce moves cannot be counted: see `uncounted_calls`.
    uncounted_calls : int
        Collectives whose bytes only MPI knows.
    counts : mapping
        What the method counts: rounds, uploads, skips, skipped_steps, fallbacks and the like; 0 where nothing was.
    """

    steps: int
    sent_bytes: int
    received_bytes: int
    messages: int
    seconds: float
    uncounted_calls: int
    counts: Mapping[str, int]


class Tally:
    """Steps, and a counter of the collectives that belong to them."""

    def __init__(self) -> None:
        self.steps, self.counter = 0, Counter()

    def stats(self, counts: Mapping[str, int]) -> Stats:
        """Return what was done so far; `counts` are the method's."""
        c = self.counter
        return Stats(
            self.steps, c.sent_bytes, c.received_bytes, c.messages, c.seconds, c.uncounted_calls, counts
        )

    def load(self, stats: Stats) -> None:
        """Go on counting from what an earlier run had counted on this rank."""
        self.steps, c = stats.steps, self.counter
        c.sent_bytes, c.received_bytes = stats.sent_bytes, stats.received_bytes
        c.messages, c.seconds, c.uncounted_calls = stats.messages, stats.seconds, stats.uncounted_calls
