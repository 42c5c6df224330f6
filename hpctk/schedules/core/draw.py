"""Draw a plan as text: a table of rounds and ranks for a terminal."""

from itertools import islice

from hpctk.schedules.core.plan import Action, Plan, Recv, Round, Send

_MARKS = {Action.COMBINE: "+", Action.STORE: "", Action.KEEP: "*"}
_MEANINGS = {
    Action.COMBINE: "←0 b1+ add block 1 from rank 0",
    Action.STORE: "←0 b1 store it",
    Action.KEEP: "←0 b1* keep it apart",
}
_MARGIN = 5

Column = list[Round]


def draw(plan: Plan, *, columns: int = 80, max_rounds: int = 32) -> str:
    """Return `plan` as a table with a column per rank, under a title and above a legend.

    At most `columns` characters wide and `max_rounds` rounds long: the text says how many ranks and rounds are missing.
    Rank 0 is always drawn.
    """
    # No column is narrower than three characters, so more ranks than this cannot fit.
    ranks = range(min(plan.size, max(1, columns // 3)))
    table = [list(islice(plan.rounds(rank), max_rounds)) for rank in ranks]
    lines = _title(plan)
    if table[0]:
        body = _body(table, columns, complete=len(table) == plan.size)
        lines += ["", *body, "", *_omitted(plan, table), *_legend(table)]
    return "\n".join(lines) + "\n"


def _body(table: list[Column], columns: int, *, complete: bool) -> list[str]:
    """Choose the roomiest layout that fits; drops ranks from `table` in place if none does."""
    if complete:
        for body in (_side_by_side(table), _stacked(table, gap="  ")):
            if _width(body) <= columns:
                return body
    while _width(body := _stacked(table, gap=" ")) > columns and len(table) > 1:
        table.pop()
    return body


def _title(plan: Plan) -> list[str]:
    volume = plan.volume
    origin = f" from rank {plan.root}" if plan.kind == "broadcast" else ""
    places = f" on {_count(len(plan.nodes), 'node')}" if plan.nodes else ""
    between = f", {volume.network_sent / plan.blocks:.3g} x between nodes" if plan.nodes else ""
    return [
        f"{plan.name} {plan.kind}{origin}, {_count(plan.size, 'rank')}{places}, "
        f"{_count(plan.blocks, 'block')}, {_count(volume.rounds, 'round')}",
        f"a rank sends at most {volume.sent / plan.blocks:.3g} x the tensor{between}, "
        f"in {_count(volume.messages, 'message')}",
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _side_by_side(table: list[Column]) -> list[str]:
    cells = [[" ".join(filter(None, _texts(step))) or "·" for step in column] for column in table]
    return _grid(cells, [str(at) for at in range(len(table[0]))], gap="  ")


def _stacked(table: list[Column], gap: str) -> list[str]:
    cells: list[list[str]] = []
    for column in table:
        cells.append([])
        for step in column:
            sends, recvs = _texts(step)
            cells[-1] += [sends or "·", recvs or "·", ""]
    labels = [label for at in range(len(table[0])) for label in (str(at), "", "")]
    return _grid(cells, labels, gap)[:-1]


def _grid(cells: list[list[str]], labels: list[str], gap: str) -> list[str]:
    heads = [f"rank {rank}" for rank in range(len(cells))]
    widths = [max(map(len, [head, *column])) for head, column in zip(heads, cells, strict=True)]
    rows = [heads, ["─" * width for width in widths], *map(list, zip(*cells, strict=True))]
    margins = ["round", "─" * _MARGIN, *labels]
    return [
        gap.join([margin.rjust(_MARGIN), *map(str.ljust, row, widths)]).rstrip()
        for margin, row in zip(margins, rows, strict=True)
    ]


def _texts(step: Round) -> tuple[str, str]:
    return " ".join(map(_sent, step.sends)), " ".join(map(_received, step.recvs))


def _sent(send: Send) -> str:
    return f"→{send.peer} {_named(send.blocks)}"


def _received(recv: Recv) -> str:
    return f"←{recv.peer} {_named(recv.blocks)}{_MARKS[recv.action]}"


def _named(blocks: range) -> str:
    return f"b{blocks.start}" if len(blocks) == 1 else f"b{blocks.start}-{blocks.stop - 1}"


def _width(lines: list[str]) -> int:
    return max(map(len, lines))


def _omitted(plan: Plan, table: list[Column]) -> list[str]:
    ranks, rounds = plan.size - len(table), plan.volume.rounds - len(table[0])
    missing = [_count(count, what) for count, what in ((ranks, "rank"), (rounds, "round")) if count > 0]
    return [f"left out: {', '.join(missing)}"] if missing else []


def _legend(table: list[Column]) -> list[str]:
    used = {recv.action for column in table for step in column for recv in step.recvs}
    meanings = [_MEANINGS[action] for action in Action if action in used]
    return ["   ".join(["→2 b1 send block 1 to rank 2", *meanings])] if meanings else []
