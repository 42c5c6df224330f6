"""How far the clocks of nodes are apart, by asking rank 0 what time it is (Cristian's way).

Ranks of one node share a clock, so one of each node asks. Of its questions the one that was answered soonest counts;
what it says is wrong by at most half the time it took.
"""

from __future__ import annotations

import time

import numpy as np

from hpctk.collectives.engine.engine import Engine, engine_of
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.comm import transport
from hpctk.comm.world import World

QUESTIONS = 8
#: With more nodes than this each asks less: rank 0 answers one after the other.
MANY_NODES = 64


def clock_offset(here: World) -> tuple[float, float]:
    """Return what to add to this rank's time.perf_counter() for rank 0's, and how wrong that may be, in seconds.

    Collective over the communicator.
    """
    leaders = [ranks[0] for ranks in here.nodes]
    if len(leaders) == 1:
        return 0.0, 0.0
    engine, questions = engine_of(here), QUESTIONS if len(leaders) <= MANY_NODES else 3
    tag = engine.tags(engine.reserve(1)[0])[0]
    mine = 0.0, 0.0
    if here.rank == 0:
        for leader in leaders[1:]:
            for _ in range(questions):
                _answer(engine, leader, tag)
    elif here.rank in leaders:
        mine = min((_ask(engine, tag) for _ in range(questions)), key=lambda one: one[1])
    leader = next(ranks[0] for ranks in here.nodes if here.rank in ranks)
    offset, error = gather_rows(here, np.array(mine))[leader].tolist()
    return offset, error


def _ask(engine: Engine, tag: int) -> tuple[float, float]:
    moving, theirs = engine.transport, np.empty(1)
    began = time.perf_counter()
    requests = [moving.irecv(theirs.view(np.uint8), 0, tag), moving.isend(np.zeros(1, np.uint8), 0, tag)]
    transport.wait(moving, requests, "comparing clocks", [0])
    ended = time.perf_counter()
    return float(theirs[0]) - (began + ended) / 2, (ended - began) / 2


def _answer(engine: Engine, peer: int, tag: int) -> None:
    moving = engine.transport
    question = moving.irecv(np.empty(1, np.uint8), peer, tag)
    transport.wait(moving, [question], "comparing clocks", [peer])
    answer = moving.isend(np.array([time.perf_counter()]).view(np.uint8), peer, tag)
    transport.wait(moving, [answer], "comparing clocks", [peer])
