"""All-gather of messages of any length, one of each rank or of some of them."""

from __future__ import annotations

from typing import Any

from hpctk.collectives.engine.engine import engine_of
from hpctk.comm.world import World
from hpctk.schedules.core.plan import Plan


class Messages:
    """The blocks of an all-gather: whole messages."""

    def __init__(self, blocks: int) -> None:
        self.data: list[Any] = [None] * blocks

    def outgoing(self, block: int) -> Any:
        """Return a message, one's own or another's passed on."""
        return self.data[block]

    def store(self, block: int, data: Any) -> None:
        """Take another rank's message."""
        self.data[block] = data

    def combine(self, block: int, data: Any) -> None:
        """Refuse: an all-gather combines nothing."""
        raise AssertionError("an all-gather combines nothing")


def gather_messages(here: World, plan: Plan, message: Any) -> list[Any]:
    """Return the messages of all ranks that send one by `plan`, an all-gather, in rank order.

    Collective over the communicator. `message`, a uint8 array of any length, is not looked at where the plan has this
    rank send nothing.
    """
    messages = Messages(plan.blocks)
    own = plan.held(here.rank)
    for block in own:
        messages.data[block] = message
    engine_of(here).run_ragged(plan, messages, payload_bytes=len(message) if own else 0)
    return messages.data
