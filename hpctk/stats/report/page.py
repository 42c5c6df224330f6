"""A report as one page for a browser: no other file, no network. What comes from a file is escaped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctk.stats.report.described import called, library, moment, places, state, typed
from hpctk.stats.report.extremes import extremes
from hpctk.stats.report.figures import FIGURES, Figure, Material
from hpctk.stats.report.numbers import (
    bytes_text,
    count,
    percent,
    plural,
    rate_text,
    seconds_text,
    times,
)  # fmt: skip
from hpctk.stats.report.page_script import SCRIPT
from hpctk.stats.report.page_style import STYLE
from hpctk.stats.report.svg import escaped

#: Rows of tables; of more ranks the extreme ones, of more calls those that took longest.
RANKS, CALLS = 1000, 300


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and from a row to a text or to a number and its text."""

    head: str
    value: Callable[[dict[str, Any]], Any]
    show: Callable[[Any], str] | None = None


def framed(title: str, body: str) -> str:
    """Return a whole page."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Even text that had slipped through could load and send nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def page(material: Material) -> str:
    """Return the page of one run."""
    document = material.document
    drawn = "\n".join(figure(one, one.draw(material)) for one in FIGURES)
    body = "\n".join(
        [
            _header(document),
            warnings(document["missing"]),
            _said(document["findings"]),
            _tiles(document),
            f'<div class="figures">\n{drawn}\n</div>',
            _ranks(document),
            _calls(document),
            _starts(document),
        ]
    )
    return framed(f"hpctk: {document['run']}", body)


def figure(one: Figure, drawing: str) -> str:
    """Return a figure with its title, legend and caption; where there is no drawing, why."""
    inside = (
        f'<div class="scroll">{drawing}</div>'
        if drawing
        else f'<p class="empty-figure">{escaped(one.empty)}</p>'
    )
    legend = "".join(f'<span><i class="{kind}"></i>{escaped(name)}</span>' for kind, name in one.legend)
    shape = f"card {one.shape}" if one.shape and drawing else "card"
    return (
        f'<figure class="{shape}"><h2>{escaped(one.title)}</h2>'
        + (f'<div class="legend">{legend}</div>' if legend and drawing else "")
        + inside
        + (f"<figcaption>{escaped(one.caption)}</figcaption>" if drawing else "")
        + "</figure>"
    )


def warnings(missing: Sequence[str]) -> str:
    """Return what is missing, "" for nothing."""
    return f'<div class="warn">{_paragraphs(missing)}</div>' if missing else ""


def table(name: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """Return a table that can be sorted by any column; `name` is its id."""
    heads = "".join(
        f'<th{"" if one.show else " class=l"} aria-sort="none"><button type="button">{escaped(one.head)}</button></th>'
        for one in columns
    )
    lines = "".join("<tr>" + "".join(_cell(one, row) for one in columns) + "</tr>\n" for row in rows)
    return f'<div class="rows"><table id="{name}"><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _cell(column: Column, row: dict[str, Any]) -> str:
    value = column.value(row)
    if column.show is None:
        return f'<td class="l" title="{escaped(value)}">{escaped(value)}</td>'
    return f'<td data-v="{-1 if value is None else format(value, ".6g")}">{escaped(column.show(value))}</td>'


def _paragraphs(texts: Sequence[str]) -> str:
    # A share is not parted from its sign at the end of a line.
    return "".join(f"<p>{escaped(text).replace(' %', '&nbsp;%')}</p>" for text in texts)


def _said(findings: Sequence[str]) -> str:
    return f'<div class="said">{_paragraphs([text[:1].upper() + text[1:] for text in findings])}</div>'


def _header(document: dict[str, Any]) -> str:
    totals, last = document["totals"], document["recordings"][-1]
    facts = {
        "ranks": places(totals),
        "method": called(last["settings"], last["method"]),
        "library": library(last),
        "command": typed(last["command"]),
        "began": moment(document["recordings"][0]["began"]),
        "recorded": f"{seconds_text(totals['wall_s'])} in {plural(len(document['recordings']), 'start')}; "
        f"the last: {state(last)}",
    }
    shown = "".join(
        f"<dt>{escaped(name)}</dt><dd>{escaped(text or '?')}</dd>" for name, text in facts.items()
    )
    return f"<h1>{escaped(document['run'])}</h1>\n<dl>{shown}</dl>"


def _tiles(document: dict[str, Any]) -> str:
    step, pop, found = document["per_step"], document["efficiency"], document["compression"]
    tiles = [
        ("steps", count(document["totals"]["steps"])),
        ("a step", seconds_text(step["seconds"])),
        ("sent a step and rank", bytes_text(step["sent_bytes"])),
        ("averaging / sent", times(step["dense_sent"])),
        ("dense / payload", times(found["dense_payload"])),
        ("dense / wire", times(found["dense_wire"])),
        ("load balance", percent(pop["load_balance"])),
        ("communication efficiency", percent(pop["communication"])),
        ("parallel efficiency", percent(pop["parallel"])),
        ("exposed communication", percent(step["exposed_share"])),
    ]
    counts = document["counts"]
    tiles += [(name, count(counts[name])) for name in counts if name != "ranks" and counts[name]]
    shown = "".join(
        f'<div class="tile"><b>{escaped(value)}</b><span class="soft">{escaped(name)}</span></div>'
        for name, value in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _of(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda row: row[key]


RANK_COLUMNS = (
    Column("rank", _of("rank"), count),
    Column("host", _of("host")),
    Column("steps", _of("steps"), count),
    Column("time", _of("steps_s"), seconds_text),
    Column("computing", _of("computing_s"), seconds_text),
    Column("communication", _of("communication_s"), seconds_text),
    Column("exposed", _of("exposed_s"), seconds_text),
    Column("waits", _of("waiting_share"), percent),
    Column("sent", _of("sent_bytes"), bytes_text),
    Column("received", _of("received_bytes"), bytes_text),
    Column("messages", _of("messages"), count),
    Column("dense/wire", _of("dense_wire"), times),
    Column("bytes unknown", _of("uncounted_calls"), count),
)
CALL_COLUMNS = (
    Column("operation", _of("operation")),
    Column("schedule", _of("schedule")),
    Column("compressor", _of("compressor")),
    Column("tensor", _of("tensor")),
    Column("communicator", _of("communicator")),
    Column("calls", _of("calls"), count),
    Column("seconds", _of("seconds"), seconds_text),
    Column("longest", _of("longest_s"), seconds_text),
    Column("waiting", _of("waiting_s"), seconds_text),
    Column(
        "sent", lambda row: None if row["uncounted_calls"] >= row["calls"] else row["sent_bytes"], bytes_text
    ),
    Column("messages", _of("messages"), count),
    Column("dense/payload", _of("dense_payload"), times),
    Column("bus bandwidth", _of("bus_bytes_per_s"), rate_text),
    Column("bytes unknown", _of("uncounted_calls"), count),
)
START_COLUMNS = (
    Column("start", _of("number"), count),
    Column("began", lambda row: moment(row["began"])),
    Column("ranks", _of("size"), count),
    Column("files", _of("files"), count),
    Column("steps", _of("steps"), count),
    Column("seconds", _of("wall_s"), seconds_text),
    Column("method", _of("method")),
    Column("state", state),
)


def _ranks(document: dict[str, Any]) -> str:
    shown, left = extremes(document["ranks"], RANKS)
    note = (
        f'<p class="soft">{plural(left, "rank")} between these left out; --json has all.</p>' if left else ""
    )
    return f"<section><h2>Ranks</h2>{table('ranks', RANK_COLUMNS, shown)}{note}</section>"


def _calls(document: dict[str, Any]) -> str:
    left = max(0, len(document["calls"]) - CALLS)
    note = (
        f'<p class="soft">{plural(left, "other kind")} of calls left out; --json has all.</p>' if left else ""
    )
    body = table("calls", CALL_COLUMNS, document["calls"][:CALLS])
    return f"<section><h2>Calls, added up over all ranks</h2>{body}{note}</section>"


def _starts(document: dict[str, Any]) -> str:
    if len(document["recordings"]) < 2:
        return ""
    body = table("starts", START_COLUMNS, document["recordings"][-200:])
    return f"<section><h2>Starts of training</h2>{body}</section>"
