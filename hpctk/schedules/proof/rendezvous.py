"""Run all ranks of a plan in one process, as if a send could only end when its receive is there.

Rendezvous is the strictest reading of MPI: a plan that comes to its end here needs no buffering anywhere. A
rank leaves a round when all messages of that round have met their counterpart. What the messages carry is the
business of a `Ledger`.
"""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from hpctk.errors import HpctkError
from hpctk.schedules.core.plan import IDLE, Action, Plan, Recv, Round, Send

Payload = tuple[int, ...]


class Ledger(Protocol):
    """What every rank holds."""

    def read(self, rank: int, send: Send) -> Payload:
        """Return what `rank` puts into the message."""

    def write(self, rank: int, recv: Recv, payload: Payload) -> None:
        """Let `rank` take the message."""


class Rendezvous:
    """One run of `plan`, with `ledger` for the contents of its messages."""

    def __init__(self, plan: Plan, ledger: Ledger) -> None:
        self._plan, self._ledger = plan, ledger
        self._feeds: list[Iterator[Round]] = [plan.rounds(rank) for rank in range(plan.size)]
        self._current: list[Round | None] = [IDLE] * plan.size
        self._at = [-1] * plan.size
        self._open = [0] * plan.size
        self._inbox: list[dict[int, Payload]] = [{} for _ in range(plan.size)]
        self._sends: dict[tuple[int, int], deque[tuple[Send, Payload]]] = {}
        self._recvs: dict[tuple[int, int], deque[tuple[Recv, int]]] = {}
        self._ready = list(range(plan.size))

    def run(self) -> list[int]:
        """Run to the end and return every rank's number of rounds; raise HpctkError if ranks get stuck."""
        while self._ready:
            self._advance(self._ready.pop())
        stuck = [rank for rank, current in enumerate(self._current) if current is not None]
        if stuck:
            raise HpctkError(self._explain(stuck[0]))
        return self._at

    def _advance(self, rank: int) -> None:
        current = self._current[rank]
        if current is not None:
            for position, recv in enumerate(current.recvs):
                self._ledger.write(rank, recv, self._inbox[rank].pop(position))
        self._at[rank] += 1
        self._current[rank] = upcoming = next(self._feeds[rank], None)
        if upcoming is not None:
            self._post(rank, upcoming)

    def _post(self, rank: int, upcoming: Round) -> None:
        check_round(self._plan, rank, self._at[rank], upcoming)
        self._open[rank] = len(upcoming.sends) + len(upcoming.recvs)
        if not self._open[rank]:
            self._ready.append(rank)
        for send in upcoming.sends:
            self._sends.setdefault((rank, send.peer), deque()).append((send, self._ledger.read(rank, send)))
            self._meet(rank, send.peer)
        for position, recv in enumerate(upcoming.recvs):
            self._recvs.setdefault((recv.peer, rank), deque()).append((recv, position))
            self._meet(recv.peer, rank)

    def _meet(self, source: int, to: int) -> None:
        sends, recvs = self._sends.get((source, to)), self._recvs.get((source, to))
        if not sends or not recvs:
            return
        (send, payload), (recv, position) = sends.popleft(), recvs.popleft()
        if send.blocks != recv.blocks:
            raise HpctkError(
                f"rank {source} sends {shown(send.blocks)} in round {self._at[source]}, but rank {to} "
                f"receives {shown(recv.blocks)} from it in round {self._at[to]}"
            )
        self._inbox[to][position] = payload
        for rank in (source, to):
            self._open[rank] -= 1
            if not self._open[rank]:
                self._ready.append(rank)

    def _explain(self, rank: int) -> str:
        chain: dict[int, str] = {}
        while rank not in chain and self._current[rank] is not None:
            chain[rank], rank = self._wait_of(rank)
        waits = "; ".join(chain.values())
        if self._current[rank] is None:
            return f"lost message: {waits}; but rank {rank} has ended"
        return f"cyclic wait: {waits}"

    def _wait_of(self, rank: int) -> tuple[str, int]:
        where = f"rank {rank} waits in round {self._at[rank]}"
        for (source, to), sends in self._sends.items():
            if source == rank and sends:
                return f"{where} to send {shown(sends[0][0].blocks)} to rank {to}", to
        for (source, to), recvs in self._recvs.items():
            if to == rank and recvs:
                return f"{where} to receive {shown(recvs[0][0].blocks)} from rank {source}", source
        raise AssertionError(f"rank {rank} is stuck without an open message")


def check_round(plan: Plan, rank: int, at: int, upcoming: Round) -> None:
    """Raise HpctkError if a round of `rank` is not one that an engine could run."""
    for message in upcoming.messages:
        peer, blocks = message.peer, message.blocks
        if peer == rank or not 0 <= peer < plan.size:
            problem = "itself" if peer == rank else f"rank {peer}, who does not exist"
            raise HpctkError(f"rank {rank} talks to {problem} in round {at} (size {plan.size})")
        if blocks.step != 1 or not 0 <= blocks.start < blocks.stop <= plan.blocks:
            raise HpctkError(f"rank {rank} moves {blocks} in round {at}; allowed are blocks 0 to {plan.blocks - 1}")
    for recv in upcoming.recvs:
        if recv.action is Action.STORE:
            _check_store(rank, at, recv, upcoming)


def _check_store(rank: int, at: int, stored: Recv, upcoming: Round) -> None:
    # A stored block is received in place, so nothing else may read or write it meanwhile.
    for message in upcoming.messages:
        first = max(stored.blocks.start, message.blocks.start)
        if message is not stored and first < min(stored.blocks.stop, message.blocks.stop):
            raise HpctkError(f"rank {rank} stores over block {first} in round {at} while it uses it otherwise")


def shown(blocks: range) -> str:
    """Spell a range of blocks, for messages."""
    return f"block {blocks.start}" if len(blocks) == 1 else f"blocks {blocks.start}-{blocks.stop - 1}"
