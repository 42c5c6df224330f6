"""Every schedule is proved for sizes from 1 to 64 (--full: for all of them), and priced two ways that must agree."""

import os
from math import fsum
from random import Random

import pytest

from hpctk.errors import SettingError
from hpctk.schedules import SCHEDULES, Action, Plan, binomial, build, hierarchical, lazy, ring, rotation
from hpctk.schedules.core.registry import names
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import price
from hpctk.schedules.proof.check import check
from hpctk.schedules.proof.tally import replay_seconds

#: Odd and even, powers of two and their neighbours, primes; the large ones take nearly all of the time.
SIZES = range(1, 65) if os.environ.get("HPCTK_FULL") == "1" else [*range(1, 26), 31, 32, 33, 47, 63, 64]
FLAT = [(name, kind) for name, entry in SCHEDULES.items() if not entry.needs_nodes for kind in entry.builders]
# Every figure counts, and 12345679 bytes are no multiple of a segment or a block.
MACHINE = Machine(exchange_factor=1.7, segment_bytes=50_000)
NBYTES = 12_345_679


def prove(plan: Plan) -> None:
    check(plan)
    assert price(plan, NBYTES, MACHINE) == pytest.approx(replay_seconds(plan, NBYTES, MACHINE), rel=1e-9)


@pytest.mark.parametrize(("name", "kind"), FLAT)
def test_flat_plans(name: str, kind: str) -> None:
    for size in SIZES:
        prove(build(name, kind, size))


def test_rotation_that_keeps_parts() -> None:
    for size in SIZES:
        prove(rotation.reduce_scatter(size, keep=True))


def test_lazy_gathers_of_every_set_of_senders() -> None:
    for size in range(1, 7):
        for chosen in range(1, 2**size):
            prove(lazy.allgather(size, [rank for rank in range(size) if chosen >> rank & 1]))
    for size in SIZES:
        plan = lazy.allgather(size, [])
        assert check(plan).volume.total_sent == 0
        assert all(list(plan.rounds(rank)) == [] for rank in range(size))
        prove(lazy.allgather(size, range(0, size, 3)))


def test_lazy_refuses_senders_that_cannot_be() -> None:
    for senders in ([1, 0], [0, 0], [4], [-1]):
        with pytest.raises(SettingError, match="ascending ranks below 4"):
            lazy.allgather(4, senders)


@pytest.mark.parametrize("size", [2, 3, 7, 8, 13, 64])
def test_broadcast_from_any_root(size: int) -> None:
    for root in range(size):
        prove(binomial.broadcast(size, root))


def in_order(size: int, width: int) -> list[list[int]]:
    return [list(range(size))[start : start + width] for start in range(0, size, width)]


def dealt(size: int, count: int) -> list[list[int]]:
    return [list(range(size))[start::count] for start in range(min(count, size))]


@pytest.mark.parametrize("size", SIZES)
def test_hierarchical_plans(size: int) -> None:
    prove(hierarchical.allreduce(in_order(size, 4)))
    prove(hierarchical.allreduce(dealt(size, 3)))


@pytest.mark.parametrize(
    "nodes",
    [
        [range(16)],
        [[rank] for rank in range(9)],
        [[0], range(1, 9)],
        [[5, 2], [0, 4, 3], [1]],
        [[7, 0], [6, 1], [5, 2], [4, 3]],
        in_order(64, 8),
        [range(8), range(8, 11), range(11, 16)],
        [range(2), range(2, 7), range(7, 9)],
    ],
    ids=lambda nodes: "+".join(str(len(ranks)) for ranks in nodes),
)
def test_hierarchical_shapes(nodes: list[list[int]]) -> None:
    prove(hierarchical.allreduce(nodes))


def test_one_rank_per_node_is_a_ring() -> None:
    alone, plain = hierarchical.allreduce([[rank] for rank in range(6)]), ring.allreduce(6)
    assert all(list(alone.rounds(rank)) == list(plain.rounds(rank)) for rank in range(6))


def test_depth_tells_how_rounding_errors_grow() -> None:
    assert check(build("ring", "allreduce", 64)).depth == 63
    assert check(build("recursive_doubling", "allreduce", 64)).depth == 6
    assert check(build("halving_doubling", "allreduce", 63)).depth == 6


def summed(plan: Plan, inputs: list[list[float]]) -> list[list[float]]:
    """Run a plan with numbers, all ranks round by round: a second opinion, independent of the checker."""
    values = [list(row) for row in inputs]
    for steps in zip(*(plan.rounds(rank) for rank in range(plan.size)), strict=True):
        before = [list(row) for row in values]
        for rank, step in enumerate(steps):
            for recv in step.recvs:
                for block in recv.blocks:
                    own = values[rank][block] if recv.action is Action.COMBINE else 0.0
                    values[rank][block] = own + before[recv.peer][block]
    return values


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 16])
def test_numbers_are_the_same_to_the_last_bit(size: int) -> None:
    random = Random(size)
    for name in names("allreduce", with_nodes=True):
        plan = build(name, "allreduce", size, nodes=in_order(size, 3))
        inputs = [
            [random.uniform(-1, 1) * 10 ** random.randint(-6, 6) for _ in range(plan.blocks)] for _ in range(size)
        ]
        results = summed(plan, inputs)
        assert all(row == results[0] for row in results)
        scale = max(abs(value) for row in inputs for value in row)
        assert results[0] == pytest.approx([fsum(column) for column in zip(*inputs, strict=True)], abs=1e-12 * scale)


@pytest.mark.parametrize("size", range(2, 65))
def test_volumes_as_the_docstrings_state_them(size: int) -> None:
    levels = size.bit_length() - 1
    teams = 1 << levels
    folded = size > teams
    halves = build("halving_doubling", "allreduce", size).volume
    assert halves.path == (3 * teams - 2 if folded else 2 * (teams - 1))
    assert halves.rounds == 2 * levels + 2 * folded
    doubling = build("recursive_doubling", "allreduce", size).volume
    assert (doubling.rounds, doubling.path) == (levels + 2 * folded,) * 2
    tree = build("binomial", "allreduce", size).volume
    assert tree.path == 2 * (size - 1).bit_length()
    assert tree.exchanged == 0
    for name in ("ring", "rotation"):
        assert build(name, "allreduce", size).volume.path == 2 * (size - 1)
