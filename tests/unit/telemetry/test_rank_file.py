"""A statistics file: filled in place, whole at every moment."""

import os
import shutil

import h5py
import numpy as np
import pytest

from hpctk.telemetry import schema
from hpctk.telemetry.rank_file import RankFile

ROWS = {"calls": 8, "steps": 4, "summary": 2, "peers": 3, "sizes": schema.SIZE_BINS, "progress": 1}


def rows(table, n, seed=0):
    rng = np.random.default_rng(seed)
    made = np.zeros(n, table.dtype)
    for column in table.columns:
        numbers = rng.integers(0, 1000, n)
        made[column.name] = [str(i).encode() for i in numbers] if column.kind[0] == "S" else numbers
    return made


@pytest.fixture
def file(tmp_path):
    made = RankFile(tmp_path / "rank-00000.h5", {"rank": 0, "host": "größe\n"}, {"SLURM_JOB_ID": "7"}, ROWS)
    yield made
    made.abandon()


def read(path, table):
    with h5py.File(path) as f:
        return {column.name: f[table.name][column.name][:] for column in table.columns}


def same(found, expected, first=0):
    for name in expected.dtype.names:
        np.testing.assert_array_equal(found[name][first : first + len(expected)], expected[name])


@pytest.mark.parametrize("table", schema.TABLES.values(), ids=schema.TABLES)
def test_rows_can_be_read_while_the_file_is_written(file, table):
    written = rows(table, 1)
    file.write(table, ROWS[table.name] - 1, written)
    found = read(file.path, table)
    same(found, written, ROWS[table.name] - 1)
    if ROWS[table.name] > 1:
        assert found[table.columns[-1].name][0] == 0


def test_every_dataset_says_what_it_is(file):
    with h5py.File(file.path) as f:
        assert f.attrs["schema"] == b"hpctk-stats"
        assert f.attrs["schema_version"] == schema.VERSION
        assert f.attrs["state"] == b"running"
        assert f.attrs["host"].decode() == "größe\n"
        assert f["environment"].attrs["SLURM_JOB_ID"] == b"7"
        for table in schema.TABLES.values():
            for column in table.columns:
                dataset = f[table.name][column.name]
                assert dataset.attrs["units"].decode() == column.units
                assert dataset.attrs["long_name"].decode() == column.long_name
                assert dataset.chunks is None
                scale = table.columns[0].name
                assert dataset.is_scale if column.name == scale else dataset.dims[0][0].name.endswith(scale)


def test_growing_keeps_what_was_written(file):
    first, second = rows(schema.CALLS, 8), rows(schema.CALLS, 5, seed=1)
    steps = rows(schema.STEPS, 4)
    file.write(schema.CALLS, 0, first)
    file.write(schema.STEPS, 0, steps)
    file.grow(schema.CALLS, 32)
    file.write(schema.CALLS, 8, second)
    found = read(file.path, schema.CALLS)
    assert len(found["call"]) == 32
    same(found, first)
    same(found, second, 8)
    same(read(file.path, schema.STEPS), steps)


def test_closing_cuts_the_room_off(file):
    written = rows(schema.CALLS, 5)
    file.write(schema.CALLS, 0, written)
    file.close({"calls": 5, "steps": 0, "summary": 0})
    found = read(file.path, schema.CALLS)
    assert len(found["call"]) == 5
    same(found, written)
    assert len(read(file.path, schema.STEPS)["step"]) == 0
    with h5py.File(file.path) as f:
        assert f.attrs["state"] == b"closed"


def test_whatever_is_written_last_the_file_is_whole(file, tmp_path):
    """A kill may come between any two writes: a copy made there must open, with all rows written before."""
    kept = rows(schema.CALLS, 4)
    file.write(schema.CALLS, 0, kept)
    moments, write = [], os.pwrite

    def looking(descriptor, data, offset):
        moments.append(shutil.copy(file.path, tmp_path / f"{len(moments)}.h5"))
        # Half of it, as a kill in the middle would leave it.
        return write(descriptor, data[: max(1, len(data) // 2)], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", looking)
        file.write(schema.CALLS, 4, rows(schema.CALLS, 4, seed=1))
        file.grow(schema.CALLS, 16)
        file.write(schema.PROGRESS, 0, rows(schema.PROGRESS, 1))
    assert len(moments) > len(schema.CALLS.columns)
    for moment in moments:
        same(read(moment, schema.CALLS), kept)


def test_a_file_that_cannot_be_made_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        RankFile(tmp_path / "rank-00000.h5", {}, {}, ROWS)
    assert list(tmp_path.iterdir()) == []


def test_growing_where_there_is_no_room_leaves_the_file_as_it_was(file, monkeypatch):
    kept = rows(schema.CALLS, 8)
    file.write(schema.CALLS, 0, kept)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        file.grow(schema.CALLS, 32)
    same(read(file.path, schema.CALLS), kept)
    assert [x.name for x in file.path.parent.iterdir()] == ["rank-00000.h5"]
