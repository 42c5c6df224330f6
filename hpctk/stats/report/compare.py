"""Several runs side by side, from their documents. A new line is one entry in ROWS. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from hpctk.stats import metrics
from hpctk.stats.report.described import called
from hpctk.stats.report.layout import WIDTH, sentences, table
from hpctk.stats.report.numbers import bytes_text, count, digits, percent, seconds_text, shortened, times

Document = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A line of the comparison: its key in JSON, its name, and how it is shown."""

    key: str
    name: str
    show: Callable[[float | None], str]


ROWS = (
    Row("ranks", "ranks", count),
    Row("steps", "steps", count),
    Row("step_s", "seconds per step", seconds_text),
    Row("exposed_share", "exposed communication", percent),
    Row("waiting_share", "waiting, of communication", percent),
    Row("sent_bytes_per_step", "sent per step", bytes_text),
    Row("dense_sent", "averaging / sent", times),
    Row("dense_payload", "dense / payload", times),
    Row("dense_wire", "dense / wire", times),
    Row("load_balance", "load balance", percent),
    Row("parallel_efficiency", "parallel efficiency", percent),
    Row("loss_at_steps", "loss at equal steps", digits),
    Row("loss_at_bytes", "loss at equal bytes", digits),
    Row("loss_at_seconds", "loss at equal seconds", digits),
    Row("last_loss", "last loss", digits),
    Row("uncounted_calls", "calls with unknown bytes", count),
)


def comparison(documents: Sequence[Document]) -> Document:
    """Return the runs' figures, and where their losses are compared: at what the shortest run reached."""
    limits = {key: _least(documents, key) for key in ("step", "sent_bytes", "seconds")}
    names = _names([one["run"] for one in documents])
    runs = [_entry(name, one, limits) for name, one in zip(names, documents, strict=True)]
    return {
        "report": "hpctk-comparison", "version": 1,
        "equal": {"steps": limits["step"], "sent_bytes": limits["sent_bytes"], "seconds": limits["seconds"]},
        "runs": runs,
    }  # fmt: skip


def _entry(name: str, document: Document, limits: dict[str, float | None]) -> Document:
    totals, step, curve = document["totals"], document["per_step"], document["curve"]
    last = document["recordings"][-1]

    def loss_at(key: str) -> float | None:
        place = limits[key]
        return None if place is None else metrics.at(*_course(curve, key), place)

    known = [loss for loss in curve["loss"] if loss is not None]
    return {
        "name": name, "run": document["run"], "method": called(last["settings"], last["method"]),
        "ranks": totals["ranks"], "steps": totals["steps"], "step_s": step["seconds"],
        "exposed_share": step["exposed_share"],
        "waiting_share": metrics.ratio(totals["waiting_s"], totals["communication_s"]),
        "sent_bytes_per_step": step["sent_bytes"], "dense_sent": step["dense_sent"],
        **document["compression"],
        "load_balance": document["efficiency"]["load_balance"],
        "parallel_efficiency": document["efficiency"]["parallel"],
        "loss_at_steps": loss_at("step"), "loss_at_bytes": loss_at("sent_bytes"),
        "loss_at_seconds": loss_at("seconds"), "last_loss": known[-1] if known else None,
        "uncounted_calls": totals["uncounted_calls"], "missing": document["missing"],
    }  # fmt: skip


def _course(curve: Document, key: str) -> tuple[list[float], list[float]]:
    """Return where along `key` which loss was; after a restart steps may go back, so only those that go on."""
    xs: list[float] = []
    ys: list[float] = []
    for x, y in zip(curve[key], curve["loss"], strict=True):
        if x is not None and y is not None and (not xs or x > xs[-1]):
            xs.append(x)
            ys.append(y)
    return xs, ys


def _least(documents: Sequence[Document], key: str) -> float | None:
    """Return how far the run that got least far along `key` got; runs that never moved do not count."""
    ends = [max((x for x in one["curve"][key] if x is not None), default=0.0) for one in documents]
    moved = [end for end in ends if end > 0]
    return float(min(moved)) if moved else None


def _names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that tell them apart; a folder `stats` is left out."""
    parts = [[p for p in PurePath(path).parts if p != "stats"] or [path] for path in paths]
    for length in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i + 1})" for i, path in enumerate(paths)]


def text(found: Document) -> str:
    """Return the comparison for a terminal; runs that do not fit beside each other follow below."""
    runs = found["runs"]
    width = max(9, min(24, max(len(one["name"]) for one in runs)))
    at_once = max(1, (WIDTH - 25) // (width + 2))
    parts = []
    for first in range(0, len(runs), at_once):
        some = runs[first : first + at_once]
        rows = [[row.name, *(row.show(one[row.key]) for one in some)] for row in ROWS]
        parts.append(table(["", *(shortened(one["name"], width) for one in some)], rows))
    parts.append(sentences([f"{one['name']}: {one['method']}" for one in runs]))
    parts.append(sentences([equal(found)]))
    missing = [f"{one['name']}: {what}" for one in runs for what in one["missing"]]
    if missing:
        parts.append("MISSING\n" + sentences(missing, "- "))
    return "\n\n".join(parts) + "\n"


def equal(found: Document) -> str:
    """Say where losses were compared."""
    at = found["equal"]
    return (
        f"Losses are compared at step {count(at['steps'])}, {bytes_text(at['sent_bytes'])} sent by a rank and "
        f"{seconds_text(at['seconds'])}: as far as the run that got least far."
    )
