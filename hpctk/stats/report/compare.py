"""Several runs side by side, from their documents, as JSON, text and page. A new line is one entry in ROWS. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from hpctk.stats import metrics
from hpctk.stats.report import numbers
from hpctk.stats.report.figures import COLOURS, run_bars
from hpctk.stats.report.findings import method_text
from hpctk.stats.report.page import Column, figure, framed, warnings
from hpctk.stats.report.page import table as page_table
from hpctk.stats.report.svg import Line, chart, escaped, smoothed
from hpctk.stats.report.text import WIDTH, sentences, table

Document = dict[str, Any]

#: A line of the comparison: its name, its key in JSON, and how it is shown.
ROWS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("ranks", "ranks", numbers.count),
    ("steps", "steps", numbers.count),
    ("seconds per step", "step_s", numbers.seconds_text),
    ("exposed communication", "exposed_share", numbers.percent),
    ("hidden, of communication", "hidden_share", numbers.percent),
    ("waiting, of communication", "waiting_share", numbers.percent),
    ("sent per step", "sent_bytes_per_step", numbers.bytes_text),
    ("averaging / sent", "dense_sent", numbers.times),
    ("dense / payload", "dense_payload", numbers.times),
    ("dense / wire", "dense_wire", numbers.times),
    ("load balance", "load_balance", numbers.percent),
    ("parallel efficiency", "parallel_efficiency", numbers.percent),
    ("loss at equal steps", "loss_at_steps", numbers.digits),
    ("loss at equal bytes", "loss_at_bytes", numbers.digits),
    ("loss at equal seconds", "loss_at_seconds", numbers.digits),
    ("last loss", "last_loss", numbers.digits),
    ("calls with unknown bytes", "uncounted_calls", numbers.count),
)


def comparison(documents: Sequence[Document]) -> Document:
    """Return the runs' figures, and where their losses are compared: at what the shortest run reached."""
    limits = {key: _least(documents, key) for key in ("step", "sent_bytes", "seconds")}
    names = _names([document["run"] for document in documents])
    return {
        "report": "hpctk-comparison", "version": 1,
        "equal": {"steps": limits["step"], "sent_bytes": limits["sent_bytes"], "seconds": limits["seconds"]},
        "runs": [_entry(name, document, limits) for name, document in zip(names, documents, strict=True)],
    }  # fmt: skip


def _entry(name: str, document: Document, limits: dict[str, float | None]) -> Document:
    totals, step, curve = document["totals"], document["per_step"], document["curve"]
    losses = [loss for loss in curve["loss"] if loss is not None]
    return {
        "name": name, "run": document["run"], "method": method_text(document["recordings"][-1]),
        "ranks": totals["ranks"], "steps": totals["steps"], "step_s": step["seconds"],
        "exposed_share": step["exposed_share"], "hidden_share": step["hidden_share"],
        "waiting_share": metrics.ratio(totals["waiting_s"], totals["communication_s"]),
        "sent_bytes_per_step": step["sent_bytes"], "dense_sent": step["dense_sent"],
        **document["compression"],
        "load_balance": document["efficiency"]["load_balance"],
        "parallel_efficiency": document["efficiency"]["parallel"],
        "loss_at_steps": _loss_at(curve, "step", limits), "loss_at_bytes": _loss_at(curve, "sent_bytes", limits),
        "loss_at_seconds": _loss_at(curve, "seconds", limits), "last_loss": losses[-1] if losses else None,
        "uncounted_calls": totals["uncounted_calls"], "missing": document["missing"],
    }  # fmt: skip


def _loss_at(curve: Document, key: str, limits: dict[str, float | None]) -> float | None:
    """Return the loss at the limit of `key`; after a restart steps may go back, so only points that go on count."""
    xs: list[float] = []
    ys: list[float] = []
    for x, y in zip(curve[key], curve["loss"], strict=True):
        if x is not None and y is not None and (not xs or x > xs[-1]):
            xs.append(x)
            ys.append(y)
    limit = limits[key]
    return None if limit is None else metrics.at(xs, ys, limit)


def _least(documents: Sequence[Document], key: str) -> float | None:
    """Return how far the run that got least far along `key` got; runs that never moved do not count."""
    ends = [max((x for x in one["curve"][key] if x is not None), default=0.0) for one in documents]
    return min((float(end) for end in ends if end > 0), default=None)


def _names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that tell them apart; a folder `stats` is left out."""
    parts = [[p for p in PurePath(path).parts if p != "stats"] or [path] for path in paths]
    for length in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i + 1})" for i, path in enumerate(paths)]


def _missing(compared: Document) -> list[str]:
    return [f"{run['name']}: {what}" for run in compared["runs"] for what in run["missing"]]


def _equal(compared: Document) -> str:
    """Return where losses were compared."""
    at = compared["equal"]
    step, seconds = numbers.count(at["steps"]), numbers.seconds_text(at["seconds"])
    limits = f"step {step}, {numbers.bytes_text(at['sent_bytes'])} sent by a rank and {seconds}"
    return f"Losses are compared at {limits}: as far as the run that got least far."


def text(compared: Document) -> str:
    """Return the comparison for a terminal; runs that do not fit beside each other follow below."""
    runs = compared["runs"]
    width = max(9, min(24, max(len(run["name"]) for run in runs)))
    at_once = max(1, (WIDTH - 25) // (width + 2))
    parts = []
    for first in range(0, len(runs), at_once):
        some = runs[first : first + at_once]
        rows = [[name, *(show(run[key]) for run in some)] for name, key, show in ROWS]
        parts.append(table(["", *(numbers.shortened(run["name"], width) for run in some)], rows))
    parts.append(sentences([f"{run['name']}: {run['method']}" for run in runs]))
    parts.append(sentences([_equal(compared)]))
    if missing := _missing(compared):
        parts.append("MISSING\n" + sentences(missing, "- "))
    return "\n\n".join(parts) + "\n"


def page(compared: Document, documents: Sequence[Document]) -> str:
    """Return the page from a comparison and the documents it was made of."""
    runs = compared["runs"]
    kinds = [f"run{i % COLOURS}" for i in range(len(runs))]
    legend = [(kind, run["name"]) for kind, run in zip(kinds, runs, strict=True)]

    def loss(title: str, against: str, name: str, show: Callable[[float], str]) -> str:
        lines = []
        for (kind, run_name), document in zip(legend, documents, strict=True):
            curve = document["curve"]
            if max((x for x in curve[against] if x is not None), default=0) > 0:
                lines.append(Line(run_name, kind, curve[against], smoothed(curve["loss"])))
        drawing = chart(lines, f"loss against {name}", name, show, log_x=True)
        return figure(title, drawing, "No loss was given.", legend=legend)

    def amount(title: str, key: str, show: Callable[[float | None], str]) -> str:
        return figure(title, run_bars(runs, key, show), "Nothing was counted.")

    amounts = [
        amount("Sent per step and rank", "sent_bytes_per_step", numbers.bytes_text),
        amount("Seconds per step", "step_s", numbers.seconds_text),
        amount("Exposed communication, of the time", "exposed_share", numbers.percent),
        amount("Waiting, of communication", "waiting_share", numbers.percent),
    ]
    losses = [
        loss("Loss against bytes", "sent_bytes", "bytes sent by a rank", numbers.bytes_text),
        loss("Loss against seconds", "seconds", "seconds", numbers.seconds_text),
        loss("Loss against steps", "step", "step", numbers.count),
    ]
    columns = [Column("run", "name"), Column("method", "method"), *(Column(*row) for row in ROWS)]
    body = (
        f"<h1>{escaped(numbers.plural(len(runs), 'run'))} side by side</h1>\n{warnings(_missing(compared))}\n"
        f'<div class="said"><p>{escaped(_equal(compared))}</p></div>\n'
        f"<section>{page_table('runs', columns, runs)}</section>\n"
        f'<section><div class="figures">{"".join(amounts)}</div>'
        f'<div class="figures three">{"".join(losses)}</div></section>'
    )
    return framed("hpctk: " + ", ".join(run["name"] for run in runs), body)
