"""A report for a terminal, from its document. A section is a function; a new one is one entry in SECTIONS."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hpctk.stats.report.described import called, library, moment, places, state, typed
from hpctk.stats.report.extremes import extremes
from hpctk.stats.report.layout import bar, facts, sentences, table
from hpctk.stats.report.numbers import (
    bytes_text,
    count,
    percent,
    plural,
    rate_text,
    seconds_text,
    shortened,
    times,
)  # fmt: skip

Document = dict[str, Any]
#: Rows of tables of ranks, and of calls.
RANKS, CALLS = 16, 8


def text(document: Document) -> str:
    """Return the report, lines of at most 80 characters."""
    parts = []
    for title, section in SECTIONS:
        body = section(document)
        if body:
            parts.append(f"{title.upper()}\n{body}" if title else body)
    return "\n\n".join(parts) + "\n"


def _header(document: Document) -> str:
    totals, recordings = document["totals"], document["recordings"]
    last = recordings[-1]
    return facts(
        [
            ("run", document["run"]),
            ("starts", f"{len(recordings)} (totals are over all of them)" if len(recordings) > 1 else "1"),
            ("ranks", places(totals)),
            ("method", called(last["settings"], last["method"])),
            ("library", f"{library(last)}" + (f"; hpctk {last['hpctk']}" if last["hpctk"] else "")),
            ("command", typed(last["command"])),
            ("began", moment(recordings[0]["began"])),
            (
                "steps",
                f"{count(totals['steps'])} in {seconds_text(document['efficiency']['runtime_s'])}; "
                f"recorded {seconds_text(totals['wall_s'])}",
            ),
            ("state", state(last)),
        ]
    )


def _starts(document: Document) -> str:
    if len(document["recordings"]) < 2:
        return ""
    rows = [
        [str(one["number"]), moment(one["began"]), str(one["size"]), str(one["files"]), count(one["steps"]),
         seconds_text(one["wall_s"]), one["method"], state(one)]
        for one in document["recordings"][-20:]
    ]  # fmt: skip
    left = len(document["recordings"]) - len(rows)
    shown = table(
        ["start", "began", "ranks", "files", "steps", "seconds", "method", "state"], rows, shrink=[6, 7]
    )
    return shown + (f"\nand {plural(left, 'earlier start')} more" if left else "")


def _efficiency(document: Document) -> str:
    found, step = document["efficiency"], document["per_step"]
    rows = [
        ["load balance", percent(found["load_balance"]), "mean / maximum of the ranks' useful time"],
        ["communication efficiency", percent(found["communication"]), "maximum of useful time / runtime"],
        ["parallel efficiency", percent(found["parallel"]), "their product"],
        [
            "step",
            seconds_text(step["seconds"]),
            f"of which exposed communication {seconds_text(step['exposed_s'])}",
        ],
    ]
    return "\n".join(f"{name:<26}{value:>9}  {what}" for name, value, what in rows)


def _compression(document: Document) -> str:
    found, step = document["compression"], document["per_step"]
    rows = [
        ["dense / payload", times(found["dense_payload"]), "tensors as they are / as written down"],
        ["dense / wire", times(found["dense_wire"]), "what calls would send uncompressed / sent"],
        ["averaging / sent, per step", times(step["dense_sent"]),
         f"{bytes_text(step['dense_bytes'])} / {bytes_text(step['sent_bytes'])}"],
    ]  # fmt: skip
    return "\n".join(f"{name:<26}{value:>9}  {what}" for name, value, what in rows)


def _ranks(document: Document) -> str:
    shown, left = extremes(document["ranks"], RANKS)
    rows = [
        [str(one["rank"]), one["host"] or "?", count(one["steps"]), seconds_text(one["steps_s"]),
         seconds_text(one["communication_s"]), seconds_text(one["exposed_s"]), percent(one["waiting_share"]),
         bytes_text(one["sent_bytes"]), bytes_text(one["received_bytes"]), times(one["dense_wire"])]
        for one in shown
    ]  # fmt: skip
    head = ["rank", "host", "steps", "time", "comm", "exposed", "waits", "sent", "received", "d/wire"]
    found = table(head, rows, left=2, shrink=[1, 2])
    if left:
        found += f"\n{plural(left, 'rank')} between these left out; --json has all"
    if any(one["uncounted_calls"] for one in document["ranks"]):
        found += "\nwithout the calls whose bytes only the library knows"
    return found


def _calls(document: Document, key: str) -> str:
    total = sum(one[key] for one in document["calls"])
    top = sorted(document["calls"], key=lambda one: -one[key])[:CALLS]
    rows = [
        [one["operation"], one["schedule"], one["compressor"] or "-", one["tensor"] or "-", count(one["calls"]),
         seconds_text(one["seconds"]), percent(one[key] / total),
         _bytes(one), rate_text(one["bus_bytes_per_s"]) if one["bus_bytes_per_s"] else "-"]
        for one in top
        if one[key] > 0
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["operation", "schedule", "compressor", "tensor", "calls", "seconds", "share", "sent", "bus"]
    shown = table(head, rows, left=4, shrink=[3, 1, 2, 0])
    left = len(document["calls"]) - len(rows)
    return shown + (f"\nand {plural(left, 'other kind')} of calls" if left else "")


def _bytes(one: dict[str, Any]) -> str:
    """Return what was sent; where nobody knows, "?"."""
    if one["uncounted_calls"] >= one["calls"]:
        return "?"
    return bytes_text(one["sent_bytes"]) + ("+?" if one["uncounted_calls"] else "")


def _sizes(document: Document) -> str:
    bins = document["message_sizes"]
    used = [i for i, one in enumerate(bins) if one["messages"] > 0]
    if not used:
        return ""
    most = max(bins[i]["messages"] for i in used)
    rows = [
        [f"{bytes_text(one['lower_bytes'] if i else 0)} to {bytes_text(2 * one['lower_bytes'])}",
         count(one["messages"]), bytes_text(one["sent_bytes"]), bar(one["messages"] / most, 34)]
        for i, one in enumerate(bins)
        if used[0] <= i <= used[-1]
    ]  # fmt: skip
    rows = _without_gaps(rows)
    return "\n".join(
        f"{a:>20} {b:>11} {c:>9} {d}".rstrip() for a, b, c, d in [["", "messages", "bytes", ""], *rows]
    )


def _without_gaps(rows: list[list[str]]) -> list[list[str]]:
    """Return rows, with dots for three or more in a row that have no bar."""
    kept: list[list[str]] = []
    for bare, group in itertools.groupby(rows, key=lambda row: not row[-1]):
        some = list(group)
        kept += [["...", "", "", ""]] if bare and len(some) > 2 else some
    return kept


def _imbalance(document: Document) -> str:
    if len(document["ranks"]) < 2:
        return ""
    show = {"bytes sent": bytes_text}
    rows = [
        [one["of"], percent(one["excess"]), show.get(one["of"], seconds_text)(one["most"]),
         show.get(one["of"], seconds_text)(one["mean"]), f"{one['rank']} on {shortened(one['host'] or '?', 24)}"]
        for one in document["imbalance"]
    ]  # fmt: skip
    return table(["of", "excess", "most", "mean", "rank with most"], rows) if rows else ""


def _counts(document: Document) -> str:
    counts = document["counts"]
    named = {
        "rounds": "exchanges of gradients, updates or models", "uploads": "uploads (SASG)",
        "skips": "uploads without need (SASG)", "clipped": "steps with a clipped gradient (CELGC)",
        "skipped": "steps skipped for a bad gradient", "fallbacks": "groups that fell back to the mean (AdaCons)",
    }  # fmt: skip
    lines = [f"{count(counts[name]):>12}  {what}" for name, what in named.items() if counts[name]]
    return "\n".join([*lines, "over all ranks and steps"]) if lines else ""


#: Title, and what stands under it; sections that return nothing are left out.
SECTIONS: tuple[tuple[str, Callable[[Document], str]], ...] = (
    ("", _header),
    ("missing", lambda document: sentences(document["missing"], "- ")),
    ("in short", lambda document: sentences(document["findings"])),
    ("starts", _starts),
    ("efficiency", _efficiency),
    ("compression", _compression),
    ("ranks", _ranks),
    ("calls by time", lambda document: _calls(document, "seconds")),
    ("calls by bytes", lambda document: _calls(document, "sent_bytes")),
    ("message sizes", _sizes),
    ("imbalance", _imbalance),
    ("counts", _counts),
)
