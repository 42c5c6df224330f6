"""The lazy all-gather on real ranks: flags, then only the news."""

import numpy as np
import pytest

from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.lazy_allgather import lazy_allgather


def message_of(rank, nbytes):
    return np.random.default_rng([rank, nbytes]).integers(0, 256, nbytes).astype(np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 300_000])
def test_every_set_of_senders(world, nbytes):
    for chosen in range(2**world.size):
        senders = [rank for rank in range(world.size) if chosen >> rank & 1]
        # Messages of different lengths: only their senders know them.
        mine = message_of(world.rank, nbytes + world.rank) if world.rank in senders else None
        before = engine_of(world).counter.sent_bytes
        heard = lazy_allgather(world, mine)
        sent = engine_of(world).counter.sent_bytes - before
        assert list(heard) == senders
        for rank in senders:
            np.testing.assert_array_equal(heard[rank], message_of(rank, nbytes + rank))
        # One byte as a flag to each of the others; a sender also its length and its message.
        payload = 8 + nbytes + world.rank if world.rank in senders else 0
        assert sent == (world.size - 1) * (1 + payload)


def test_nobody_sends_and_nothing_moves_but_flags(world):
    counter = engine_of(world).counter
    before = counter.messages
    assert lazy_allgather(world, None) == {}
    assert counter.messages - before == world.size - 1
