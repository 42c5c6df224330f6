"""A report as one page for a browser: no other file, no network. What comes from a file is escaped.

page.css is its style. page.js sorts tables: a click on a column's head sorts by it, numbers the largest first, another
one reverses it. Cells carry what they are sorted by (data-v), because 9 kB is less than 1 MB; #sort=TABLE,COLUMN in the
address sorts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hpctk.stats.report import findings as words
from hpctk.stats.report.figures import FIGURES, Mark, Material
from hpctk.stats.report.numbers import bytes_text, count, percent, plural, rate_text, seconds_text, times
from hpctk.stats.report.svg import escaped

Document = dict[str, Any]
#: Rows of tables; of more ranks the extreme ones, of more calls those that took longest.
RANKS, CALLS = 1000, 300


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, from a row to a value (or its key), and from a number to its text."""

    head: str
    value: str | Callable[[Document], Any]
    show: Callable[[Any], str] | None = None

    def of(self, row: Document) -> Any:
        """Return a row's value."""
        return row[self.value] if isinstance(self.value, str) else self.value(row)


def framed(title: str, body: str) -> str:
    """Return a complete page."""
    files = resources.files(__package__)
    style, script = ("\n" + files.joinpath(name).read_text() for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Even text that had slipped through could load and send nothing.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def page(material: Material) -> str:
    """Return the page of one run."""
    document = material.document
    figures = "\n".join(
        figure(one.title, one.draw(material), one.empty, one.caption, one.shape, one.legend) for one in FIGURES
    )
    findings = [text[:1].upper() + text[1:] for text in document["findings"]]
    parts = [
        _header(document),
        warnings(document["missing"]),
        f'<div class="said">{_paragraphs(findings)}</div>',
        _tiles(document),
        f'<div class="figures">\n{figures}\n</div>',
        _ranks(document),
        _calls(document),
        _starts(document),
    ]
    return framed(f"hpctk: {document['run']}", "\n".join(parts))


def figure(
    title: str, drawing: str, empty: str, caption: str = "", shape: str = "", legend: Sequence[Mark] = ()
) -> str:
    """Return a figure with its title, legend and caption; where there is no drawing, `empty` says why."""
    if not drawing:
        inside = f'<p class="empty-figure">{escaped(empty)}</p>'
        return f'<figure class="card"><h2>{escaped(title)}</h2>{inside}</figure>'
    marks = "".join(f'<span><i class="{kind}"></i>{escaped(name)}</span>' for kind, name in legend)
    return (
        f'<figure class="{f"card {shape}".strip()}"><h2>{escaped(title)}</h2>'
        + (f'<div class="legend">{marks}</div>' if marks else "")
        + f'<div class="scroll">{drawing}</div><figcaption>{escaped(caption)}</figcaption></figure>'
    )


def warnings(missing: Sequence[str]) -> str:
    """Return what is missing, "" for nothing."""
    return f'<div class="warn">{_paragraphs(missing)}</div>' if missing else ""


def table(name: str, columns: Sequence[Column], rows: Sequence[Document]) -> str:
    """Return a table that can be sorted by any column; `name` is its id."""
    heads = "".join(
        f'<th{"" if one.show else " class=l"} aria-sort="none"><button type="button">{escaped(one.head)}</button></th>'
        for one in columns
    )
    lines = "".join("<tr>" + "".join(_cell(one, row) for one in columns) + "</tr>\n" for row in rows)
    return f'<div class="rows"><table id="{name}"><thead><tr>{heads}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _cell(column: Column, row: Document) -> str:
    value = column.of(row)
    if column.show is None:
        return f'<td class="l" title="{escaped(value)}">{escaped(value)}</td>'
    return f'<td data-v="{-1 if value is None else format(value, ".6g")}">{escaped(column.show(value))}</td>'


def _paragraphs(texts: Sequence[str]) -> str:
    # A share is not parted from its sign at the end of a line.
    return "".join(f"<p>{escaped(text).replace(' %', '&nbsp;%')}</p>" for text in texts)


def _header(document: Document) -> str:
    recordings, totals = document["recordings"], document["totals"]
    last, starts = recordings[-1], plural(len(recordings), "start")
    facts = {
        "ranks": words.ranks_text(totals),
        "method": words.method_text(last),
        "library": words.library_text(last),
        "command": words.command_text(last),
        "began": words.began_text(recordings[0]),
        "recorded": f"{seconds_text(totals['wall_s'])} in {starts}; the last: {words.state_text(last)}",
    }
    shown = "".join(f"<dt>{name}</dt><dd>{escaped(text or '?')}</dd>" for name, text in facts.items())
    return f"<h1>{escaped(document['run'])}</h1>\n<dl>{shown}</dl>"


def _tiles(document: Document) -> str:
    step, pop, ratios = document["per_step"], document["efficiency"], document["compression"]
    tiles = {
        "steps": count(document["totals"]["steps"]),
        "a step": seconds_text(step["seconds"]),
        "sent a step and rank": bytes_text(step["sent_bytes"]),
        "averaging / sent": times(step["dense_sent"]),
        "dense / payload": times(ratios["dense_payload"]),
        "dense / wire": times(ratios["dense_wire"]),
        "load balance": percent(pop["load_balance"]),
        "communication efficiency": percent(pop["communication"]),
        "parallel efficiency": percent(pop["parallel"]),
        "exposed communication": percent(step["exposed_share"]),
        "hidden, of communication": percent(step["hidden_share"]),
    }
    tiles |= {name: count(n) for name, n in document["counts"].items() if name != "ranks" and n}
    shown = "".join(
        f'<div class="tile"><b>{escaped(value)}</b><span class="soft">{name}</span></div>'
        for name, value in tiles.items()
    )
    return f'<div class="tiles">{shown}</div>'


RANK_COLUMNS = (
    Column("rank", "rank", count),
    Column("host", "host"),
    Column("steps", "steps", count),
    Column("time", "steps_s", seconds_text),
    Column("computing", "computing_s", seconds_text),
    Column("communication", "communication_s", seconds_text),
    Column("exposed", "exposed_s", seconds_text),
    Column("waits", "waiting_share", percent),
    Column("sent", "sent_bytes", bytes_text),
    Column("received", "received_bytes", bytes_text),
    Column("messages", "messages", count),
    Column("dense/wire", "dense_wire", times),
    Column("bytes unknown", "uncounted_calls", count),
)
CALL_COLUMNS = (
    Column("operation", "operation"),
    Column("schedule", "schedule"),
    Column("compressor", "compressor"),
    Column("tensor", "tensor"),
    Column("communicator", "communicator"),
    Column("calls", "calls", count),
    Column("seconds", "seconds", seconds_text),
    Column("longest", "longest_s", seconds_text),
    Column("waiting", "waiting_s", seconds_text),
    Column("sent", lambda row: row["sent_bytes"] if row["uncounted_calls"] < row["calls"] else None, bytes_text),
    Column("messages", "messages", count),
    Column("dense/payload", "dense_payload", times),
    Column("bus bandwidth", "bus_bytes_per_s", rate_text),
    Column("bytes unknown", "uncounted_calls", count),
)  # fmt: skip
START_COLUMNS = (
    Column("start", "number", count),
    Column("began", words.began_text),
    Column("ranks", "size", count),
    Column("files", "files", count),
    Column("steps", "steps", count),
    Column("seconds", "wall_s", seconds_text),
    Column("method", "method"),
    Column("state", words.state_text),
)


def _ranks(document: Document) -> str:
    shown, left = words.extremes(document["ranks"], RANKS)
    note = _left_out(f"{plural(left, 'rank')} between these", left)
    return f"<section><h2>Ranks</h2>{table('ranks', RANK_COLUMNS, shown)}{note}</section>"


def _calls(document: Document) -> str:
    left = max(0, len(document["calls"]) - CALLS)
    note = _left_out(f"{plural(left, 'other kind')} of calls", left)
    body = table("calls", CALL_COLUMNS, document["calls"][:CALLS])
    return f"<section><h2>Calls, added up over all ranks</h2>{body}{note}</section>"


def _left_out(what: str, left: int) -> str:
    return f'<p class="soft">{what} left out; --json has all.</p>' if left else ""


def _starts(document: Document) -> str:
    if len(document["recordings"]) < 2:
        return ""
    body = table("starts", START_COLUMNS, document["recordings"][-200:])
    return f"<section><h2>Starts of training</h2>{body}</section>"
