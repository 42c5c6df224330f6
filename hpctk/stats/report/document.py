"""Everything that a report shows, as plain values: what --json prints. docs/report.md explains the keys.

Bytes, seconds and counts; shares between 0 and 1. What cannot be known is None. Pure but for `Account`.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np

from hpctk.stats import metrics
from hpctk.stats.report import curve
from hpctk.stats.report.account import Account, RecordingAccount
from hpctk.stats.report.calls import LABELS, SUMS
from hpctk.stats.report.findings import findings, missing
from hpctk.stats.report.numbers import printable, rank_list

#: Raised when the meaning of a key changes.
VERSION = 1
#: Keys that end like this are of things that are counted.
_COUNTED = ("bytes", "calls", "messages", "steps", "dropped", *curve.COUNTS)
#: What a rank's calls were busy with; the rest of their time is `other_s`.
INSIDE = ("waiting_s", "combining_s")
#: What was done for calls before they began and after they were over.
BESIDE = ("compressing_s", "decompressing_s", "staging_s")


def document(found: Account) -> dict[str, Any]:
    """Return what the report shows of a run."""
    useful = metrics.useful(found.amounts["steps_s"], found.amounts["exposed_s"])
    together = at_once(found.recordings)
    runtime_s = math.nan if together else sum(one.steps_s for one in found.recordings)
    pop = metrics.efficiency(useful, runtime_s)
    shown: dict[str, Any] = {
        "report": "hpctk-report",
        "version": VERSION,
        "run": printable(found.path, 1000),
        "recordings": [_recording(one) for one in found.recordings],
        "together": together,
        "totals": _totals(found),
        "ranks": _ranks(found, useful),
        "calls": _calls(found),
        "message_sizes": [
            {"lower_bytes": 2**i, **{name: float(values[i]) for name, values in found.sizes.items()}}
            for i in range(len(found.sizes["messages"]))
        ],
        "efficiency": {
            "runtime_s": runtime_s, "load_balance": pop.load_balance, "communication": pop.communication,
            "parallel": pop.parallel,
        },
        "imbalance": _imbalances(found, useful),
        "compression": _compression(found),
        "per_step": _per_step(found, together=together),
        "counts": {**found.counts, "ranks": len(found.curve_ranks)},
        "curve": asdict(curve.curve(found.courses)),
        "problems": list(found.problems),
    }  # fmt: skip
    shown["missing"] = missing(shown)
    shown["findings"] = findings(shown)
    plain: dict[str, Any] = finite(shown)
    return plain


def finite(value: Any, key: str = "") -> Any:
    """Return a document in which numbers that JSON does not know are None, and what is counted is whole."""
    if isinstance(value, float | np.floating):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and key.endswith(_COUNTED) else float(value)
    if isinstance(value, dict):
        return {name: finite(one, name) for name, one in value.items()}
    return [finite(one, key) for one in value] if isinstance(value, list | tuple) else value


def _recording(one: RecordingAccount) -> dict[str, Any]:
    reasons = Counter(one.why.values())
    began = None
    if one.began_unix_s is not None:
        began = datetime.datetime.fromtimestamp(one.began_unix_s, datetime.UTC).isoformat(timespec="seconds")
    return {
        "number": one.number, "size": one.size, "files": len(one.present), "not_closed": rank_list(one.open, 100),
        "not_closed_files": len(one.open),
        "missing": [
            {"why": why, "ranks": rank_list((rank for rank, text in one.why.items() if text == why), 100), "count": n}
            for why, n in reasons.most_common(20)
        ],
        "nodes": one.nodes, **one.told, "began": began,
        "steps": one.steps, "steps_s": one.steps_s, "wall_s": one.wall_s,
    }  # fmt: skip


def _totals(found: Account) -> dict[str, Any]:
    """Return sums over ranks; steps and seconds are those of the rank that had most in each recording."""
    return {
        "ranks": found.size, "files": len(found.ranks),
        "nodes": max((one.nodes for one in found.recordings), default=0), "hosts": len(set(found.hosts)),
        "steps": sum(one.steps for one in found.recordings),
        "wall_s": sum(one.wall_s for one in found.recordings),
        **{
            name: float(found.amounts[name].sum())
            for name in (
                "communication_s", "exposed_s", "waiting_s", "calls", "uncounted_calls", "uncounted_tensor_calls",
                "messages", "sent_bytes", "received_bytes", "events_dropped", "steps_dropped",
            )
        },
    }  # fmt: skip


def _ranks(found: Account, useful: Any) -> list[dict[str, Any]]:
    names = (
        "steps",
        "steps_s",
        "communication_s",
        "exposed_s",
        *INSIDE,
        *BESIDE,
        "sent_bytes",
        "received_bytes",
        "messages",
    )
    rows = []
    for place, rank in enumerate(found.ranks):
        of = {name: float(values[place]) for name, values in found.amounts.items()}
        other = of["communication_s"] - sum(of[name] for name in INSIDE)
        computing = float(useful[place]) - sum(of[name] for name in BESIDE)
        rows.append(
            {
                "rank": rank, "host": found.hosts[place], "node": found.nodes[place],
                "closed": not found.open[place], **{name: of[name] for name in names}, "other_s": max(0.0, other),
                "useful_s": float(useful[place]), "computing_s": max(0.0, computing), "flushed_s": of["flushed_s"],
                "waiting_share": metrics.ratio(of["waiting_s"], of["communication_s"]),
                "exposed_share": metrics.ratio(of["exposed_s"], of["steps_s"]),
                "uncounted_calls": of["uncounted_calls"],
                "dense_wire": metrics.ratio(of["counted_dense_sent_bytes"], of["sent_bytes"]),
            }
        )  # fmt: skip
    return rows


def _calls(found: Account) -> list[dict[str, Any]]:
    """Return the kinds of calls, the one that took most seconds first."""
    calls, rows = found.calls, []
    for place in np.argsort(-calls.column("seconds"), kind="stable").tolist():
        of = {name: float(calls.sums[place, i]) for i, name in enumerate(SUMS)}
        labels = {name: printable(text) for name, text in zip(LABELS, calls.labels[place], strict=True)}
        bus = float(calls.bus_bytes[place])
        rows.append(
            {
                **labels, **of, "longest_s": float(calls.longest_s[place]),
                "bus_bytes_per_s": metrics.ratio(bus, of["seconds"]) if bus else None,
                "dense_payload": metrics.ratio(of["dense_bytes"], of["payload_bytes"]) if of["dense_bytes"] else None,
            }
        )  # fmt: skip
    return rows


def _imbalances(found: Account, useful: Any) -> list[dict[str, Any]]:
    amounts = {
        "computing": useful, "communication": found.amounts["communication_s"],
        "waiting": found.amounts["waiting_s"], "bytes sent": found.amounts["sent_bytes"],
    }  # fmt: skip
    rows = []
    for name, values in amounts.items():
        over = metrics.imbalance(values)
        if over is not None:
            most = int(np.argmax(values))
            rows.append({
                "of": name, "excess": over, "mean": float(np.mean(values)), "most": float(values[most]),
                "rank": found.ranks[most], "host": found.hosts[most],
            })  # fmt: skip
    return rows


def _compression(found: Account) -> dict[str, Any]:
    sums = {name: float(values.sum()) for name, values in found.amounts.items()}
    return {
        "dense_payload": metrics.ratio(sums["tensor_dense_bytes"], sums["tensor_payload_bytes"]),
        "dense_wire": metrics.ratio(sums["counted_dense_sent_bytes"], sums["sent_bytes"]),
    }


def at_once(recordings: list[RecordingAccount]) -> bool:
    """Return whether a recording began before the one before it was over: those are not restarts of one training."""
    known = [one for one in recordings if one.began_unix_s is not None]
    ends = [(one.began_unix_s or 0.0) + one.wall_s for one in known]
    return any((two.began_unix_s or 0.0) < end for end, two in zip(ends, known[1:], strict=False))


def _per_step(found: Account, *, together: bool) -> dict[str, Any]:
    """Return the means over all steps of all ranks; of seconds only where steps followed one another."""
    sums = dict.fromkeys(("seconds", "sent_bytes", "dense_bytes", "exposed_s", "rows"), 0.0)
    for course in found.courses:
        for name, value in course.sums().items():
            sums[name] += value
    means = {name: metrics.ratio(sums[name], sums["rows"]) for name in sums if name != "rows"}
    return {
        **means,
        "exposed_share": None if together else metrics.ratio(sums["exposed_s"], sums["seconds"]),
        "dense_sent": metrics.ratio(sums["dense_bytes"], sums["sent_bytes"]),
    }
