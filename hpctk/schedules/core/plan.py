"""What a collective schedule is: rounds of sends and receives over numbered blocks, as data.

A tensor of n elements is cut into `Plan.blocks` blocks of almost equal size; block b holds the elements
from b*n//blocks up to (b+1)*n//blocks. A Plan gives, for one rank at a time and lazily, which blocks that
rank sends to whom and receives from whom, round by round.

The rules that every plan keeps, every engine may rely on, and `proof/check.py` proves:

- All messages of a round are concurrent. A send carries the values from before the round; a receive of
  round i comes before the sends of round i+1.
- Messages from one rank to another match in the order (round, position in the round).
- Receives of a round are applied in their order in the round, never in order of arrival.
- A block that is stored over in a round is neither sent nor received otherwise in that round. A block that
  is combined into may be sent in the same round (recursive doubling does it).
- All ranks have equally many rounds; a rank with nothing to do has an empty one.
- All ranks end with the same bits, provided only that a + b == b + a: a block's sum is computed once and
  copied, or computed by trees that differ in nothing but the order of two operands.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from hpctk.errors import SettingError
from hpctk.schedules.cost.volume import Phase, Volume, even

#: Up to so many ranks a plan keeps its rounds: small collectives are run often, and making rounds takes longest.
FEW = 64
KINDS = ("allreduce", "reduce_scatter", "allgather", "broadcast", "sparse_allreduce")


class Action(Enum):
    """What a receiver does with the blocks of a message."""

    COMBINE = "combine"
    """Add them to its own."""
    STORE = "store"
    """Overwrite its own with them."""
    KEEP = "keep"
    """Keep them apart, one part per sender; its own stay as they are."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the contiguous, non-empty `blocks` to rank `peer`."""

    peer: int
    blocks: range


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive the contiguous, non-empty `blocks` from rank `peer` and do `action` with them."""

    peer: int
    blocks: range
    action: Action


@dataclass(frozen=True, slots=True)
class Round:
    """The messages that one rank has under way at the same time."""

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()

    @property
    def messages(self) -> tuple[Send | Recv, ...]:
        """Sends, then receives."""
        return (*self.sends, *self.recvs)


IDLE = Round()


@dataclass(frozen=True)
class Plan:
    """One collective operation over `size` ranks, as data.

    Parameters
    ----------
    name : str
        The schedule, e.g. "ring".
    kind : str
        One of `KINDS`.
    size : int
        Number of ranks.
    blocks : int
        Number of blocks the tensor is cut into.
    steps : callable
        rank -> iterator over that rank's rounds; use `rounds`, which checks the rank.
    volume : Volume
        What the plan moves, in closed form.
    root : int
        Where a broadcast starts.
    sources : tuple of int, optional
        For an all-gather: the rank that block b comes from, where that is not rank b.
    nodes : tuple of tuple of int, optional
        The ranks of each node, for plans that know them. Without it every message uses the network.
    owns : callable, optional
        rank -> blocks that hold the result at the end, where not all do, or in a reduce-scatter block r on rank r;
        use `owned`.
    """

    name: str
    kind: str
    size: int
    blocks: int
    steps: Callable[[int], Iterator[Round]] = field(compare=False, repr=False)
    volume: Volume = field(repr=False)
    root: int = 0
    sources: tuple[int, ...] | None = None
    nodes: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    owns: Callable[[int], range] | None = field(default=None, compare=False, repr=False)
    _kept: dict[int, tuple[Round, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        checked_size(self.size)
        if self.kind not in KINDS:
            raise SettingError(f"kind={self.kind!r}: allowed are {', '.join(KINDS)}")
        if not 0 <= self.root < self.size:
            raise SettingError(f"root={self.root}: allowed are 0 to {self.size - 1} (size {self.size})")

    def rounds(self, rank: int) -> Iterator[Round]:
        """Iterate over the rounds of `rank`; where ranks are many, they are made one by one when asked for."""
        if rank not in self._kept:
            steps = self.steps(self._checked(rank))
            if self.size > FEW:
                return steps
            self._kept[rank] = tuple(steps)
        return iter(self._kept[rank])

    def owned(self, rank: int) -> range:
        """Return the blocks that hold the result on `rank` at the end."""
        self._checked(rank)
        if self.owns is not None:
            return self.owns(rank)
        return range(rank, rank + 1) if self.kind == "reduce_scatter" else range(self.blocks)

    def held(self, rank: int) -> range:
        """Return the blocks that hold input on `rank` at the start."""
        self._checked(rank)
        if self.kind == "allgather":
            return self._gathered_from(rank)
        if self.kind == "broadcast" and rank != self.root:
            return range(0)
        return range(self.blocks)

    def _gathered_from(self, rank: int) -> range:
        if self.sources is None:
            return range(rank, rank + 1)
        if rank not in self.sources:
            return range(0)
        return range(self.sources.index(rank), self.sources.index(rank) + 1)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise SettingError(f"rank={rank}: {self.name} {self.kind} has ranks 0 to {self.size - 1}")
        return rank


def even_plan(
    name: str, kind: str, size: int, steps: Callable[[int], Iterator[Round]], phases: Iterable[Phase], kept: int = 0
) -> Plan:
    """Return a plan of one block per rank in which all ranks do the same in every round, as `phases` say."""
    return Plan(name, kind, checked_size(size), blocks=size, steps=steps, volume=even(size, phases, kept))


def checked_size(size: int) -> int:
    """Return `size`, or raise SettingError if no group can have so many ranks."""
    if size < 1:
        raise SettingError(f"size={size}: a schedule needs 1 rank or more")
    return size


def bounds(n: int, blocks: int, block_range: range) -> tuple[int, int]:
    """Return the first element of `block_range` and the one after its last, for n elements in all.

    Blocks differ by one element at most, and are empty where n < blocks.
    """
    return block_range.start * n // blocks, block_range.stop * n // blocks


def exchange(to: int, given: range, source: int, taken: range, action: Action) -> Round:
    """Make the round that sends `given` to rank `to` while it receives `taken` from rank `source`."""
    return Round((Send(to, given),), (Recv(source, taken, action),))


def mirrored(rounds: Iterable[Round]) -> Iterator[Round]:
    """Run `rounds` backwards with every message turned round: a reduction becomes its distribution.

    Whoever gave a part away gets the result back from the rank that took it. Holds all `rounds` in memory:
    meant for plans with a logarithmic number of them.
    """
    for step in reversed(list(rounds)):
        sends = tuple(Send(recv.peer, recv.blocks) for recv in step.recvs)
        recvs = tuple(Recv(send.peer, send.blocks, Action.STORE) for send in step.sends)
        yield Round(sends, recvs)
