"""What ranks do before they meet without those that are lost."""

import time

from hpctk.comm.mpi import survivors


def test_ranks_wait_until_nobody_else_is_lost():
    began, lost = time.monotonic(), []

    def known():
        # One more every 10 ms, five in all: a host's ranks, one after the other.
        while len(lost) < min(5, (time.monotonic() - began) / 0.01):
            lost.append(len(lost))
        return lost

    survivors.settle(known)
    assert len(lost) == 5
    assert time.monotonic() - began >= 0.04 + survivors.SETTLE_S
