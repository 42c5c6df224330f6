"""What people see: the progress bar and the tables."""

import io

import pytest

from hpctk.cli.progress import Progress
from hpctk.cli.table import bytes_text, seconds_text, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_whole_lines_and_always_the_last():
    stream = io.StringIO()
    bar = Progress("digits", stream)
    for step in range(1, 101):
        bar.step(step, 100, "loss 0.1")
    lines = stream.getvalue().splitlines()
    assert "100/100" in lines[-1]
    assert len(lines) <= 3
    assert "\r" not in stream.getvalue()


def test_a_terminal_line_is_rewritten_and_ended_once():
    stream = Terminal()
    bar = Progress("digits", stream)
    for step in range(1, 101):
        bar.step(step, 100)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("\n")


def test_table_aligns():
    lines = table(["name", "n"], [["a", "1"], ["longer", "100"]]).splitlines()
    assert lines == ["name      n", "------  ---", "a         1", "longer  100"]


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (24e6, "24 MB"), (3e15, "3e+03 TB")]
)
def test_bytes(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(("s", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (4e-6, "4 us"), (0.0, "0 us")])
def test_seconds(s, text):
    assert seconds_text(s) == text
