"""Drawings of plans."""

import pytest

from hpctk.schedules import SCHEDULES, build, rotation
from hpctk.schedules.core.draw import draw

RING = """\
ring allreduce, 3 ranks, 3 blocks, 4 rounds
a rank sends at most 1.33 x the tensor, in 4 messages

round  rank 0        rank 1        rank 2
─────  ────────────  ────────────  ────────────
    0  →1 b2 ←2 b1+  →2 b0 ←0 b2+  →0 b1 ←1 b0+
    1  →1 b1 ←2 b0+  →2 b2 ←0 b1+  →0 b0 ←1 b2+
    2  →1 b0 ←2 b2   →2 b1 ←0 b0   →0 b2 ←1 b1
    3  →1 b2 ←2 b1   →2 b0 ←0 b2   →0 b1 ←1 b0

→2 b1 send block 1 to rank 2   ←0 b1+ add block 1 from rank 0   ←0 b1 store it
"""


def test_ring_of_three() -> None:
    assert draw(build("ring", "allreduce", 3)) == RING


@pytest.mark.parametrize("name", SCHEDULES)
def test_eight_ranks_fit_into_80_columns(name: str) -> None:
    for kind in SCHEDULES[name].builders:
        text = draw(build(name, kind, 8, nodes=[range(4), range(4, 8)]))
        assert max(map(len, text.splitlines())) <= 80
        assert "rank 7" in text
        assert "left out" not in text


def test_what_does_not_fit_is_counted() -> None:
    lines = draw(build("ring", "allreduce", 65536), max_rounds=3).splitlines()
    assert max(map(len, lines)) <= 80
    shown = lines[3].count("rank")
    assert f"left out: {65536 - shown} ranks, {2 * 65535 - 3} rounds" in lines


def test_rank_0_is_drawn_however_narrow_the_terminal() -> None:
    assert "rank 0" in draw(build("ring", "allreduce", 4), columns=5)


def test_alone_there_is_nothing_to_draw() -> None:
    assert draw(build("ring", "allreduce", 1)).splitlines()[0] == "ring allreduce, 1 rank, 1 block, 0 rounds"


def test_kept_parts_and_roots_are_shown() -> None:
    assert "←3 b0*" in draw(rotation.reduce_scatter(4, keep=True))
    assert "from rank 2" in draw(build("binomial", "broadcast", 4, root=2))
