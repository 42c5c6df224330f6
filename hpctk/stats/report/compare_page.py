"""Several runs side by side, as one page for a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpctk.stats.report.compare import ROWS, equal
from hpctk.stats.report.figure_runs import COLOURS, run_bars
from hpctk.stats.report.figures import Figure
from hpctk.stats.report.lines import Line, chart, smoothed
from hpctk.stats.report.numbers import bytes_text, count, percent, plural, seconds_text
from hpctk.stats.report.page import Column, figure, framed, table, warnings
from hpctk.stats.report.svg import escaped


def page(found: dict[str, Any], documents: Sequence[dict[str, Any]]) -> str:
    """Return the page from a comparison and the documents it was made of."""
    runs = found["runs"]
    legend = tuple((f"run{i % COLOURS}", one["name"]) for i, one in enumerate(runs))

    def loss(against: str, name: str, show: Callable[[float], str]) -> str:
        lines = [
            Line(
                one["name"],
                f"run{i % COLOURS}",
                document["curve"][against],
                smoothed(document["curve"]["loss"]),
            )
            for i, (one, document) in enumerate(zip(runs, documents, strict=True))
            if max((x for x in document["curve"][against] if x is not None), default=0) > 0
        ]
        return chart(lines, f"loss against {name}", name, show, log_x=True)

    losses = (
        ("Loss against bytes", loss("sent_bytes", "bytes sent by a rank", bytes_text)),
        ("Loss against seconds", loss("seconds", "seconds", seconds_text)),
        ("Loss against steps", loss("step", "step", count)),
    )
    amounts = (
        ("Sent per step and rank", run_bars(runs, "sent_bytes_per_step", bytes_text)),
        ("Seconds per step", run_bars(runs, "step_s", seconds_text)),
        ("Exposed communication, of the time", run_bars(runs, "exposed_share", percent)),
        ("Waiting, of communication", run_bars(runs, "waiting_share", percent)),
    )
    drawn = [figure(Figure(t, "", "Nothing was counted.", _nothing), svg) for t, svg in amounts]
    courses = [figure(Figure(t, "", "No loss was given.", _nothing, legend=legend), svg) for t, svg in losses]
    columns = [Column("run", lambda row: row["name"]), Column("method", lambda row: row["method"])]
    columns += [Column(row.name, _of(row.key), row.show) for row in ROWS]
    missing = [f"{one['name']}: {what}" for one in runs for what in one["missing"]]
    body = (
        f"<h1>{escaped(plural(len(runs), 'run'))} side by side</h1>\n{warnings(missing)}\n"
        f'<div class="said"><p>{escaped(equal(found))}</p></div>\n'
        f"<section>{table('runs', columns, runs)}</section>\n"
        f'<section><div class="figures">{"".join(drawn)}</div>'
        f'<div class="figures three">{"".join(courses)}</div></section>'
    )
    return framed("hpctk: " + ", ".join(one["name"] for one in runs), body)


def _of(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda row: row[key]


def _nothing(_: Any) -> str:
    return ""
