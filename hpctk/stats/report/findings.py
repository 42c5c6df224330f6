"""What a report says in words, from its document: findings, what is missing, how a run is described. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np

from hpctk.stats import metrics
from hpctk.stats.report.numbers import bytes_text, count, percent, plural, rank_list, seconds_text, times

Document = dict[str, Any]
#: Where the one who waits least waits more than this share of what the one who waits most does, nobody is slow.
EVEN = 0.75
#: A file that ends so much before the last one is worth a word: files are not written at the same moment.
LAG_S = 1.0
#: What ranks that are shown in place of all are extreme in, the most telling first.
EXTREME_IN = ("waiting_share", "computing_s", "communication_s", "sent_bytes", "exposed_s", "received_bytes")


def findings(document: Document) -> list[str]:
    """Return the sentences that there is something to say for."""
    return [text for text in (finding(document) for finding in FINDINGS) if text]


def missing(document: Document) -> list[str]:
    """Return what is not there, and why."""
    # What is the same after every start is said once.
    starts: dict[str, list[int]] = {}
    for recording in document["recordings"]:
        for text in _missing_files(recording):
            starts.setdefault(text, []).append(recording["number"])
    texts = list(starts)
    if len(document["recordings"]) > 1:
        texts = [
            f"start{'s' if len(numbers) > 1 else ''} {rank_list(numbers)}: {text}"
            for text, numbers in starts.items()
        ]
    texts += _lagging(document)
    totals, counted = document["totals"], document["counts"]["ranks"]
    if totals["events_dropped"]:
        texts.append(
            f"{count(totals['events_dropped'])} calls have no row of their own; their sums are complete"
        )
    if totals["steps_dropped"]:
        texts.append(
            f"{count(totals['steps_dropped'])} steps have no row of their own: counts and curves lack them"
        )
    if counted < totals["files"]:
        texts.append(f"curves and counts are those of {counted} of {totals['files']} ranks")
    return [*texts, *document["problems"]]


def _missing_files(recording: Document) -> list[str]:
    texts = []
    for reason in recording["missing"]:
        are = "rank {} is" if reason["count"] == 1 else "ranks {} are"
        texts.append(f"{are.format(reason['ranks'])} missing: {reason['why']}")
    if recording["not_closed_files"]:
        ranks, files = (
            ("rank", "its file") if recording["not_closed_files"] == 1 else ("ranks", "their files")
        )
        texts.append(
            f"{ranks} {recording['not_closed']} did not close {files}: still running, or killed; what was written "
            "until then is counted"
        )
    return texts


def _lagging(document: Document) -> list[str]:
    """Return which rank's file ends first, among several that were not closed."""
    not_closed = [rank for rank in document["ranks"] if not rank["closed"]]
    if not not_closed or len(document["ranks"]) < 2:
        return []
    first = min(not_closed, key=lambda rank: rank["flushed_s"])
    lag_s = max(rank["flushed_s"] for rank in document["ranks"]) - first["flushed_s"]
    if lag_s < LAG_S:
        return []
    return [f"rank {first['rank']}'s file ends {seconds_text(lag_s)} before the last one does"]


def _alone(document: Document) -> str:
    return "One rank alone: there is nobody to wait for." if document["totals"]["ranks"] == 1 else ""


def _together(document: Document) -> str:
    if not document["together"]:
        return ""
    return (
        "Some of these recordings were made at the same time, by several optimizers: bytes and calls are sums over "
        "all, and nothing is said of efficiency. The folder of a recording shows it alone."
    )


def _waiting(document: Document) -> str:
    ranks = document["ranks"]
    waiting = metrics.waiting(
        [rank["waiting_s"] for rank in ranks], [rank["communication_s"] for rank in ranks]
    )
    if waiting is None:
        return ""
    most, slowest = ranks[waiting.most], ranks[waiting.slowest]
    least, host = slowest["waiting_share"] or 0.0, slowest["host"] or "?"
    start = f"rank {most['rank']} waits {percent(waiting.share)} of its communication time"
    if least > EVEN * waiting.share:
        return (
            f"{start}, and all others almost as much (least: rank {slowest['rank']} on host {host}, "
            f"{percent(least)}): nobody is slow."
        )
    return f"{start}; slowest is rank {slowest['rank']} on host {host}, which waits {percent(least)}."


def _straggler(document: Document) -> str:
    ranks = document["ranks"]
    computing = np.array([rank["useful_s"] for rank in ranks])
    excess = metrics.imbalance(computing)
    if excess is None or excess < 0.1 or len(ranks) < 2:
        return ""
    most = ranks[int(np.argmax(computing))]
    return (
        f"rank {most['rank']} on host {most['host'] or '?'} computes {percent(excess)} longer than the mean."
    )


def _exposed(document: Document) -> str:
    share = document["per_step"]["exposed_share"]
    return (
        "" if share is None else f"Training stood still for communication for {percent(share)} of its time."
    )


def _volume(document: Document) -> str:
    step, unknown = document["per_step"], document["totals"]["uncounted_tensor_calls"]
    sent, dense = step["sent_bytes"], step["dense_bytes"]
    if sent is None or not dense:
        return ""
    if unknown and not sent:
        return f"Plain averaging would send {bytes_text(dense)} a step; what was sent only the library knows."
    text = f"A rank sends {bytes_text(sent)} a step{' that are counted' if unknown else ''}; "
    text += f"plain averaging would send {bytes_text(dense)}"
    if not sent:
        return f"{text}."
    factor = step["dense_sent"]
    same = factor is not None and 0.95 <= factor <= 1.05
    return f"{text} ({'the same' if same else times(factor).removesuffix('x') + ' times as much'})."


def _unknown(document: Document) -> str:
    totals = document["totals"]
    if not totals["uncounted_calls"]:
        return ""
    return (
        f"Of {plural(int(totals['calls']), 'call')}, {count(totals['uncounted_calls'])} have bytes that only the "
        "library knows: they are in no sum of bytes."
    )


#: In the order they stand in the report.
FINDINGS: tuple[Callable[[Document], str], ...] = (
    _alone, _together, _waiting, _straggler, _exposed, _volume, _unknown,
)  # fmt: skip


def method_text(recording: Document) -> str:
    """Return a method with its settings as one writes them: SAEF(compressor=TopK(density=0.01))."""
    method: str = recording["method"]
    try:
        return _constructor(json.loads(recording["settings"]), "method") or method
    except (ValueError, TypeError, RecursionError):
        return method


def _constructor(settings: Any, name: str) -> str:
    if not isinstance(settings, dict) or not isinstance(settings.get(name), str):
        return ""
    arguments = [
        f"{key}={_constructor(value, 'compressor') or value if isinstance(value, dict) else value}"
        for key, value in settings.items()
        if key != name and value is not None
    ]
    return f"{settings[name]}({', '.join(arguments)})"


def ranks_text(totals: Document) -> str:
    """Return how many ranks there were, and on how many nodes where that is known."""
    return f"{totals['ranks']}" + (f" on {plural(totals['nodes'], 'node')}" if totals["nodes"] else "")


def library_text(recording: Document) -> str:
    """Return a recording's library without the particulars of its build."""
    name: str = recording["library"]
    return name.split(",")[0]


def command_text(recording: Document) -> str:
    """Return a command line with its program as one types it: hpctk for /somewhere/hpctk/__main__.py."""
    command: str = recording["command"]
    program, space, rest = command.partition(" ")
    path = PurePath(program)
    return (path.parent.name if path.name == "__main__.py" else path.name) + space + rest


def state_text(recording: Document) -> str:
    """Return whether a recording's files are all there and closed."""
    if recording["files"] < recording["size"]:
        return f"{recording['files']} of {recording['size']} files"
    return "not closed" if recording["not_closed_files"] else "closed"


def began_text(recording: Document) -> str:
    """Return when a recording began."""
    began = recording["began"]
    return "?" if began is None else f"{began[:10]} {began[11:19]} UTC"


def extremes(ranks: list[Document], most: int) -> tuple[list[Document], int]:
    """Return at most `most` ranks in their order, the first, the last and the extreme ones, and how many are left."""
    if len(ranks) <= most:
        return ranks, 0
    chosen = {0, len(ranks) - 1}
    orders = [sorted(range(len(ranks)), key=lambda i: ranks[i][key] or 0.0) for key in EXTREME_IN]
    for depth in range(most):
        for order in orders:
            for index in (order[-1 - depth], order[depth]):
                if len(chosen) < most:
                    chosen.add(index)
    return [ranks[i] for i in sorted(chosen)], len(ranks) - len(chosen)
