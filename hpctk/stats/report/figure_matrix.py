"""Figure: who sends how much to whom, with the boundaries of nodes."""

from __future__ import annotations

import itertools
import math

from hpctk.stats.report.account import Account
from hpctk.stats.report.numbers import bytes_text
from hpctk.stats.report.svg import Svg

_LEFT, _TOP, _SIDE = 52.0, 34.0, 340.0
#: Fields that say what they hold where the pointer rests; boundaries that are drawn.
_TIPS, _BOUNDARIES = 32, 64


def matrix(found: Account) -> str:
    """Return the drawing, "" where nothing that is counted went anywhere."""
    sent, size = found.matrix.sent, found.matrix.size
    most = float(sent.max()) if sent.size else 0.0
    if most <= 0:
        return ""
    fields = len(sent)
    svg = Svg(_LEFT + _SIDE + 16, _TOP + _SIDE + 40, "bytes from every rank to every other")
    svg.rect(_LEFT, _TOP, _SIDE, _SIDE, "empty")
    smallest = float(sent[sent > 0].min())
    least = math.log(max(1.0, smallest))
    span = math.log(max(1.0, most)) - least
    edges = _edges(found)
    place = [_SIDE * edge / size for edge in edges]
    for i in range(fields):
        for j in range(fields):
            amount = float(sent[i, j])
            if amount > 0:
                share = (math.log(max(1.0, amount)) - least) / span if span > 0 else 1.0
                tip = f"{_who(edges, i)} to {_who(edges, j)}: {bytes_text(amount)}" if fields <= _TIPS else ""
                svg.rect(
                    _LEFT + place[j], _TOP + place[i], place[j + 1] - place[j], place[i + 1] - place[i],
                    "field", tip, 0.15 + 0.85 * share,
                )  # fmt: skip
    parted = boundaries(found)
    for boundary in parted:
        at, kind = _SIDE * boundary / size, "node" if len(parted) <= 8 else "node many"
        svg.line(_LEFT + at, _TOP, _LEFT + at, _TOP + _SIDE, kind)
        svg.line(_LEFT, _TOP + at, _LEFT + _SIDE, _TOP + at, kind)
    for rank in _labels(size):
        at = _SIDE * (rank + 0.5) / size
        svg.text(_LEFT - 6, _TOP + at + 4, str(rank), "end")
        svg.text(_LEFT + at, _TOP - 6, str(rank), "middle")
    svg.text(_LEFT + _SIDE / 2, 12, "to rank", "middle", "t name")
    svg.text(14, _TOP + _SIDE / 2, "from rank", "middle", "t name", turn=True)
    _legend(svg, smallest, most, parted)
    return svg.drawn()


def boundaries(found: Account) -> list[int]:
    """Return the ranks at which another node begins; none where they are too many to draw."""
    nodes = list(zip(found.ranks, found.nodes, strict=True))
    at = [rank for (_, before), (rank, node) in itertools.pairwise(nodes) if before != node]
    return at if len(at) <= _BOUNDARIES else []


def _edges(found: Account) -> list[int]:
    """Return the first rank of each field, and the number of ranks."""
    places = found.matrix.places.tolist()
    return [i for i, place in enumerate(places) if i == 0 or place != places[i - 1]] + [len(places)]


def _who(edges: list[int], field: int) -> str:
    first, last = edges[field], edges[field + 1] - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _labels(size: int) -> list[int]:
    every = max(1, -(-size // 8))
    return list(range(0, size, every))


def _legend(svg: Svg, least: float, most: float, parted: list[int]) -> None:
    y, x = _TOP + _SIDE + 14, _LEFT
    steps = 1 if least >= most * 0.99 else 6
    for i in range(steps):
        svg.rect(x + 16 * i, y, 16, 10, "field", "", 1.0 if steps == 1 else 0.15 + 0.85 * i / (steps - 1))
    text = bytes_text(most) if steps == 1 else f"{bytes_text(least)} to {bytes_text(most)}"
    svg.text(x + 16 * steps + 8, y + 9, f"{text}; lines part nodes" if parted else text)
