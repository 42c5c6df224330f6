"""What people see: the progress bar and the tables."""

import io

import pytest

from hpctk.cli.core.progress import Progress
from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.errors import SettingError


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


def test_on_a_narrow_terminal_the_bar_gives_way_to_the_words(monkeypatch):
    for columns, bar in (("200", 24), ("60", 14), ("20", None)):
        monkeypatch.setenv("COLUMNS", columns)
        stream = Terminal()
        Progress("saef", stream).step(50, 100, "loss 0.25  4000 samples/s")
        shown = stream.getvalue().lstrip("\r")
        assert len(shown) == int(columns) - 1
        if bar is not None:
            assert len(shown[shown.index("[") + 1 : shown.index("]")]) == bar
            assert shown.rstrip().endswith("4000 samples/s")


def test_the_time_left_is_that_of_the_steps_since_a_job_was_resumed(monkeypatch):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("hpctk.cli.core.progress.time.monotonic", lambda: next(clock))
    monkeypatch.setenv("HPCTK_PROGRESS", "lines")
    stream = io.StringIO()
    bar = Progress("saef", stream)
    bar.step(80, 100)
    bar.step(90, 100)
    assert "90/100 10 s, 10 s left" in stream.getvalue()


def test_work_that_ends_early_ends_its_line():
    stream = Terminal()
    bar = Progress("saef", stream)
    bar.step(1, 100)
    bar.finish()
    bar.finish()
    assert stream.getvalue().count("\n") == 1


def test_the_launcher_decides_where_mpirun_hides_the_terminal(monkeypatch):
    for style, newlines in (("bar", 1), ("lines", 1), ("none", 0)):
        monkeypatch.setenv("HPCTK_PROGRESS", style)
        stream = io.StringIO()
        Progress("digits", stream).step(5, 5)
        assert stream.getvalue().count("\n") == newlines
        assert ("\r" in stream.getvalue()) == (style == "bar")
    monkeypatch.setenv("HPCTK_PROGRESS", "fancy")
    with pytest.raises(SettingError, match="HPCTK_PROGRESS='fancy': allowed are bar, lines, none"):
        Progress("digits", io.StringIO())


def test_table_aligns():
    lines = table(["name", "n"], [["a", "1"], ["longer", "100"]]).splitlines()
    assert lines == ["name      n", "------  ---", "a         1", "longer  100"]


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (24e6, "24 MB"), (3e15, "3 PB")])
def test_bytes(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(("s", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (4e-6, "4 us"), (0.0, "0 s")])
def test_seconds(s, text):
    assert seconds_text(s) == text
