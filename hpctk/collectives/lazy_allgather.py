"""Lazy all-gather: one byte from everyone, then only the messages of those who have news.

A rank without news sends no payload; where nobody has any, none moves at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctk.collectives.gather_messages import gather_messages
from hpctk.collectives.gather_rows import gather_rows
from hpctk.schedules import lazy
from hpctk.world import World


def lazy_allgather(here: World, message: Any, *, elements: int = 0, dense_bytes: int = 0) -> dict[int, Any]:
    """Return the messages of all ranks that gave one, by rank in ascending order.

    Collective over the communicator.

    Parameters
    ----------
    here : World
    message : uint8 array or None
        What this rank has to say, of any length; None for nothing.
    elements, dense_bytes : int
        What the message stands for; for the statistics.
    """
    flags = gather_rows(here, np.array([message is not None], np.uint8))[:, 0]
    senders = [rank for rank, flag in enumerate(flags.tolist()) if flag]
    if not senders:
        return {}
    plan = lazy.allgather(here.size, senders)
    messages = gather_messages(here, plan, message, elements=elements, dense_bytes=dense_bytes)
    return dict(zip(senders, messages, strict=True))
