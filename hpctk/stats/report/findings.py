"""What a report says in words, from its document: findings, what is missing, how a run is described. Pure."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any

from hpctk.stats import metrics
from hpctk.stats.report.numbers import bytes_text, count, percent, plural, rank_list, seconds_text, times

Document = dict[str, Any]
#: Where the one who waits least waits more than this share of what the one who waits most does, nobody is slow.
EVEN = 0.75
#: A file that ends so much before the last one is worth a word: files are not written at the same moment.
LAG_S = 1.0
#: What ranks must be extreme in to be shown instead of all, the most important first.
EXTREME_IN = ("waiting_share", "computing_s", "communication_s", "sent_bytes", "exposed_s", "received_bytes")


def missing(document: Document) -> list[str]:
    """Return what is not there, and why."""
    # What is the same after every start is said once.
    starts: dict[str, list[int]] = {}
    for recording in document["recordings"]:
        for text in _missing_files(recording):
            starts.setdefault(text, []).append(recording["number"])
    texts = []
    for text, numbers in starts.items():
        prefix = f"start{'s' if len(numbers) > 1 else ''} {rank_list(numbers)}: "
        texts.append(prefix + text if len(document["recordings"]) > 1 else text)
    totals, counted = document["totals"], document["counts"]["ranks"]
    ranks, not_closed = document["ranks"], [rank for rank in document["ranks"] if not rank["closed"]]
    if not_closed and len(ranks) > 1:
        first = min(not_closed, key=lambda rank: rank["flushed_s"])
        lag_s = max(rank["flushed_s"] for rank in ranks) - first["flushed_s"]
        if lag_s >= LAG_S:
            texts.append(f"rank {first['rank']}'s file ends {seconds_text(lag_s)} before the last one does")
    if totals["events_dropped"]:
        calls = f"{count(totals['events_dropped'])} calls"
        texts.append(f"{calls} have no row of their own; their sums are complete")
    if totals["steps_dropped"]:
        steps = f"{count(totals['steps_dropped'])} steps"
        texts.append(f"{steps} have no row of their own: counts and curves lack them")
    if counted < totals["files"]:
        texts.append(f"curves and counts are those of {counted} of {totals['files']} ranks")
    return [*texts, *document["problems"]]


def _missing_files(recording: Document) -> list[str]:
    texts = []
    for reason in recording["missing"]:
        are = "rank {} is" if reason["count"] == 1 else "ranks {} are"
        texts.append(f"{are.format(reason['ranks'])} missing: {reason['why']}")
    n, ranks = recording["not_closed_files"], recording["not_closed"]
    if n:
        files = f"rank {ranks} did not close its file" if n == 1 else f"ranks {ranks} did not close their files"
        texts.append(f"{files}: still running, or killed; what was written until then is counted")
    return texts


def findings(document: Document) -> list[str]:
    """Return the sentences that there is something to say for."""
    totals, share, texts = document["totals"], document["per_step"]["exposed_share"], []
    if totals["ranks"] == 1:
        texts.append("One rank alone: there is nobody to wait for.")
    if document["together"]:
        texts.append(
            "Some of these recordings were made at the same time, by several optimizers: bytes and calls are sums "
            "over all, and nothing is said of efficiency. The folder of a recording shows it alone."
        )
    texts.append(_lost(document["losses"]))
    texts += [_waiting(document["ranks"]), _straggler(document["ranks"])]
    if share is not None:
        texts.append(f"Training stood still for communication for {percent(share)} of its time.")
    texts.append(_volume(document["per_step"], totals["uncounted_tensor_calls"]))
    if totals["uncounted_calls"]:
        calls, unknown = plural(int(totals["calls"]), "call"), count(totals["uncounted_calls"])
        texts.append(f"Of {calls}, {unknown} have bytes that only the library knows: they are in no sum of bytes.")
    return [text for text in texts if text]


def _lost(losses: Document) -> str:
    """Return what came of lost ranks."""
    n = int(losses["lost_ranks"])
    if not n:
        return ""
    text = f"{plural(n, 'rank')} {'was' if n == 1 else 'were'} lost on the way, and the others went on"
    lost, restored = int(losses["lost_residuals"]), int(losses["restored_residuals"])
    if lost or restored:
        text += f"; residuals: {restored} restored from copies, {lost} lost"
    return f"{text}."


def _waiting(ranks: list[Document]) -> str:
    waiting_s, communication_s = ([rank[key] for rank in ranks] for key in ("waiting_s", "communication_s"))
    waiting = metrics.waiting(waiting_s, communication_s)
    if waiting is None:
        return ""
    most, slowest = ranks[waiting.most], ranks[waiting.slowest]
    least, who = slowest["waiting_share"] or 0.0, f"rank {slowest['rank']} on host {slowest['host'] or '?'}"
    start = f"rank {most['rank']} waits {percent(waiting.share)} of its communication time"
    if least > EVEN * waiting.share:
        return f"{start}, and all others almost as much (least: {who}, {percent(least)}): nobody is slow."
    return f"{start}; slowest is {who}, which waits {percent(least)}."


def _straggler(ranks: list[Document]) -> str:
    excess = metrics.imbalance([rank["useful_s"] for rank in ranks])
    if excess is None or excess < 0.1 or len(ranks) < 2:
        return ""
    most = max(ranks, key=lambda rank: rank["useful_s"])
    who = f"rank {most['rank']} on host {most['host'] or '?'}"
    return f"{who} computes {percent(excess)} longer than the mean."


def _volume(step: Document, unknown_calls: float) -> str:
    sent, dense, factor = step["sent_bytes"], step["dense_bytes"], step["dense_sent"]
    if sent is None or not dense:
        return ""
    if unknown_calls and not sent:
        return f"Plain averaging would send {bytes_text(dense)} a step; what was sent only the library knows."
    text = f"A rank sends {bytes_text(sent)} a step{' that are counted' if unknown_calls else ''}; "
    text += f"plain averaging would send {bytes_text(dense)}"
    if not sent:
        return f"{text}."
    same = factor is not None and 0.95 <= factor <= 1.05
    return f"{text} ({'the same' if same else times(factor).removesuffix('x') + ' times as much'})."


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
