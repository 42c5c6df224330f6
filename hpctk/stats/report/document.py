"""Everything that a report shows, as plain values: what --json prints. docs/report.md explains the keys.

Bytes, seconds and counts; shares between 0 and 1. What cannot be known is None. Pure but for `Account`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from hpctk.stats import metrics
from hpctk.stats.report.account import COUNTS, LABELS, LOSSES, MEANS, SUMS, Account, Course
from hpctk.stats.report.findings import findings, missing
from hpctk.stats.report.numbers import printable

#: Points of a run's curve.
POINTS = 300
#: Raised when the meaning of a key changes.
VERSION = 1
#: Keys that end like this are of things that are counted.
_COUNTED = (
    "bytes", "calls", "messages", "steps", "dropped", *COUNTS,
    *(name for name in LOSSES if not name.endswith("norm")),
)  # fmt: skip
#: What a rank's calls were busy with; the rest of their time is `other_s`.
INSIDE = ("waiting_s", "combining_s")
#: What was done for calls before they began and after they were over.
BESIDE = ("compressing_s", "decompressing_s", "staging_s")


def document(account: Account) -> dict[str, Any]:
    """Return what the report shows of a run."""
    useful = metrics.useful(account.amounts["steps_s"], account.amounts["exposed_s"])
    # A recording that began before the one before it was over: those are not restarts of one training.
    together = any(began < start + wall_s for (start, wall_s), (began, _) in pairwise(account.spans))
    runtime_s = math.nan if together else sum(one["steps_s"] for one in account.recordings)
    sums = {name: float(values.sum()) for name, values in account.amounts.items()}
    shown: dict[str, Any] = {
        "report": "hpctk-report",
        "version": VERSION,
        "run": printable(account.path, 1000),
        "recordings": account.recordings,
        "together": together,
        "totals": _totals(account, sums),
        "ranks": _ranks(account, useful),
        "calls": _calls(account),
        "message_sizes": [
            {"lower_bytes": 2**i, **{name: float(values[i]) for name, values in account.sizes.items()}}
            for i in range(len(account.sizes["messages"]))
        ],
        "efficiency": {"runtime_s": runtime_s, **metrics.efficiency(useful, runtime_s)._asdict()},
        "imbalance": _imbalances(account, useful),
        "compression": {
            "dense_payload": metrics.ratio(sums["tensor_dense_bytes"], sums["tensor_payload_bytes"]),
            "dense_wire": metrics.ratio(sums["counted_dense_sent_bytes"], sums["sent_bytes"]),
        },
        "per_step": _per_step(account, together=together),
        "counts": {**account.counts, "ranks": len(account.curve_ranks)},
        "losses": dict(account.losses),
        "curve": _curve(account.courses),
        "problems": list(account.problems),
    }
    shown["missing"] = missing(shown)
    shown["findings"] = findings(shown)
    plain: dict[str, Any] = _finite(shown)
    return plain


def _finite(value: Any, key: str = "") -> Any:
    """Return a document in which numbers that JSON does not know are None, and what is counted is an integer."""
    if isinstance(value, float | np.floating):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() and key.endswith(_COUNTED) else float(value)
    if isinstance(value, dict):
        return {name: _finite(one, name) for name, one in value.items()}
    return [_finite(one, key) for one in value] if isinstance(value, list | tuple) else value


def _totals(account: Account, sums: dict[str, float]) -> dict[str, Any]:
    """Return sums over ranks; steps and seconds are those of the rank that had most in each recording."""
    names = (
        "communication_s", "exposed_s", "waiting_s", "calls", "uncounted_calls", "uncounted_tensor_calls",
        "messages", "sent_bytes", "received_bytes", "events_dropped", "steps_dropped",
    )  # fmt: skip
    return {
        "ranks": max((one["size"] for one in account.recordings), default=0), "files": len(account.ranks),
        "nodes": max((one["nodes"] for one in account.recordings), default=0), "hosts": len(set(account.hosts)),
        "steps": sum(one["steps"] for one in account.recordings),
        "wall_s": sum(one["wall_s"] for one in account.recordings),
        **{name: sums[name] for name in names},
    }  # fmt: skip


def _ranks(account: Account, useful: Any) -> list[dict[str, Any]]:
    names = (
        "steps", "steps_s", "communication_s", "exposed_s", *INSIDE, *BESIDE, "sent_bytes", "received_bytes",
        "messages",
    )  # fmt: skip
    rows = []
    for i, rank in enumerate(account.ranks):
        of = {name: float(values[i]) for name, values in account.amounts.items()}
        other = of["communication_s"] - sum(of[name] for name in INSIDE)
        computing = float(useful[i]) - sum(of[name] for name in BESIDE)
        rows.append({
            "rank": rank, "host": account.hosts[i], "node": account.nodes[i], "closed": account.closed[i],
            **{name: of[name] for name in names}, "other_s": max(0.0, other), "useful_s": float(useful[i]),
            "computing_s": max(0.0, computing), "flushed_s": of["flushed_s"],
            "waiting_share": metrics.ratio(of["waiting_s"], of["communication_s"]),
            "exposed_share": metrics.ratio(of["exposed_s"], of["steps_s"]),
            "uncounted_calls": of["uncounted_calls"],
            "dense_wire": metrics.ratio(of["counted_dense_sent_bytes"], of["sent_bytes"]),
        })  # fmt: skip
    return rows


def _calls(account: Account) -> list[dict[str, Any]]:
    """Return the kinds of calls, the one that took most seconds first."""
    calls, rows = account.calls, []
    for kind in np.argsort(-calls.sums[:, SUMS.index("seconds")], kind="stable").tolist():
        of = {name: float(calls.sums[kind, i]) for i, name in enumerate(SUMS)}
        labels = {name: printable(text) for name, text in zip(LABELS, calls.labels[kind], strict=True)}
        bus, dense = float(calls.bus_bytes[kind]), of["dense_bytes"]
        rows.append({
            **labels, **of, "longest_s": float(calls.longest_s[kind]),
            "bus_bytes_per_s": metrics.ratio(bus, of["seconds"]) if bus else None,
            "dense_payload": metrics.ratio(dense, of["payload_bytes"]) if dense else None,
        })  # fmt: skip
    return rows


def _imbalances(account: Account, useful: Any) -> list[dict[str, Any]]:
    amounts = {
        "computing": useful, "communication": account.amounts["communication_s"],
        "waiting": account.amounts["waiting_s"], "bytes sent": account.amounts["sent_bytes"],
    }  # fmt: skip
    rows = []
    for name, values in amounts.items():
        excess = metrics.imbalance(values)
        if excess is not None:
            most = int(np.argmax(values))
            rows.append({
                "of": name, "excess": excess, "mean": float(np.mean(values)), "most": float(values[most]),
                "rank": account.ranks[most], "host": account.hosts[most],
            })  # fmt: skip
    return rows


def _per_step(account: Account, *, together: bool) -> dict[str, Any]:
    """Return the means over all steps of all ranks; of seconds only where steps followed one another."""
    courses = [course.sums() for course in account.courses]
    sums = {name: sum(course[name] for course in courses) for name in (*MEANS, "rows")}
    means = {name: metrics.ratio(sums[name], sums["rows"]) for name in MEANS}
    return {
        **means,
        "exposed_share": None if together else metrics.ratio(sums["exposed_s"], sums["seconds"]),
        "hidden_share": metrics.hidden(sums["communication_s"], sums["exposed_s"]),
        "dense_sent": metrics.ratio(sums["dense_bytes"], sums["sent_bytes"]),
    }


def _curve(courses: list[Course]) -> dict[str, list[Any]]:
    """Return a run's course, from those of its recordings one after the other, in at most POINTS points.

    `seconds`, `sent_bytes` and `dense_bytes` are sums since its first step, `step_...` means over a point's steps.
    """
    keys = ("seconds", "sent_bytes", "dense_bytes")
    total = sum(len(course.step) for course in courses)
    bins = metrics.bins(total, POINTS)
    # The last step of every point.
    last = np.flatnonzero(np.diff(bins, append=POINTS))
    columns = {key: np.concatenate([np.zeros(0), *(course.mean(key) for course in courses)]) for key in keys}
    columns["loss"] = np.concatenate([np.zeros(0), *(course.loss for course in courses)])
    means = {key: metrics.bin_means(values, bins).tolist() for key, values in columns.items()}
    steps = np.concatenate([np.zeros(0, np.int64), *(course.step for course in courses)])
    return {
        "step": steps[last].tolist(),
        **{key: np.cumsum(columns[key])[last].tolist() for key in keys},
        "step_s": means["seconds"],
        "step_sent_bytes": means["sent_bytes"],
        "step_dense_bytes": means["dense_bytes"],
        "loss": means["loss"],
    }
