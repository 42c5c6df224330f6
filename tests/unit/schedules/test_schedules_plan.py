"""Cutting a tensor into blocks, plan objects, and the registry."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctk.errors import SettingError
from hpctk.schedules import SCHEDULES, Action, Recv, Round, Send, bounds, build, halving_doubling, rotation
from hpctk.schedules.core.fold import Fold
from hpctk.schedules.core.plan import KINDS, mirrored
from hpctk.schedules.core.registry import names
from hpctk.schedules.cost.volume import Phase, merged


@given(n=st.integers(0, 10**12), blocks=st.integers(1, 500))
def test_blocks_tile_the_tensor_and_differ_by_one_element_at_most(n: int, blocks: int) -> None:
    edges = [bounds(n, blocks, range(block, block + 1)) for block in range(blocks)]
    assert edges[0][0] == 0
    assert edges[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    sizes = {stop - start for start, stop in edges}
    assert sizes <= {n // blocks, n // blocks + 1}


@given(n=st.integers(0, 10**9), blocks=st.integers(1, 65536), data=st.data())
def test_a_range_of_blocks_has_the_bounds_of_its_ends(n: int, blocks: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, blocks - 1))
    stop = data.draw(st.integers(first + 1, blocks))
    whole = bounds(n, blocks, range(first, stop))
    assert whole == (bounds(n, blocks, range(first, first + 1))[0], bounds(n, blocks, range(stop - 1, stop))[1])
    assert 0 <= whole[0] <= whole[1] <= n


def test_held_and_owned_blocks() -> None:
    gather, scatter = build("ring", "allgather", 5), build("ring", "reduce_scatter", 5)
    assert gather.held(3) == scatter.owned(3) == range(3, 4)
    assert gather.owned(3) == scatter.held(3) == range(5)
    tree = build("binomial", "broadcast", 5, root=2)
    assert (len(tree.held(2)), len(tree.held(0)), len(tree.owned(0))) == (1, 0, 1)


def test_rounds_are_made_lazily() -> None:
    first = next(build("ring", "allreduce", 10**9).rounds(0))
    assert first.sends[0].peer == 1


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_plan_is_named(rank: int) -> None:
    plan = build("ring", "allreduce", 4)
    for ask in (plan.rounds, plan.owned, plan.held):
        with pytest.raises(SettingError, match=f"rank={rank}: ring allreduce has ranks 0 to 3"):
            ask(rank)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "hierarchical"])
def test_a_group_has_at_least_one_rank(name: str) -> None:
    with pytest.raises(SettingError, match="size=0"):
        build(name, next(iter(SCHEDULES[name].builders)), 0)


def test_a_root_outside_the_group_is_named() -> None:
    with pytest.raises(SettingError, match="root=4: allowed are 0 to 3"):
        build("binomial", "broadcast", 4, root=4)


def test_mirrored_turns_messages_round() -> None:
    steps = [Round(sends=(Send(1, range(2)),)), Round(recvs=(Recv(2, range(1), Action.COMBINE),))]
    assert list(mirrored(steps)) == [Round(sends=(Send(2, range(1)),)), Round(recvs=(Recv(1, range(2), Action.STORE),))]


def test_merged_drops_empty_phases_and_joins_equal_ones() -> None:
    phases = [Phase(2, 1), Phase(0, 9), Phase(3, 1), Phase(1, 1, combined=1)]
    assert merged(phases) == (Phase(5, 1), Phase(1, 1, combined=1))


@pytest.mark.parametrize("size", range(1, 34))
def test_fold_puts_every_rank_into_one_team(size: int) -> None:
    fold = Fold(size)
    members = [sorted({fold.lower(team), fold.upper(team)}) for team in range(fold.teams)]
    assert sorted(rank for ranks in members for rank in ranks) == list(range(size))
    assert all(fold.team(rank) == team for team, ranks in enumerate(members) for rank in ranks)


def test_folding_wastes_no_volume() -> None:
    """All ranks together send what a ring sends, the least possible, for any size."""
    for size in range(2, 200):
        plan, ring = halving_doubling.allreduce(size), build("ring", "allreduce", size)
        assert plan.volume.total_sent * ring.blocks == ring.volume.total_sent * plan.blocks


def test_only_opposite_ranks_of_a_rotation_talk_both_ways_at_once() -> None:
    for size in range(2, 20):
        rounds = list(rotation.reduce_scatter(size).rounds(0))
        both_ways = [step for step in rounds if step.sends[0].peer == step.recvs[0].peer]
        assert len(both_ways) == (size % 2 == 0)


def test_registry_covers_every_kind() -> None:
    assert {kind for schedule in SCHEDULES.values() for kind in schedule.builders} == set(KINDS)
    assert names("broadcast") == ["binomial"]
    assert "hierarchical" not in names("allreduce")
    assert "hierarchical" in names("allreduce", with_nodes=True)
    assert all(len(schedule.summary) < 80 for schedule in SCHEDULES.values())


def test_unknown_names_and_kinds_list_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"'rign': did you mean ring\? known are ring, rotation, .*hierarchical"):
        build("rign", "allreduce", 4)
    with pytest.raises(SettingError, match="'broadcast': schedule 'ring' knows allreduce, reduce_scatter"):
        build("ring", "broadcast", 4)
    with pytest.raises(SettingError, match="allowed are allreduce"):
        names("scan")


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        (None, "needs the ranks of every node"),
        ([], "one node or more"),
        ([[0, 1], []], "none may be empty"),
        ([[0, 1], [1, 2]], "exactly once"),
        ([[0, 1], [2, 4]], "exactly once"),
        ([[0, 1], [2]], "3 ranks in all, but size=4"),
    ],
)
def test_nodes_must_be_a_partition_of_the_ranks(nodes: list[list[int]] | None, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        build("hierarchical", "allreduce", 4, nodes=nodes)
