"""What a report says in sentences: from its document. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpctk.stats import metrics
from hpctk.stats.report.numbers import bytes_text, count, percent, plural, rank_list, seconds_text, times

Document = dict[str, Any]
#: Where the one who waits least waits more than this share of what the one who waits most does, nobody is slow.
EVEN = 0.75
#: A file that ends so much before the last one is worth a word: files are not written at the same moment.
LAG_S = 1.0


def findings(document: Document) -> list[str]:
    """Return the sentences that there is something to say for."""
    return [text for text in (say(document) for say in FINDINGS) if text]


def missing(document: Document) -> list[str]:
    """Return what is not there, and why."""
    # What is the same after every start is said once.
    starts: dict[str, list[int]] = {}
    for one in document["recordings"]:
        for text in _missing_files(one):
            starts.setdefault(text, []).append(one["number"])
    said = [
        f"start{'s' if len(numbers) > 1 else ''} {rank_list(numbers)}: {text}"
        if len(document["recordings"]) > 1
        else text
        for text, numbers in starts.items()
    ]
    said += _lagging(document)
    totals = document["totals"]
    if totals["events_dropped"]:
        said.append(
            f"{count(totals['events_dropped'])} calls have no row of their own; their sums are complete"
        )
    if totals["steps_dropped"]:
        said.append(
            f"{count(totals['steps_dropped'])} steps have no row of their own: counts and curves lack them"
        )
    if document["counts"]["ranks"] < totals["files"]:
        said.append(
            f"curves and counts are those of {document['counts']['ranks']} of {totals['files']} ranks"
        )
    return [*said, *document["problems"]]


def _missing_files(one: Document) -> list[str]:
    said = []
    for reason in one["missing"]:
        are = "rank {} is" if reason["count"] == 1 else "ranks {} are"
        said.append(f"{are.format(reason['ranks'])} missing: {reason['why']}")
    if one["not_closed_files"]:
        alone = one["not_closed_files"] == 1
        said.append(
            f"{'rank' if alone else 'ranks'} {one['not_closed']} did not close {'its file' if alone else 'their files'}"
            ": still running, or killed; what was written until then is counted"
        )
    return said


def _lagging(document: Document) -> list[str]:
    """Say which rank's file ends first, among several that were not closed."""
    open_ranks = [one for one in document["ranks"] if not one["closed"]]
    if not open_ranks or len(document["ranks"]) < 2:
        return []
    first = min(open_ranks, key=lambda one: one["flushed_s"])
    last = max(one["flushed_s"] for one in document["ranks"])
    if last < first["flushed_s"] + LAG_S:
        return []
    return [
        f"rank {first['rank']}'s file ends {seconds_text(last - first['flushed_s'])} before the last one does"
    ]


def _waiting(document: Document) -> str:
    ranks = document["ranks"]
    found = metrics.waiting([one["waiting_s"] for one in ranks], [one["communication_s"] for one in ranks])
    if found is None:
        return ""
    most, slowest = ranks[found.most], ranks[found.slowest]
    least = slowest["waiting_share"] or 0.0
    if least > EVEN * found.share:
        return (
            f"rank {most['rank']} waits {percent(found.share)} of its communication time, and all others almost as "
            f"much (least: rank {slowest['rank']} on host {slowest['host'] or '?'}, {percent(least)}): nobody is slow."
        )
    return (
        f"rank {most['rank']} waits {percent(found.share)} of its communication time; "
        f"slowest is rank {slowest['rank']} on host {slowest['host'] or '?'}, which waits "
        f"{percent(least)}."
    )


def _volume(document: Document) -> str:
    step = document["per_step"]
    sent, dense, unknown = (
        step["sent_bytes"],
        step["dense_bytes"],
        document["totals"]["uncounted_tensor_calls"],
    )
    if sent is None or not dense:
        return ""
    if unknown and not sent:
        return f"Plain averaging would send {bytes_text(dense)} a step; what was sent only the library knows."
    counted = " that are counted" if unknown else ""
    return (
        f"A rank sends {bytes_text(sent)} a step{counted}; plain averaging would send {bytes_text(dense)}"
        + (f" ({_times_as_much(step['dense_sent'])})." if sent else ".")
    )


def _times_as_much(factor: float | None) -> str:
    if factor is not None and 0.95 <= factor <= 1.05:
        return "the same"
    return f"{times(factor).removesuffix('x')} times as much"


def _unknown(document: Document) -> str:
    totals = document["totals"]
    if not totals["uncounted_calls"]:
        return ""
    return (
        f"Of {plural(int(totals['calls']), 'call')}, {count(totals['uncounted_calls'])} have bytes that only the "
        "library knows: they are in no sum of bytes."
    )


def _exposed(document: Document) -> str:
    share = document["per_step"]["exposed_share"]
    if share is None:
        return ""
    return f"Training stood still for communication for {percent(share)} of its time."


def _alone(document: Document) -> str:
    return "One rank alone: there is nobody to wait for." if document["totals"]["ranks"] == 1 else ""


def _together(document: Document) -> str:
    if not document["together"]:
        return ""
    return (
        "Some of these recordings were made at the same time, by several optimizers: bytes and calls are sums over "
        "all, and nothing is said of efficiency. The folder of a recording shows it alone."
    )


def _straggler(document: Document) -> str:
    ranks = document["ranks"]
    computing = np.array([one["useful_s"] for one in ranks])
    over = metrics.imbalance(computing)
    if over is None or over < 0.1 or len(ranks) < 2:
        return ""
    most = ranks[int(np.argmax(computing))]
    return f"rank {most['rank']} on host {most['host'] or '?'} computes {percent(over)} longer than the mean."


#: In the order they are said.
FINDINGS: tuple[Callable[[Document], str], ...] = (
    _alone, _together, _waiting, _straggler, _exposed, _volume, _unknown,
)  # fmt: skip
