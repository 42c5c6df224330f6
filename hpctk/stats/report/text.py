"""A report for a terminal of 80 columns, from its document. A new section is a function and an entry in SECTIONS."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from hpctk.stats.report import findings as words
from hpctk.stats.report.numbers import bytes_text, count, digits, percent, plural, seconds_text, shortened, times

Document = dict[str, Any]
WIDTH = 80
#: A column is not made narrower than this.
NARROWEST = 4
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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, shrink: Sequence[int] = ()) -> str:
    """Return rows under a head, at most WIDTH wide; `left` columns are flush left, the others flush right.

    `shrink` are the columns whose texts are shortened where all is too wide, the first one first.
    """
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    excess = sum(widths) + gap * (len(widths) - 1) - WIDTH
    for column in shrink:
        taken = max(0, min(excess, widths[column] - NARROWEST))
        widths[column] -= taken
        excess -= taken
    lines = [[shortened(text, width) for text, width in zip(row, widths, strict=True)] for row in cells]
    lines.insert(1, ["-" * width for width in widths])
    aligned = [
        [text.ljust(widths[i]) if i < left else text.rjust(widths[i]) for i, text in enumerate(line)] for line in lines
    ]
    return "\n".join((" " * gap).join(line).rstrip() for line in aligned)


def sentences(texts: Sequence[str], mark: str = "") -> str:
    """Return sentences, each on lines of its own, wrapped; `mark` before each."""
    return "\n".join(_wrapped(mark, text) for text in texts)


def _wrapped(start: str, text: str) -> str:
    """Return a text after `start`, wrapped under itself."""
    indent = " " * len(start)
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False)


def bar(share: float, width: int) -> str:
    """Return a bar of at most `width` characters; what is not nothing has at least one."""
    length = round(max(0.0, min(1.0, share)) * width)
    return "#" * max(length, 1 if share > 0 else 0)


def _header(document: Document) -> str:
    totals, recordings = document["totals"], document["recordings"]
    last, runtime_s = recordings[-1], document["efficiency"]["runtime_s"]
    facts = {
        "run": document["run"],
        "starts": f"{len(recordings)} (totals are over all of them)" if len(recordings) > 1 else "1",
        "ranks": words.ranks_text(totals),
        "method": words.method_text(last),
        "library": words.library_text(last) + (f"; hpctk {last['hpctk']}" if last["hpctk"] else ""),
        "command": words.command_text(last),
        "began": words.began_text(recordings[0]),
        "steps": f"{count(totals['steps'])} in {seconds_text(runtime_s)}; recorded {seconds_text(totals['wall_s'])}",
        "state": words.state_text(last),
    }
    return "\n".join(_wrapped(f"{name:<9}", value) for name, value in facts.items() if value)


def _starts(document: Document) -> str:
    if len(document["recordings"]) < 2:
        return ""
    rows = [
        [str(one["number"]), words.began_text(one), str(one["size"]), str(one["files"]), count(one["steps"]),
         seconds_text(one["wall_s"]), one["method"], words.state_text(one)]
        for one in document["recordings"][-20:]
    ]  # fmt: skip
    head = ["start", "began", "ranks", "files", "steps", "seconds", "method", "state"]
    left = len(document["recordings"]) - len(rows)
    return table(head, rows, shrink=[6, 7]) + (f"\nand {plural(left, 'earlier start')} more" if left else "")


def _explained(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return names, values and what they mean."""
    return "\n".join(f"{name:<26}{value:>9}  {meaning}" for name, value, meaning in rows)


def _efficiency(document: Document) -> str:
    pop, step = document["efficiency"], document["per_step"]
    exposed = f"of which exposed communication {seconds_text(step['exposed_s'])}"
    lasted = f"of {seconds_text(step['communication_s'])} of calls, behind computing"
    return _explained([
        ("load balance", percent(pop["load_balance"]), "mean / maximum of the ranks' useful time"),
        ("communication efficiency", percent(pop["communication"]), "maximum of useful time / runtime"),
        ("parallel efficiency", percent(pop["parallel"]), "their product"),
        ("step", seconds_text(step["seconds"]), exposed),
        ("hidden communication", percent(step["hidden_share"]), lasted),
    ])  # fmt: skip


def _compression(document: Document) -> str:
    ratios, step = document["compression"], document["per_step"]
    averaging = f"{bytes_text(step['dense_bytes'])} / {bytes_text(step['sent_bytes'])}"
    return _explained([
        ("dense / payload", times(ratios["dense_payload"]), "tensors as they are / as written down"),
        ("dense / wire", times(ratios["dense_wire"]), "what calls would send uncompressed / sent"),
        ("averaging / sent, per step", times(step["dense_sent"]), averaging),
    ])  # fmt: skip


def _ranks(document: Document) -> str:
    shown, left = words.extremes(document["ranks"], RANKS)
    rows = [
        [str(one["rank"]), one["host"] or "?", count(one["steps"]), seconds_text(one["steps_s"]),
         seconds_text(one["communication_s"]), seconds_text(one["exposed_s"]), percent(one["waiting_share"]),
         bytes_text(one["sent_bytes"]), bytes_text(one["received_bytes"]), times(one["dense_wire"])]
        for one in shown
    ]  # fmt: skip
    head = ["rank", "host", "steps", "time", "comm", "exposed", "waits", "sent", "received", "d/wire"]
    lines = [table(head, rows, left=2, shrink=[1, 2])]
    if left:
        lines.append(f"{plural(left, 'rank')} between these left out; --json has all")
    if any(one["uncounted_calls"] for one in document["ranks"]):
        lines.append("without the calls whose bytes only the library knows")
    return "\n".join(lines)


def _calls(document: Document, key: str) -> str:
    total = sum(one[key] for one in document["calls"])
    top = sorted(document["calls"], key=lambda one: -one[key])[:CALLS]
    rows = [
        [one["operation"], one["schedule"], one["compressor"] or "-", one["tensor"] or "-", count(one["calls"]),
         seconds_text(one["seconds"]), percent(one[key] / total),
         _sent(one), f"{bytes_text(one['bus_bytes_per_s'])}/s" if one["bus_bytes_per_s"] else "-"]
        for one in top
        if one[key] > 0
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["operation", "schedule", "compressor", "tensor", "calls", "seconds", "share", "sent", "bus"]
    shown = table(head, rows, left=4, shrink=[3, 1, 2, 0])
    left = len(document["calls"]) - len(rows)
    return shown + (f"\nand {plural(left, 'other kind')} of calls" if left else "")


def _sent(calls: Document) -> str:
    """Return what was sent; where nobody knows, "?"."""
    if calls["uncounted_calls"] >= calls["calls"]:
        return "?"
    return bytes_text(calls["sent_bytes"]) + ("+?" if calls["uncounted_calls"] else "")


def _sizes(document: Document) -> str:
    bins = document["message_sizes"]
    used = [i for i, one in enumerate(bins) if one["messages"] > 0]
    if not used:
        return ""
    most = max(bins[i]["messages"] for i in used)
    rows = [["", "messages", "bytes", ""]]
    for empty, group in itertools.groupby(range(used[0], used[-1] + 1), lambda i: bins[i]["messages"] <= 0):
        members = list(group)
        if empty and len(members) > 2:
            rows.append(["...", "", "", ""])
            continue
        for i in members:
            lower, messages = bins[i]["lower_bytes"], bins[i]["messages"]
            range_text = f"{bytes_text(lower if i else 0)} to {bytes_text(2 * lower)}"
            cells = [range_text, count(messages), bytes_text(bins[i]["sent_bytes"])]
            rows.append([*cells, bar(messages / most, 34)])
    return "\n".join(f"{a:>20} {b:>11} {c:>9} {d}".rstrip() for a, b, c, d in rows)


def _imbalance(document: Document) -> str:
    if len(document["ranks"]) < 2 or not document["imbalance"]:
        return ""
    rows = []
    for one in document["imbalance"]:
        show = bytes_text if one["of"] == "bytes sent" else seconds_text
        rank = f"{one['rank']} on {shortened(one['host'] or '?', 24)}"
        rows.append([one["of"], percent(one["excess"]), show(one["most"]), show(one["mean"]), rank])
    return table(["of", "excess", "most", "mean", "rank with most"], rows)


def _counts(document: Document) -> str:
    counts = document["counts"]
    names = {
        "rounds": "exchanges of gradients, updates or models", "uploads": "uploads (SASG)",
        "skips": "uploads without need (SASG)", "clipped": "steps with a clipped gradient (CELGC)",
        "skipped": "steps skipped for a bad gradient", "fallbacks": "groups that fell back to the mean (AdaCons)",
    }  # fmt: skip
    lines = [f"{count(counts[key]):>12}  {name}" for key, name in names.items() if counts[key]]
    return "\n".join([*lines, "over all ranks and steps"]) if lines else ""


def _losses(document: Document) -> str:
    losses = document["losses"]
    if not losses["lost_ranks"]:
        return ""
    norms = {name: digits(losses[f"{name}_residual_norm"]) for name in ("lost", "restored")}
    return _explained([
        ("ranks", count(losses["lost_ranks"]), "the others went on without them"),
        ("work begun anew", count(losses["redone"]), "steps, rounds or saves"),
        ("residuals lost", count(losses["lost_residuals"]), f"2-norm {norms['lost']}, if like those left"),
        ("residuals from copies", count(losses["restored_residuals"]), f"2-norm {norms['restored']}, shared out"),
    ])  # fmt: skip


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
    ("lost ranks", _losses),
)
