"""Some columns and rows of a table: what the whole table has there, and no more is read."""

import os

import numpy as np
import pytest
from stats_files import rank_tables, write_rank, write_run

from hpctk.stats.read import load


@pytest.fixture
def rank(tmp_path):
    return load(write_run(tmp_path, 2, steps=20)).recordings[0].ranks[1]


@pytest.mark.parametrize("rows", [slice(None), slice(3, 7), slice(38, 99), slice(40, 50), slice(7, 3)], ids=str)
def test_a_part_is_what_the_table_has_there(rank, rows):
    columns = ("operation", "start_s", "sent_bytes")
    found, whole = rank.part("calls", columns, rows), rank.table("calls")
    assert tuple(found) == columns
    for name in columns:
        np.testing.assert_array_equal(found[name], whole[name][rows])


def test_tables_that_are_in_memory_are_not_read_again(tmp_path):
    stats = load(write_run(tmp_path, 1), ("calls",)).recordings[0].ranks[0]
    stats.path.unlink()
    assert stats.part("calls", ("call",), slice(2, 4))["call"].tolist() == [2, 3]


def test_rows_that_are_only_room_are_not_there(tmp_path):
    tables = rank_tables(0, 1, steps=10)
    tables["progress"]["calls_rows"] = 7
    write_rank(tmp_path / "000", 0, 1, tables, closed=False)
    found = load(tmp_path).recordings[0].ranks[0].part("calls", ("call",))
    assert found["call"].tolist() == list(range(7))


def test_no_more_is_read(rank, monkeypatch):
    asked, preadv = [], os.preadv

    def counted(descriptor, buffers, offset):
        asked.append(sum(len(buffer) for buffer in buffers))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    rank.part("calls", ("call", "start_s"), slice(5, 8))
    assert sum(asked) == 2 * 3 * 8
