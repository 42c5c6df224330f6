"""Which ranks a table shows where there are too many: those that are least or most of anything. Pure."""

from __future__ import annotations

from typing import Any

#: What extremes are looked for in, the most telling first.
OF = ("waiting_share", "computing_s", "communication_s", "sent_bytes", "exposed_s", "received_bytes")


def extremes(ranks: list[dict[str, Any]], most: int) -> tuple[list[dict[str, Any]], int]:
    """Return at most `most` ranks in their order, the first, the last and the extreme ones, and how many are left."""
    if len(ranks) <= most:
        return ranks, 0
    chosen = {0, len(ranks) - 1}
    ordered = [_order([one[name] or 0.0 for one in ranks]) for name in OF]
    for depth in range(most):
        for places in ordered:
            for place in (places[-1 - depth], places[depth]):
                if len(chosen) < most:
                    chosen.add(place)
    return [ranks[i] for i in sorted(chosen)], len(ranks) - len(chosen)


def _order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=values.__getitem__)
