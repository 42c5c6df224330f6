"""Traces for Perfetto: valid JSON, on one clock, written piece by piece."""

import io
import json
import tracemalloc

import numpy as np
import pytest
from stats_files import rank_tables, write_rank, write_run
from stats_memory import rank_stats, run

from hpctk.errors import HpctkError
from hpctk.stats import trace
from hpctk.stats.read import RecordingStats, load
from hpctk.stats.trace import Cut, write


def traced(stats, cut=Cut()):  # noqa: B008 - a frozen value
    file = io.StringIO()
    written, problems = write(stats, file, cut)
    assert problems == []

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    events = json.loads(file.getvalue(), parse_constant=refuse)["traceEvents"]
    assert written == sum(one["ph"] == "X" for one in events)
    return events


def test_a_process_for_each_rank_with_steps_and_calls():
    events = traced(run(3, steps=5))
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {0: "rank 0 on host0", 1: "rank 1 on host0", 2: "rank 2 on host1"}
    threads = {(one["tid"], one["args"]["name"]) for one in events if one["name"] == "thread_name"}
    assert threads == {(1, "steps"), (2, "calls")}
    for rank in range(3):
        assert sum(one["ph"] == "X" and one["pid"] == rank and one["tid"] == 1 for one in events) == 5
        assert sum(one["ph"] == "X" and one["pid"] == rank and one["tid"] == 2 for one in events) == 10


def test_times_are_microseconds_on_the_clock_of_rank_0():
    # Ranks 2 and 3 are on node 1, whose clock is 0.1 ms behind.
    call = next(one for one in traced(run(4, steps=5)) if one["pid"] == 2 and one["name"] == "allreduce")
    row = rank_tables(2, 4, steps=5)["calls"][1]
    assert call["ts"] == pytest.approx((row["start_s"] + 1e-4) * 1e6, abs=0.01)
    assert call["dur"] == pytest.approx((row["end_s"] - row["start_s"]) * 1e6, abs=0.01)
    assert call["args"]["sent_bytes"] == row["sent_bytes"]
    assert call["args"]["tensor"] == "4 tensors"


def test_another_start_begins_where_the_one_before_ended():
    steps = [one for one in traced(run(1, steps=10, recordings=2)) if one["name"] == "step 0"]
    assert [one["ts"] for one in steps] == pytest.approx([0, 0.2e6])


def test_cut_to_steps_and_ranks():
    events = traced(run(4, steps=10), Cut(3, 5, frozenset({1, 9})))
    assert {one["pid"] for one in events} == {1}
    steps = [one["args"]["step"] for one in events if one["ph"] == "X"]
    assert sorted(steps) == [3, 3, 3, 4, 4, 4]
    assert len([one for one in traced(run(1, steps=10), Cut(first=8)) if one["ph"] == "X"]) == 6


def test_no_such_rank():
    with pytest.raises(HpctkError, match="none of the ranks asked for"):
        write(run(2), io.StringIO(), Cut(ranks=frozenset({7})))


def test_rows_without_a_time_are_left_out():
    def spoil(_, tables):
        tables["calls"]["start_s"][:3] = np.nan, np.inf, 1e300
        tables["calls"]["end_s"][3] = -5
        tables["steps"]["loss"] = np.nan
        tables["calls"]["operation"][4] = b"\xff\x00\x01"

    events = traced(run(1, steps=5, change=spoil))
    assert sum(one.get("tid") == 2 and one["ph"] == "X" for one in events) == 6
    assert next(one for one in events if one["name"] == "step 0")["args"].get("loss") is None


def test_files_are_read_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "ROWS", 7)
    events = traced(load(write_run(tmp_path, 2, steps=20)))
    calls = [one["args"]["step"] for one in events if one.get("tid") == 2 and one["ph"] == "X" and one["pid"] == 0]
    assert calls == [i // 2 for i in range(40)]


def test_memory_does_not_grow_with_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "ROWS", 100)

    class Nowhere(io.StringIO):
        def write(self, text):
            return len(text)

    def peak(steps):
        write_rank(tmp_path / str(steps) / "000", 0, 1, rank_tables(0, 1, steps=steps))
        stats = load(tmp_path / str(steps))
        tracemalloc.start()
        write(stats, Nowhere())
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    few = peak(300)
    assert peak(2400) < 1.5 * few


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ({0: 5000.0, 1: 5000.25}, {0: 0.0, 1: 0.25}),
        ({1: 7.0, 2: 6.5}, {1: 0.0, 2: -0.5}),
        ({0: 0.0, 1: np.nan, 2: 1e12, 3: "x", 4: None}, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}),
        ({0: np.nan, 1: 3.0}, {0: 0.0, 1: 0.0}),
    ],
    ids=["rank 0", "without rank 0", "no clocks", "rank 0 has none"],
)
def test_clocks_are_compared_with_that_of_the_first_rank(offsets, expected):
    ranks = {rank: rank_stats(rank, 5, clock_offset_s=offset) for rank, offset in offsets.items()}
    assert RecordingStats(0, 5, ranks).clock_shifts() == pytest.approx(expected)
