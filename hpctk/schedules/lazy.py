"""Lazy all-gather: only the ranks that have news send, and everyone gets all of it.

For SASG (Deng, Li, Sun, Lu, arXiv 2112.04088). Who sends is known to all ranks beforehand: one byte each,
gathered by rotation. Block i is what the i-th sender has to say; it goes straight to every other rank, in the
order of rotation. Nothing is passed on, so a rank without news sends nothing at all, and where nobody has
any, the plan has no messages.

| with m senders | a sender | another rank |
|---|---|---|
| rounds | P-1 | P-1 |
| sent | (P-1) blocks | nothing |
| received | (m-1) blocks | m blocks |
"""

from collections.abc import Iterator, Sequence

from hpctk.errors import SettingError
from hpctk.schedules.core.plan import Action, Plan, Recv, Round, Send, checked_size
from hpctk.schedules.cost.volume import Phase, Volume, merged


def allgather(size: int, senders: Sequence[int]) -> Plan:
    """Give everyone the blocks of `senders`, ascending ranks: block i is that of senders[i]."""
    checked_size(size)
    order = tuple(senders)
    if list(order) != sorted({*order}) or (order and not 0 <= order[0] <= order[-1] < size):
        raise SettingError(f"senders={order}: need ascending ranks below {size}")
    block = {rank: range(i, i + 1) for i, rank in enumerate(order)}

    def steps(rank: int) -> Iterator[Round]:
        for shift in range(1, size if order else 1):
            to, source = (rank + shift) % size, (rank - shift) % size
            sends = (Send(to, block[rank]),) if rank in block else ()
            recvs = (Recv(source, block[source], Action.STORE),) if source in block else ()
            yield Round(sends, recvs)

    return Plan("lazy", "allgather", size, len(order), steps, _volume(size, order), sources=order)


def _volume(size: int, senders: Sequence[int]) -> Volume:
    present, count = {*senders}, len(senders)
    sent = size - 1 if count else 0
    path = []
    for shift in range(1, sent + 1):
        # In the round of an even size's half way, two senders opposite each other talk both ways at once.
        opposite = 2 * shift == size and any((rank + shift) % size in present for rank in senders)
        path.append(Phase(1, blocks=1, exchanged=int(opposite)))
    return Volume(
        rounds=sent,
        messages=sent,
        sent=sent,
        received=0 if size == 1 else count if count < size else count - 1,
        combined=0,
        total_sent=count * (size - 1),
        phases=merged(path),
        network_sent=sent,
    )
