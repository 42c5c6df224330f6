"""The tickets of asynchronous GRAWA: a counter that all ranks share, without a server process.

Who takes a ticket learns what to do next. Of every size*(period+1) tickets in a row, a cycle, the first
size*period mean "do a local step" and the last `size` mean "join the round" (Dimlioglu, Choromanska, AISTATS 2024,
arXiv 2403.04206). The round waits for all, so each rank takes one of those; fast ranks take more local steps.

The first `size` tickets of a cycle are dealt, one to each rank, which is what comes of the protocol when every
rank takes its next ticket as it leaves the round: a rank joins at most one round in a step, and nobody asks rank 0
for what is known. The others are counted by a word that rank 0 owns (shared_counter.py). In a round all ranks are
together, and rank 0 sets the word back to 0; so a rank without data may join the round without a ticket, and the
one it holds is lost.

Where a rank is lost (survival.py), rank 0 or another, the cycle ends at once: whoever asks for a ticket is told to join
the round, in which those that are left make a word of their own. The tickets of that cycle are lost.
"""

from __future__ import annotations

import time

from hpctk.collectives.engine.engine import engine_of
from hpctk.comm.shared_counter import OWNER, shared_counter
from hpctk.comm.world import World


def meaning(number: int, size: int, period: int) -> str:
    """Return what ticket `number`, counted from 0, tells its holder: "local" or "round"."""
    return "local" if number % (size * (period + 1)) < size * period else "round"


class Tickets:
    """The way of one rank to the tickets of a run. Collective over the communicator to make.

    Attributes
    ----------
    number : int
        Of the ticket this rank holds, from 0. The first is "local".
    """

    def __init__(self, here: World, period: int) -> None:
        self._here, self._engine = here, engine_of(here)
        self._rank, self._size, self._period = here.rank, here.size, period
        self._word = shared_counter(here)
        self._first = 0
        self.number = here.rank

    def take(self) -> str:
        """Take the next ticket and return what it means. Not collective; needs rank 0 to be alive."""
        self.number = self._first + self._size + self._add(1)
        return meaning(self.number, self._size, self._period)

    def take_or_meet(self) -> str:
        """Take the next ticket and return what it means: "round" where a rank is lost. Not collective."""
        try:
            # Before asking, too: rank 0 may be in the round already, and answer nobody.
            return "round" if self._here.is_broken() else self.take()
        except self._here.losses:
            if not self._here.is_broken():
                raise
            return "round"

    def new_cycle(self) -> None:
        """Start the next cycle, of which each rank holds a ticket then.

        To be called on all ranks inside a round, between two collectives: nobody may add before rank 0 has set
        the word back.
        """
        if self._rank == OWNER:
            self._add(-self._add(0))
            self._record_answers()
        self._first += self._size * (self._period + 1)
        self.number = self._first + self._rank

    def _add(self, value: int) -> int:
        """Add to the word, and tell of it."""
        engine, word = self._engine, self._word
        call = engine.opened("ticket", word.way, 8, overhead=True)
        before = word.add(value)
        call.waiting_s = time.perf_counter() - call.began_s
        engine.recorders.exposed_s += call.waiting_s
        if word.sent_bytes is not None and word.received_bytes is not None:
            call.sent_bytes = call.received_bytes = call.messages = 0
            if self._rank != OWNER:
                call.sent_bytes, call.received_bytes, call.messages = word.sent_bytes, word.received_bytes, 1
                engine.count(OWNER, word.sent_bytes, word.received_bytes)
        engine.report(call)
        return before

    def _record_answers(self) -> None:
        """Record the tickets that this rank has given to others."""
        word, answered = self._word, self._word.take_answered()
        if not answered or word.sent_bytes is None or word.received_bytes is None:
            return
        count = sum(answered.values())
        call = self._engine.opened("ticket_answers", word.way, 0, overhead=True)
        call.sent_bytes, call.received_bytes = count * word.received_bytes, count * word.sent_bytes
        call.messages = count
        for peer, times in answered.items():
            self._engine.count(peer, word.received_bytes, word.sent_bytes, times)
        self._engine.report(call)
