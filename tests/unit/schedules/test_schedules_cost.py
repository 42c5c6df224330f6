"""Prices at any size without a replay, the machine file, and the choice of a schedule."""

import json
from dataclasses import fields

import pytest

from hpctk.errors import SettingError
from hpctk.schedules import SCHEDULES, Plan, build
from hpctk.schedules.core.registry import names
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import best, price
from hpctk.schedules.proof.tally import replay_seconds

FREE = {item.name: 0.0 for item in fields(Machine) if item.name.endswith("_s")}


def in_order(size: int, width: int) -> list[range]:
    return [range(start, start + width) for start in range(0, size, width)]


def test_pricing_65536_ranks_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(plan: Plan, rank: int) -> None:
        raise AssertionError(f"{plan.name} was asked for the rounds of rank {rank}")

    monkeypatch.setattr(Plan, "rounds", forbidden)
    for nodes in (None, in_order(65536, 8)):
        for kind in ("allreduce", "reduce_scatter", "allgather", "broadcast"):
            for name in names(kind, with_nodes=nodes is not None):
                plan = build(name, kind, 65536, nodes=nodes)
                assert len(plan.volume.phases) <= 2 * 17
                assert price(plan, 10**9, Machine()) > 0
            assert best(kind, 65536, 10**9, Machine(), nodes)[0] in SCHEDULES


def test_ring_by_hand() -> None:
    machine = Machine(
        latency_s=1.0, message_s=0.5, byte_s=0.25, combine_byte_s=0.125, segment_bytes=10, exchange_factor=2.0
    )
    # 4 ranks, 100 bytes: six rounds of 25 bytes in three segments each; three of them add.
    assert price(build("ring", "allreduce", 4), 100, machine) == 6 * (1 + 1.5 + 6.25) + 3 * 3.125
    # 2 ranks: both rounds are exchanges of 50 bytes.
    assert price(build("ring", "allreduce", 2), 100, machine) == 2 * (1 + 2.5 + 2 * 12.5) + 6.25


def test_local_figures_are_for_messages_inside_nodes() -> None:
    plan = build("hierarchical", "allreduce", 6, nodes=[[0, 1, 2], [3, 4, 5]])
    inside = Machine(**{**FREE, "local_latency_s": 1.0})
    between = Machine(**{**FREE, "latency_s": 1.0})
    assert (price(plan, 0, inside), price(plan, 0, between)) == (4, 2)


def test_exchange_factor_slows_pairs_only() -> None:
    duplex = Machine(**{**FREE, "byte_s": 1.0}, exchange_factor=1.0)
    half = Machine(**{**FREE, "byte_s": 1.0}, exchange_factor=2.0)
    pairs, circle = build("halving_doubling", "allreduce", 8), build("ring", "allreduce", 8)
    assert price(pairs, 800, half) == 2 * price(pairs, 800, duplex)
    assert price(circle, 800, half) == price(circle, 800, duplex)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 61440, 61441, 10**6])
def test_closed_form_at_the_edges_of_segments(nbytes: int) -> None:
    for name, kind in (("ring", "allreduce"), ("halving_doubling", "allreduce"), ("binomial", "broadcast")):
        for size in (1, 2, 3, 12, 16):
            plan = build(name, kind, size)
            machine = Machine(segment_bytes=1000)
            assert price(plan, nbytes, machine) == pytest.approx(replay_seconds(plan, nbytes, machine), rel=1e-9)


def test_alone_everything_is_free() -> None:
    assert best("allreduce", 1, 10**9, Machine()) == ("ring", 0.0)


def test_negative_bytes_are_an_error() -> None:
    with pytest.raises(SettingError, match="nbytes=-1"):
        price(build("ring", "allreduce", 2), -1, Machine())


def test_best_knows_small_from_large() -> None:
    assert best("allreduce", 64, 8, Machine())[0] == "recursive_doubling"
    assert best("allreduce", 64, 10**9, Machine())[0] in ("halving_doubling", "ring")
    assert best("allreduce", 64, 10**9, Machine(exchange_factor=2.0))[0] == "ring"
    assert best("allreduce", 64, 10**8, Machine(), in_order(64, 8))[0] == "hierarchical"


def test_best_uses_local_figures_inside_one_node() -> None:
    alone, spread = best("allgather", 8, 10**6, Machine(), [range(8)]), best("allgather", 8, 10**6, Machine())
    assert alone[1] < spread[1]
    assert best("allgather", 8, 10**6, Machine().inside()) == alone


def test_machine_file_round_trip() -> None:
    machine = Machine(latency_s=1 / 3, segment_bytes=123)
    document = json.loads(json.dumps(machine.to_document()))
    assert Machine.from_document(document) == machine
    assert document["version"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("latency_s", -1.0),
        ("byte_s", float("nan")),
        ("local_byte_s", float("inf")),
        ("message_s", "fast"),
        ("combine_byte_s", True),
        ("exchange_factor", 0.5),
        ("segment_bytes", 0),
        ("segment_bytes", 1.5),
        ("sends", 0),
    ],
)
def test_figures_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"{name}={value!r}: allowed are"):
        Machine(**{name: value})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, '"format" must be "hpctk-machine"'),
        ({"version": 2}, "version=2; this hpctk reads 1"),
        ({"colour": 1}, "unknown key 'colour'; allowed are latency_s"),
        ({"byte_s": None}, "byte_s=None"),
    ],
)
def test_machine_files_are_checked(change: dict[str, object], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        Machine.from_document({**Machine().to_document(), **change})


def test_machine_files_that_are_none() -> None:
    document = Machine().to_document()
    del document["byte_s"]
    for none, said in (({}, "format"), (document, "'byte_s' is missing")):
        with pytest.raises(SettingError, match=said):
            Machine.from_document(none)
