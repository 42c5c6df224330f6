"""Lazy all-gather: one byte from everyone, then only the messages of those who have news.

A rank without news sends no payload; where nobody has any, none moves at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.engine.gather_messages import gather_messages
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.comm.collective import collective
from hpctk.comm.world import World
from hpctk.schedules import lazy


@collective
def lazy_allgather(here: World, message: Any) -> dict[int, Any]:
    """Return the messages of all ranks that gave one, by rank in ascending order.

    `message` is a uint8 array of any length, None where this rank sends nothing.
    """
    flags = gather_rows(here, np.array([message is not None], np.uint8))[:, 0]
    senders = [rank for rank, flag in enumerate(flags.tolist()) if flag]
    if not senders:
        # Nothing was sent, which statistics show.
        call = engine_of(here).opened("allgather", "lazy", 0)
        call.sent_bytes = call.received_bytes = 0
        engine_of(here).report(call)
        return {}
    messages = gather_messages(here, lazy.allgather(here.size, senders), message)
    return dict(zip(senders, messages, strict=True))
