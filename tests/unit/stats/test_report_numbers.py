"""Numbers and texts as reports show them."""

import math

import pytest

from hpctk.stats.report import numbers
from hpctk.stats.report.text import WIDTH, table


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (999_600, "1 MB"), (47.5e6, "47.5 MB"),
     (3e15, "3 PB"), (2e21, "2000 EB"), (math.nan, "?"), (math.inf, "?"), (None, "?"), (-1500, "-1.5 kB")],
)  # fmt: skip
def test_bytes(n, text):
    assert numbers.bytes_text(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (62, "62 s"), (999.6, "16.7 min"),
     (7200, "2 h"), (9e5, "10.4 d"), (math.nan, "?"), (None, "?")],
)  # fmt: skip
def test_seconds(seconds, text):
    assert numbers.seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.41, "41 %"),
        (0, "0 %"),
        (0.0123, "1.2 %"),
        (0.0006, "0.06 %"),
        (3e-6, "<0.01 %"),
        (1, "100 %"),
        (None, "?"),
        (math.nan, "?"),
    ],
)
def test_percent(share, text):
    assert numbers.percent(share) == text


def test_control_characters_do_not_reach_the_terminal():
    assert numbers.printable("a\x1b[31mb\nc\u202ed\x00") == "a?[31mb c?d?"
    assert numbers.printable(b"\xff\xfeok") == "\ufffd\ufffdok"
    assert len(numbers.printable("x" * 10_000_000)) == 200


@pytest.mark.parametrize(("width", "text"), [(20, "node-a-0123"), (7, "nod~123"), (1, "~"), (2, "n~")])
def test_shortened_in_the_middle(width, text):
    assert numbers.shortened("node-a-0123", width) == text


def test_lists_of_ranks():
    assert numbers.rank_list([7, 0, 1, 2, 9]) == "0-2, 7, 9"
    assert numbers.rank_list(range(0, 40, 2), most=3) == "0, 2, 4 and 17 more"
    assert numbers.rank_list([]) == ""


def test_a_table_that_is_too_wide_shortens_what_it_may():
    rows = [["0", "h" * 90, "12.3 ms"], ["1", "b", "1 s"]]
    lines = table(["rank", "host", "time"], rows, left=2, shrink=[1]).splitlines()
    assert max(map(len, lines)) == WIDTH
    assert "~" in lines[2]
    assert lines[2].endswith("12.3 ms")
    assert lines[3].endswith("    1 s")
