"""Messages of any length, each to the next rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_messages import Messages
from hpctk.comm.world import World
from hpctk.schedules import ring
from hpctk.schedules.core.plan import Plan, Round


def shift_messages(here: World, message: Any) -> Any:
    """Return the message of the rank before this one, of rank 0 the last one's; `message` goes to the next.

    Collective over the communicator. A message is a uint8 array; one rank alone gets its own.
    """
    messages = Messages(here.size)
    messages.data[here.rank] = message
    engine_of(here).run_ragged(_shift(here.size), messages, payload_bytes=len(message))
    return messages.data[(here.rank - 1) % here.size]


@cache
def _shift(size: int) -> Plan:
    """Return the first round of an all-gather on a ring."""
    whole = ring.allgather(size)

    def steps(rank: int) -> Iterator[Round]:
        return islice(whole.steps(rank), 1)

    return replace(whole, name="shift", steps=steps)
