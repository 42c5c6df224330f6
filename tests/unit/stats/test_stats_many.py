"""Many ranks: each file is opened as often as need be, and memory does not grow with their number."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from stats_files import write_many, write_run

import hpctk.stats
from hpctk.stats import rank_reader
from hpctk.stats.merge import merge
from hpctk.telemetry import schema

SIZE, MISSING, RUNNING = 150, 70, 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_many(tmp_path_factory.mktemp("many"), SIZE, steps=100, missing=[MISSING], running=[RUNNING])


@pytest.fixture
def opened(monkeypatch):
    """Count how often each file is opened."""
    counts, named = Counter(), rank_reader._named

    def counted(path):
        counts[path.name] += 1
        return named(path)

    monkeypatch.setattr(rank_reader, "_named", counted)
    return counts


def test_copies_of_one_file_are_those_of_their_ranks(tmp_path):
    many = write_many(tmp_path / "many", 5, per_node=2, missing=[1], running=[2])
    few = write_run(tmp_path / "few", 5, per_node=2, missing=[1], running=[2])
    ours, theirs = hpctk.stats.load(many).recordings[0], hpctk.stats.load(few).recordings[0]
    assert list(ours.ranks) == [0, 2, 3, 4]
    for rank, stats in theirs.ranks.items():
        assert ours.ranks[rank].attributes == stats.attributes
        for name in schema.TABLES:
            for column, values in stats.table(name).items():
                np.testing.assert_array_equal(ours.ranks[rank].table(name)[column], values)


def test_loading_opens_every_file_once(run, opened):
    stats = hpctk.stats.load(run, ("steps", "summary", "peers", "sizes"))
    assert len(stats.recordings[0].ranks) == SIZE - 1
    for name in ("steps", "summary", "peers", "sizes"):
        stats.table(name)
    assert set(opened.values()) == {1}
    assert len(opened) == SIZE - 1
    stats.table("calls")
    assert set(opened.values()) == {2}


@pytest.mark.parametrize("copy", [False, True])
def test_merging_opens_every_file_once(run, opened, tmp_path, copy):
    stats = hpctk.stats.load(run)
    opened.clear()
    merge(stats, tmp_path / "merged.h5", copy=copy)
    assert set(opened.values()) == ({1} if copy else set())


def test_a_copy_is_made_in_parts(run, tmp_path, monkeypatch):
    monkeypatch.setattr("hpctk.stats.merge.CHUNK_ROWS", 1000)
    stats = hpctk.stats.load(run)
    rows = (SIZE - 1) * 200
    tracemalloc.start()
    merge(stats, tmp_path / "merged.h5", copy=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All calls at once would be eight megabytes, a thousand of them are 300 kB.
    assert rows * schema.CALLS.dtype.itemsize > 8e6
    assert peak < 4e6
