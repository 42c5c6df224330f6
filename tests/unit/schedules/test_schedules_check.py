"""The checker catches plans that are wrong, one way of being wrong at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from hpctk.errors import HpctkError
from hpctk.schedules import Action, Plan, Recv, Round, Send, build, rotation
from hpctk.schedules.cost.volume import Phase, Volume
from hpctk.schedules.proof.check import check

ONE = range(1)
NO_VOLUME = Volume(0, 0, 0, 0, 0, 0, ())


def made(rounds: Sequence[Sequence[Round]], kind: str = "allreduce", blocks: int = 1) -> Plan:
    """Make a plan from a list of rounds per rank; its volume is never right."""
    return Plan(
        name="made",
        kind=kind,
        size=len(rounds),
        blocks=blocks,
        steps=lambda rank: iter(rounds[rank]),
        owns=lambda rank: range(blocks),
        volume=NO_VOLUME,
    )


def altered(plan: Plan, rank: int, at: int, change: Callable[[Round], Round]) -> Plan:
    """Change round `at` of `rank`."""

    def steps(who: int) -> Iterator[Round]:
        for number, step in enumerate(plan.rounds(who)):
            yield change(step) if (who, number) == (rank, at) else step

    return replace(plan, steps=steps)


def send(peer: int, blocks: range = ONE) -> Round:
    return Round(sends=(Send(peer, blocks),))


def recv(peer: int, action: Action = Action.COMBINE, blocks: range = ONE) -> Round:
    return Round(recvs=(Recv(peer, blocks, action),))


def swap(peer: int, action: Action = Action.COMBINE) -> Round:
    return Round((Send(peer, ONE),), (Recv(peer, ONE, action),))


def test_lost_message() -> None:
    with pytest.raises(HpctkError, match=r"lost message: rank 0 waits in round 0 to send block 0 to rank 1; but"):
        check(made([[send(1)], []]))


def test_receive_without_send() -> None:
    plan = altered(build("binomial", "broadcast", 4), 2, 1, lambda step: Round())
    with pytest.raises(HpctkError, match="lost message: rank 3 waits in round 1 to receive block 0 from rank 2"):
        check(plan)


def test_lost_message_in_a_ring_shows_as_the_wrong_block() -> None:
    plan = altered(build("ring", "allreduce", 5), 2, 1, lambda step: Round(step.sends))
    with pytest.raises(HpctkError, match=r"ring allreduce over 5 ranks: rank 1 sends block . in round"):
        check(plan)


def test_cyclic_wait_names_the_ranks() -> None:
    text = (
        "cyclic wait: rank 0 waits in round 0 to receive block 0 from rank 1; "
        "rank 1 waits in round 0 to receive block 0 from rank 2; "
        "rank 2 waits in round 0 to receive block 0 from rank 0"
    )
    with pytest.raises(HpctkError, match=text):
        check(made([[recv((rank + 1) % 3), send((rank - 1) % 3)] for rank in range(3)]))


def test_sends_that_need_a_buffer() -> None:
    """Both ranks send first and receive later: fine only for messages small enough to be buffered."""
    with pytest.raises(HpctkError, match="cyclic wait: rank 0 waits in round 0 to send"):
        check(made([[send(1), recv(1)], [send(0), recv(0)]]))


def test_doubled_contribution() -> None:
    with pytest.raises(HpctkError, match="rank 1, block 0, from rank 0: the contribution of rank 0 is added twice"):
        check(made([[send(1), send(1)], [recv(0), recv(0)]]))


def test_doubled_contribution_in_an_exchange() -> None:
    with pytest.raises(HpctkError, match="contribution of ranks 0, 1 is added twice"):
        check(made([[swap(1), swap(1)], [swap(0), swap(0)]]))


def test_missing_contribution() -> None:
    with pytest.raises(HpctkError, match="rank 0, block 0: missing is rank 1, surplus is no rank"):
        check(made([[send(1)], [recv(0)]]))


def test_store_instead_of_combine() -> None:
    def store(step: Round) -> Round:
        return Round(step.sends, tuple(replace(item, action=Action.STORE) for item in step.recvs))

    with pytest.raises(HpctkError, match="missing is rank"):
        check(altered(build("ring", "allreduce", 4), 1, 1, store))


def test_different_orders_of_addition() -> None:
    """Each of three ranks adds the others' values to its own: complete sums, but different bits."""
    spread = [Round(tuple(Send(peer, ONE) for peer in range(3) if peer != rank)) for rank in range(3)]
    gathered = [tuple(Recv(peer, ONE, Action.COMBINE) for peer in range(3) if peer != rank) for rank in range(3)]
    plan = made([[replace(step, recvs=recvs)] for step, recvs in zip(spread, gathered, strict=True)])
    with pytest.raises(HpctkError, match="ranks 0 and 2 add up block 0 in different orders"):
        check(plan)


def test_wrong_blocks() -> None:
    with pytest.raises(HpctkError, match="rank 0 sends block 1 in round 0, but rank 1 receives block 0 from it"):
        check(made([[send(1, range(1, 2))], [recv(0)]], blocks=2))


@pytest.mark.parametrize("blocks", [range(0), range(1, 3), range(-1, 1), range(0, 2, 2), range(1, 0, -1)])
def test_blocks_that_no_plan_may_move(blocks: range) -> None:
    with pytest.raises(HpctkError, match="in round 0; allowed are blocks 0 to 1"):
        check(made([[send(1, blocks)], [recv(0, blocks=blocks)]], blocks=2))


@pytest.mark.parametrize(("peer", "text"), [(0, "itself"), (2, "rank 2, who"), (-1, "rank -1, who")])
def test_peers_that_no_plan_may_have(peer: int, text: str) -> None:
    for step in (send(peer), recv(peer)):
        with pytest.raises(HpctkError, match=f"rank 0 talks to {text}"):
            check(made([[step], []]))


def test_store_over_a_block_in_use() -> None:
    with pytest.raises(HpctkError, match="stores over block 0 in round 0 while it uses it otherwise"):
        check(made([[swap(1, Action.STORE)], [swap(0)]]))


def test_block_sent_before_it_is_there() -> None:
    with pytest.raises(HpctkError, match="rank 1 sends block 0 to rank 0 before it has it"):
        check(made([[recv(1, Action.STORE)], [send(0)]], kind="broadcast"))


def test_block_combined_before_it_is_there() -> None:
    with pytest.raises(HpctkError, match="rank 1 combines into block 0 before it has it"):
        check(made([[send(1)], [recv(0)]], kind="broadcast"))


def test_broadcast_that_misses_a_rank() -> None:
    with pytest.raises(HpctkError, match="rank 2 never gets block 0"):
        check(made([[send(1)], [recv(0, Action.STORE)], [Round()]], kind="broadcast"))


def test_different_numbers_of_rounds() -> None:
    with pytest.raises(HpctkError, match="rank 1 has 2 rounds, rank 0 has 1"):
        check(made([[swap(1)], [swap(0), Round()]]))


def test_owners() -> None:
    with pytest.raises(HpctkError, match=r"rank 0 owns range\(0, 1\), not all 3 blocks"):
        check(replace(build("ring", "allreduce", 3), owns=lambda rank: ONE))
    with pytest.raises(HpctkError, match=r"owned are the blocks \[0\], not each of 3"):
        check(replace(build("ring", "reduce_scatter", 3), owns=lambda rank: ONE))


def test_kept_parts_of_a_block_that_is_not_owned() -> None:
    plan = replace(rotation.reduce_scatter(3, keep=True), owns=lambda rank: range((rank + 1) % 3, (rank + 1) % 3 + 1))
    with pytest.raises(HpctkError, match="keeps parts of block 0, which it does not own"):
        check(plan)


def test_kept_parts_must_come_from_every_other_rank() -> None:
    plan = altered(rotation.reduce_scatter(4, keep=True), 1, 0, lambda step: Round(step.sends))
    plan = altered(plan, 0, 0, lambda step: Round((), step.recvs))
    with pytest.raises(HpctkError, match="rank 1 keeps block 1 other than one part from each other rank"):
        check(plan)


@pytest.mark.parametrize(
    "name", ["rounds", "messages", "sent", "received", "combined", "total_sent", "kept", "network_sent", "local_sent"]
)
def test_wrong_volume(name: str) -> None:
    plan = build("ring", "allreduce", 4)
    stated = getattr(plan.volume, name) + 1
    with pytest.raises(HpctkError, match=rf"volume\.{name} is stated as {stated}, but counted as {stated - 1}"):
        check(replace(plan, volume=replace(plan.volume, **{name: stated})))


def test_wrong_critical_path() -> None:
    plan = build("ring", "allreduce", 4)
    with pytest.raises(HpctkError, match=r"volume\.phases is stated as"):
        check(replace(plan, volume=replace(plan.volume, phases=(Phase(6, 1),))))
