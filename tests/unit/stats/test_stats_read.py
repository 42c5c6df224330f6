"""`hpctk.stats.load`: what was written comes back, and what is missing is told."""

import os
import shutil

import h5py
import numpy as np
import pytest
from stats_files import rank_tables, write_rank, write_run

import hpctk.stats
from hpctk.errors import HpctkError
from hpctk.telemetry import schema


def test_what_was_written_comes_back(tmp_path):
    run = hpctk.stats.load(write_run(tmp_path, 3, running=(1,), recordings=2))
    assert [one.number for one in run.recordings] == [0, 1]
    for recording in run.recordings:
        assert (recording.size, recording.missing, recording.foreign) == (3, {}, {})
        for rank, stats in recording.ranks.items():
            for name, wanted in rank_tables(rank, 3).items():
                table = stats.table(name)
                assert list(table) == list(wanted.dtype.names)
                for column, values in table.items():
                    np.testing.assert_array_equal(values, wanted[column])
                    assert values.dtype == wanted.dtype[column]
            assert stats.attributes["state"] == ("running" if rank == 1 else "closed")
            assert stats.attributes["host"] == f"host{rank // 2}"
            assert stats.attributes["clock_offset_s"] == 1e-4 * (rank // 2)
            assert stats.environment == {"SLURM_JOB_ID": "7"}
            assert stats.progress["steps_s"] == pytest.approx(0.4)


def test_the_same_as_the_library_reads(tmp_path):
    # Rows are read from where they lie: HDF5 says what stands there.
    path = write_rank(tmp_path, 1, 2, host="späte", settings="x" * 9000)
    stats = hpctk.stats.load(path).recordings[0].ranks[1]
    with h5py.File(path) as file:
        for name, value in file.attrs.items():
            assert stats.attributes[name] == (value.decode() if isinstance(value, bytes) else value)
        for name, table in schema.TABLES.items():
            for column, values in stats.table(name).items():
                np.testing.assert_array_equal(values, file[name][column][:])
            assert len(stats.table(name)) == len(table.columns) == len(file[name])


def test_rows_beyond_progress_are_room_not_rows(tmp_path):
    tables = rank_tables(0, 1)
    tables["progress"]["calls_rows"], tables["progress"]["steps_rows"] = 7, 3
    path = write_rank(tmp_path, 0, 1, tables, closed=False)
    stats = hpctk.stats.load(path).recordings[0].ranks[0]
    np.testing.assert_array_equal(stats.table("calls")["call"], np.arange(7))
    assert len(stats.table("steps")["step"]) == 3
    assert len(stats.table("summary")["entry"]) == 2


def test_tables_of_all_ranks_in_one(tmp_path):
    run = hpctk.stats.load(write_run(tmp_path, 3, missing=(1,), recordings=2, steps=5))
    table = run.table("steps")
    np.testing.assert_array_equal(table["recording"], np.repeat([0, 1], 10))
    np.testing.assert_array_equal(table["rank"], np.tile(np.repeat([0, 2], 5), 2))
    np.testing.assert_array_equal(table["step"], np.tile(np.arange(5), 4))
    assert list(run.recordings[1].table("peers")) == ["rank", *schema.PEERS.dtype.names]
    with pytest.raises(HpctkError, match="no table 'call'; there are calls, steps"):
        run.table("call")


def test_missing_and_bad_ranks_do_not_spoil_the_rest(tmp_path):
    write_run(tmp_path, 5, missing=(1,))
    folder = tmp_path / "000"
    (folder / "rank-00002.h5").write_bytes(b"")
    shutil.copy(folder / "rank-00000.h5", folder / "rank-00003.h5")
    shutil.copy(folder / "rank-00000.h5", folder / "rank-00009.h5")
    os.mkfifo(folder / "rank-00010.h5")
    (folder / "notes.txt").write_text("mine")
    recording = hpctk.stats.load(tmp_path).recordings[0]
    assert list(recording.ranks) == [0, 4]
    assert recording.missing == {
        1: f"{folder}/rank-00001.h5: no such file",
        2: f"{folder}/rank-00002.h5: is empty",
        3: f"{folder}/rank-00003.h5: is the file of rank 0, not of 3",
    }
    assert recording.foreign == {
        "rank-00009.h5": f"{folder}/rank-00009.h5: is the file of rank 0, not of 9",
        "rank-00010.h5": f"{folder}/rank-00010.h5: is not a file",
    }


def test_files_of_another_run_are_told_apart(tmp_path):
    write_run(tmp_path, 4)
    write_rank(tmp_path / "000", 1, 4, run_id="another")
    write_rank(tmp_path / "000", 2, 9)
    recording = hpctk.stats.load(tmp_path).recordings[0]
    assert (recording.size, list(recording.ranks)) == (4, [0, 3])
    assert recording.missing[1].endswith("is of another run ('another' of 4 ranks, the others 'made' of 4 ranks)")
    assert recording.missing[2].endswith("is of another run ('made' of 9 ranks, the others 'made' of 4 ranks)")


def test_a_recording_without_a_readable_file_does_not_spoil_the_run(tmp_path):
    write_run(tmp_path, 2, recordings=3)
    for rank in range(2):
        (tmp_path / "001" / f"rank-0000{rank}.h5").write_text("no HDF5")
    (tmp_path / "007").mkdir()
    run = hpctk.stats.load(tmp_path)
    assert [one.number for one in run.recordings] == [0, 2]
    assert run.unreadable == {
        1: f"{tmp_path}/001/rank-00000.h5: is no HDF5 file",
        7: f"{tmp_path}/007: no statistics here (no rank-NNNNN.h5)",
    }


def test_nothing_to_read(tmp_path):
    with pytest.raises(HpctkError, match="no such file or folder"):
        hpctk.stats.load(tmp_path / "none")
    with pytest.raises(HpctkError, match=r"no statistics here \(no NNN/rank-NNNNN.h5\)"):
        hpctk.stats.load(tmp_path)
    (tmp_path / "000").mkdir()
    (tmp_path / "000" / "rank-00000.h5").mkdir()
    with pytest.raises(HpctkError, match="rank-00000.h5: is not a file"):
        hpctk.stats.load(tmp_path)


def test_what_is_asked_for_at_once_is_kept(tmp_path):
    write_run(tmp_path, 2)
    run = hpctk.stats.load(tmp_path, ("steps", "peers"))
    shutil.rmtree(tmp_path / "000")
    assert len(run.table("steps")["step"]) == 40
    assert len(run.table("peers")["peer"]) == 4
    with pytest.raises(HpctkError, match=r"rank-00000.h5: cannot be read \(No such file"):
        run.table("calls")


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    # A rank whose room ended made a larger one: its columns lie elsewhere.
    path = write_rank(tmp_path, 0, 1, rank_tables(0, 1, steps=5), closed=False)
    stats = hpctk.stats.load(path).recordings[0].ranks[0]
    write_rank(tmp_path, 0, 1, rank_tables(0, 1, steps=50), closed=False)
    np.testing.assert_array_equal(stats.table("steps")["loss"], rank_tables(0, 1, steps=50)["steps"]["loss"][:5])


def test_what_is_wrong_with_a_table_is_told_at_once_or_when_it_is_read(tmp_path):
    write_run(tmp_path, 2)
    damaged = tmp_path / "000" / "rank-00001.h5"
    with h5py.File(damaged, "r+") as file:
        del file["calls/step"]
    why = f"{damaged}: lacks calls/step"
    assert hpctk.stats.load(tmp_path).recordings[0].missing == {1: why}
    run = hpctk.stats.load(tmp_path, checked=("steps",))
    assert len(run.table("steps")["step"]) == 40
    assert len(run.recordings[0].ranks[1].table("summary")["calls"]) == 2
    with pytest.raises(HpctkError, match="lacks calls/step"):
        run.table("calls")
    with pytest.raises(HpctkError, match="no table 'call'"):
        hpctk.stats.load(tmp_path, checked=("call",))
