"""The report's page: whole by itself, everything escaped, at one rank and at a thousand."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from stats_memory import add_call, run

from hpctk.stats.report import compare
from hpctk.stats.report.account import account
from hpctk.stats.report.document import document
from hpctk.stats.report.figures import FIGURES, Material, grouped
from hpctk.stats.report.page import page
from hpctk.stats.report.svg import Line, chart, log_ticks, smoothed, ticks
from hpctk.stats.report.timeline import lanes

EVIL = "<script>alert('x')</script>\"'><img src=http://evil.example/a onerror=b>"
VOID = {"meta", "br", "img", "rect", "line", "polyline", "circle"}


class Elements(HTMLParser):
    """The elements of a page, with their attributes; raises where one is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID or (tag in ("rect", "circle")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def made(stats):
    found = account(stats)
    return page(Material(document(found), found, lanes(stats)))


def elements(text):
    parsed = Elements(text)
    assert parsed.open == []
    return parsed.found


def test_every_figure_is_drawn():
    found = elements(made(run(4, density=0.02)))
    # The bars are there twice: for wide and for narrow screens.
    assert sum(tag == "svg" for tag, _ in found) == len(FIGURES) + 1
    assert {attrs["id"] for tag, attrs in found if tag == "table"} == {"ranks", "calls"}


def test_nothing_is_loaded_from_anywhere():
    text = made(run(4))
    for tag, attrs in elements(text):
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "xlink:href", "srcset", "action"} & set(attrs)
    assert not re.search(r"url\(|@import|https?:", text)


def test_what_comes_from_files_is_only_text():
    def planted(_, tables):
        add_call(tables, operation=EVIL[:24], schedule=EVIL[:24], compressor=EVIL[:16], communicator=EVIL[:32],
                 tensor=EVIL[:64], calls=3, seconds=9.0, sent_bytes=5)  # fmt: skip
        for name in ("operation", "schedule", "tensor"):
            tables["calls"][name] = EVIL[:24]

    attrs = dict.fromkeys(("host", "command", "library", "method", "settings", "hpctk", "communicator"), EVIL)
    stats = run(3, change=planted, attrs=attrs, missing=(1,), recordings=2)
    stats.recordings[0].missing[1] = EVIL
    text = made(stats)
    clean = made(run(3, missing=(1,), recordings=2))
    kinds = [sorted({(tag, *attrs) for tag, attrs in elements(one)}) for one in (text, clean)]
    assert kinds[0] == kinds[1]
    assert text.count("<script") == 1
    assert "<img" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in text


def test_what_comes_from_files_is_only_text_side_by_side():
    documents = [document(account(run(2, attrs={"method": EVIL}, missing=(1,)))) for _ in range(2)]
    for one in documents:
        one["run"] = EVIL
    text = compare.page(compare.comparison(documents), documents)
    assert text.count("<script") == 1
    assert "<img" not in text
    elements(text)


def test_a_thousand_ranks_stay_small():
    text = made(run(1000, per_node=8, steps=3))
    assert len(text) < 1.5e6
    rects = [attrs for tag, attrs in elements(text) if tag == "rect"]
    fields = [attrs for attrs in rects if attrs["class"] == "field"]
    # A ring: each of 64 fields sends to itself and to the next.
    assert 64 <= len(fields) <= 2 * 64 + 6


def test_many_calls_in_a_step_stay_small():
    def many(_, tables):
        tables["calls"] = np.repeat(tables["calls"], 2000)
        tables["calls"]["tensor"] = b"encoder.layers.11.feed_forward.intermediate.weight"
        tables["progress"]["calls_rows"] = len(tables["calls"])

    assert len(made(run(12, steps=6, change=many))) < 1.5e6


def no_calls(_, tables):
    for name in ("calls", "steps", "summary"):
        tables[name] = tables[name][:0]
    tables["sizes"]["messages"], tables["peers"]["sent_bytes"] = 0, 0
    for column in tables["progress"].dtype.names:
        tables["progress"][column] = 0


def test_a_run_without_anything_says_so_in_every_figure():
    text = made(run(2, change=no_calls))
    assert sum(tag == "svg" for tag, _ in elements(text)) == 0
    for one in FIGURES:
        assert one.empty in text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -5.0, 1e300])
def test_absurd_numbers_raise_nothing(value):
    def spoil(rank, tables):
        if rank == 1:
            for table in tables.values():
                for name in table.dtype.names:
                    if table.dtype[name].kind == "f":
                        table[name] = value

    for attrs in ({}, {"clock_offset_s": value}):
        text = made(run(3, change=spoil, attrs=attrs))
        assert not re.search(r'="[^"]*\b(nan|inf)\b', text)


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1])
def test_absurd_counts_raise_nothing(value):
    def spoil(rank, tables):
        if rank == 1:
            for name in tables:
                for column in tables[name].dtype.names:
                    if name != "progress" and tables[name].dtype[column].kind == "i":
                        tables[name][column] = value

    elements(made(run(3, change=spoil)))


def test_timelines_are_on_the_clock_of_rank_0():
    stats = run(2, per_node=1, attrs={})
    for rank, one in stats.recordings[0].ranks.items():
        one.attributes["clock_offset_s"] = 10.0 * rank
    first, second = lanes(stats)
    assert [step for step, _, _ in first.steps] == [8, 9, 10, 11]
    assert first.steps[0][1] == pytest.approx(0.16)
    assert second.steps[0][1] == pytest.approx(10.16)
    assert second.calls[0]["start_s"] == pytest.approx(10.17)
    assert len(second.calls) == 8


def test_timelines_show_the_steps_that_are_asked_for():
    stats = run(30, steps=20)
    shown = lanes(stats, 3, 5, slowest=29)
    assert len(shown) == 12
    assert 29 in [lane.rank for lane in shown]
    assert {step for lane in shown for step, _, _ in lane.steps} == {3, 4}
    assert lanes(stats, 500, 510) == []


def test_neighbours_share_a_bar():
    ranks = document(account(run(100, steps=2)))["ranks"]
    rows = grouped(ranks)
    assert len(rows) == 40
    assert rows[0]["name"] == "ranks 0-2"
    assert rows[0]["computing_s"] == pytest.approx(np.mean([one["computing_s"] for one in ranks[:3]]))


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3, 3, [3])]
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected)


def test_ticks_of_logarithms():
    assert log_ticks(0.1, 10, 8) == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])
    assert log_ticks(1e-9, 1e9, 5) == pytest.approx([1e-9, 1e-5, 0.1, 1e3, 1e7])


def test_a_chart_of_nothing_is_nothing_and_of_one_point_is_a_dot():
    assert chart([Line("a", "first", [1.0, 2.0], [np.nan, None])], "x", "x", str) == ""
    one = chart([Line("a", "first", [1.0], [2.0])], "x", "x", str)
    assert "<circle" in one
    assert "polyline" not in one


def test_smoothed_losses():
    assert smoothed([1.0, 4.0, 16.0], width=3) == pytest.approx([2.0, 4.0, 8.0])
    assert smoothed([-1.0, 0.0, 4.0], width=3) == pytest.approx([-0.5, 1.0, 2.0])
    assert smoothed([None, None, None, 2.0, np.nan], width=3) == [None, None, 2.0, 2.0, 2.0]
    assert smoothed([]) == []
