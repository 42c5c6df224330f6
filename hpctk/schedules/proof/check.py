"""Prove a plan: replay all its ranks symbolically in one process.

What `check` establishes, for one size:

- every message meets its counterpart with the same blocks, and no ranks wait for each other in a circle, even
  if a send only ends when its receive is there;
- every owned block ends with every rank's contribution exactly once;
- all ranks that own a block hold the same sum, added up in the same order, so the same to the last bit;
- parts kept apart are one per other rank, of owned blocks only;
- the plan's Volume is what is really moved, and all ranks have equally many rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from hpctk.errors import HpctkError
from hpctk.schedules.core.plan import Action, Plan, Recv, Send
from hpctk.schedules.cost.volume import Volume, merged
from hpctk.schedules.proof.rendezvous import Payload, Rendezvous
from hpctk.schedules.proof.tally import tally


@dataclass(frozen=True, slots=True)
class Report:
    """What the proof found out.

    Attributes
    ----------
    volume : Volume
        The volume as counted; equal to the plan's.
    depth : int
        How many additions a contribution passes at most: rounding errors grow with it.
    """

    volume: Volume
    depth: int


class Sums:
    """All sums met so far, as symbols: which contributions each holds, and in which order they were added.

    Every distinct sum has a number; that of a lone contribution is its rank. Sums are pairs without order, because
    floating-point addition commutes but does not associate: two values with the same number are the same to the
    last bit, whoever computed them.
    """

    def __init__(self, size: int) -> None:
        self._members = [1 << rank for rank in range(size)]
        self._depths = [0] * size
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, a: int, b: int) -> int:
        """Return the number of a + b, or raise HpctkError if a contribution is in both."""
        pair = (a, b) if a < b else (b, a)
        number = self._numbers.get(pair)
        if number is not None:
            return number
        twice = self._members[a] & self._members[b]
        if twice:
            raise HpctkError(f"the contribution of {ranks_in(twice)} is added twice")
        self._numbers[pair] = number = len(self._members)
        self._members.append(self._members[a] | self._members[b])
        self._depths.append(1 + max(self._depths[a], self._depths[b]))
        return number

    def members(self, number: int) -> int:
        """Return the contributions in a sum, as a bit mask of ranks."""
        return self._members[number]

    def depth(self, number: int) -> int:
        """Return how many additions one contribution passes at most: rounding errors grow with it."""
        return self._depths[number]


class Holdings:
    """What every rank holds in every block, as symbols; the contents of the replayed messages."""

    def __init__(self, plan: Plan) -> None:
        self.sums = Sums(plan.size)
        self.values: list[list[int | None]] = []
        self.kept: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(plan.size)]
        for rank in range(plan.size):
            held = plan.held(rank)
            self.values.append([rank if block in held else None for block in range(plan.blocks)])

    def read(self, rank: int, send: Send) -> Payload:
        """Return the symbols of the blocks to be sent."""
        values = self.values[rank]
        payload = []
        for block in send.blocks:
            value = values[block]
            if value is None:
                raise HpctkError(f"rank {rank} sends block {block} to rank {send.peer} before it has it")
            payload.append(value)
        return tuple(payload)

    def write(self, rank: int, recv: Recv, payload: Payload) -> None:
        """Combine, store or keep what arrived."""
        if recv.action is Action.COMBINE:
            self._combine(rank, recv, payload)
        elif recv.action is Action.STORE:
            self.values[rank][recv.blocks.start : recv.blocks.stop] = payload
        else:
            for block, value in zip(recv.blocks, payload, strict=True):
                self.kept[rank].setdefault(block, []).append((recv.peer, value))

    def _combine(self, rank: int, recv: Recv, payload: Payload) -> None:
        values = self.values[rank]
        for block, value in zip(recv.blocks, payload, strict=True):
            own = values[block]
            if own is None:
                raise HpctkError(f"rank {rank} combines into block {block} before it has it")
            try:
                values[block] = self.sums.add(own, value)
            except HpctkError as error:
                raise HpctkError(f"rank {rank}, block {block}, from rank {recv.peer}: {error}") from None


def check(plan: Plan) -> Report:
    """Replay all ranks of `plan`; raise HpctkError that says what is wrong, or return a Report."""
    holdings = Holdings(plan)
    try:
        _check_rounds(Rendezvous(plan, holdings).run())
        _check_owners(plan)
        _check_kept(plan, holdings)
        _check_result(plan, holdings)
        counted = _check_volume(plan)
    except HpctkError as error:
        raise HpctkError(f"{plan.name} {plan.kind} over {plan.size} ranks: {error}") from None
    numbers = {value for values in holdings.values for value in values if value is not None}
    return Report(counted, max(map(holdings.sums.depth, numbers), default=0))


def _check_rounds(rounds: list[int]) -> None:
    for rank, count in enumerate(rounds):
        if count != rounds[0]:
            raise HpctkError(f"rank {rank} has {count} rounds, rank 0 has {rounds[0]}")


def _check_owners(plan: Plan) -> None:
    owned: set[int] = set()
    for rank in range(plan.size):
        owned.update(plan.owned(rank))
        if plan.kind != "reduce_scatter" and plan.owned(rank) != range(plan.blocks):
            raise HpctkError(f"rank {rank} owns {plan.owned(rank)}, not all {plan.blocks} blocks")
    if owned != set(range(plan.blocks)):
        raise HpctkError(f"owned are the blocks {sorted(owned)}, not each of {plan.blocks}")


def _check_kept(plan: Plan, holdings: Holdings) -> None:
    for rank, kept in enumerate(holdings.kept):
        for block, parts in kept.items():
            if block not in plan.owned(rank):
                raise HpctkError(f"rank {rank} keeps parts of block {block}, which it does not own")
            others = [(peer, peer) for peer in range(plan.size) if peer != rank]
            if sorted(parts) != others or holdings.values[rank][block] != rank:
                raise HpctkError(f"rank {rank} keeps block {block} other than one part from each other rank")


def _check_result(plan: Plan, holdings: Holdings) -> None:
    expected = _expectation(plan)
    first: dict[int, tuple[int, int]] = {}
    for rank in range(plan.size):
        for block in plan.owned(rank):
            value = holdings.values[rank][block]
            if value is None:
                raise HpctkError(f"rank {rank} never gets block {block}")
            if block in holdings.kept[rank]:
                continue
            found, wanted = holdings.sums.members(value), expected(block)
            if found != wanted:
                missing, surplus = ranks_in(wanted & ~found), ranks_in(found & ~wanted)
                raise HpctkError(f"rank {rank}, block {block}: missing is {missing}, surplus is {surplus}")
            other, same = first.setdefault(block, (rank, value))
            if value != same:
                raise HpctkError(f"ranks {other} and {rank} add up block {block} in different orders")


def _expectation(plan: Plan) -> Callable[[int], int]:
    if plan.kind == "allgather":
        return lambda block: 1 << (block if plan.sources is None else plan.sources[block])
    if plan.kind == "broadcast":
        return lambda block: 1 << plan.root
    return lambda block: (1 << plan.size) - 1


def _check_volume(plan: Plan) -> Volume:
    counted, stated = tally(plan), replace(plan.volume, phases=merged(plan.volume.phases))
    for item in fields(Volume):
        moved, told = getattr(counted, item.name), getattr(stated, item.name)
        if moved != told:
            raise HpctkError(f"volume.{item.name} is stated as {told}, but counted as {moved}")
    return counted


def ranks_in(mask: int) -> str:
    """Spell a bit mask of ranks, for messages."""
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks)) if ranks else "no rank"
