"""`hpctk merge`: all ranks in one file, as a view and as a copy, for h5py, pandas and xarray."""

import os
import shutil

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from stats_files import rank_tables, write_rank, write_run

import hpctk.stats
from hpctk.cli import main
from hpctk.errors import HpctkError
from hpctk.stats.merge import merge
from hpctk.telemetry import schema
from hpctk.telemetry.rank_file import RankFile

KINDS = ["view", "copy"]
PRESENT = [0, 2, 3]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("written") / "run", 4, missing=(1, 2), recordings=2, steps=6)
    for number in range(2):
        tables = rank_tables(2, 4, steps=6)
        tables["progress"]["calls_rows"], tables["progress"]["steps_rows"] = 5, 2
        tables["progress"]["events_dropped"] = 3
        write_rank(folder / f"00{number}", 2, 4, tables, closed=False, recording=number)
    return folder


@pytest.fixture
def run(written, tmp_path):
    """Two recordings of four ranks; rank 1 left no file, rank 2 was killed before it had filled its own."""
    return shutil.copytree(written, tmp_path / "run")


def merged(run, kind, *words):
    """Merge by the command; return the file."""
    target = run / "merged.h5"
    assert main(["merge", str(run), *(["--copy"] if kind == "copy" else []), *words]) == 0
    return target


def expected(name, column):
    """Return a column as it must stand in the file, from what the ranks were given."""
    rows = {"calls": 5, "steps": 2}
    parts = []
    for _ in range(2):
        for rank in PRESENT:
            values = rank_tables(rank, 4, steps=6)[name][column]
            parts.append(values[: rows.get(name)] if rank == 2 else values)
    return np.concatenate(parts)


def owners(name):
    """Return recording and rank of every row."""
    lengths = {"calls": [12, 5, 12], "steps": [6, 2, 6], "summary": [2, 2, 2], "sizes": [48, 48, 48]}[name]
    return np.repeat([0, 1], sum(lengths)), np.tile(np.repeat(PRESENT, lengths), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_one_after_the_other(run, kind):
    with h5py.File(merged(run, kind)) as file:
        assert file.attrs["schema"] == b"hpctk-stats-merged"
        assert file.attrs["run_id"] == b"made"
        for name in ("calls", "steps", "summary", "sizes"):
            group = file[name]
            recording, rank = owners(name)
            np.testing.assert_array_equal(group["recording"], recording)
            np.testing.assert_array_equal(group["rank"], rank)
            np.testing.assert_array_equal(group["row"], np.arange(len(rank)))
            for column in schema.TABLES[name].columns:
                dataset = group[column.name]
                np.testing.assert_array_equal(dataset[:], expected(name, column.name))
                assert dataset.attrs["units"].decode() == column.units
                assert dataset.attrs["long_name"].decode() == column.long_name
                assert dataset.dims[0][0] == group["row"]
                assert dataset.is_virtual == (kind == "view")


@pytest.mark.parametrize("kind", KINDS)
def test_peers_as_a_matrix(run, kind):
    with h5py.File(merged(run, kind)) as file:
        sent = file["peers/sent_bytes"]
        assert sent.shape == (2, 4, 4)
        np.testing.assert_array_equal(sent[:, 1], -1)
        for rank in PRESENT:
            np.testing.assert_array_equal(sent[1, rank], rank_tables(rank, 4, steps=6)["peers"]["sent_bytes"])


@pytest.mark.parametrize("kind", KINDS)
def test_who_was_there(run, kind):
    with h5py.File(merged(run, kind)) as file:
        ranks = {name: column[:] for name, column in file["ranks"].items()}
    np.testing.assert_array_equal(ranks["recording"], np.repeat([0, 1], 4))
    np.testing.assert_array_equal(ranks["rank"], [0, 1, 2, 3] * 2)
    np.testing.assert_array_equal(ranks["present"], [1, 0, 1, 1] * 2)
    assert ranks["state"].tolist() == [b"closed", b"", b"running", b"closed"] * 2
    assert ranks["host"].tolist() == [b"host0", b"", b"host1", b"host1"] * 2
    np.testing.assert_array_equal(ranks["node"], [0, -1, 1, 1] * 2)
    np.testing.assert_array_equal(ranks["clock_offset_s"], [0, np.nan, 1e-4, 1e-4] * 2)
    np.testing.assert_array_equal(ranks["calls_rows"], [12, 0, 5, 12] * 2)
    np.testing.assert_array_equal(ranks["events_dropped"], [0, -1, 3, 0] * 2)
    assert b"no such file" in ranks["reason"][1]
    assert ranks["reason"][0] == b""
    assert ranks["file"][6] == b"001/rank-00002.h5"


@pytest.mark.parametrize("kind", KINDS)
def test_one_line_of_pandas(run, kind):
    path = merged(run, kind)
    frame = pd.DataFrame({name: column[:] for name, column in h5py.File(path)["calls"].items()})
    assert len(frame) == 58
    found = frame[frame.operation == b"allreduce"].groupby("rank").waiting_s.sum()
    assert found[3] == pytest.approx(2 * rank_tables(3, 4, steps=6)["calls"]["waiting_s"].sum())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_one_line_of_xarray(run, kind):
    path = merged(run, kind)
    with xr.open_dataset(path, engine="h5netcdf", group="peers") as peers:
        assert peers.sizes == {"recording": 2, "rank": 4, "peer": 4}
        assert peers.sent_bytes.sel(recording=1, rank=3, peer=0) == 12 * 3_000_000
        assert peers.sent_bytes.units == "byte"
    for name, rows in (("calls", 58), ("steps", 28), ("summary", 12), ("sizes", 288), ("ranks", 8)):
        with xr.open_dataset(path, engine="h5netcdf", group=name) as table:
            assert table.sizes == {"row": rows}
            assert all(variable.dims == ("row",) for variable in table.variables.values())
    with xr.open_dataset(path, engine="h5netcdf", group="steps") as steps:
        np.testing.assert_array_equal(steps.loss, expected("steps", "loss"))
        assert (steps.seconds.dtype, steps.seconds.units) == (np.float64, "s")


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_file_loads_like_its_run(run, kind):
    path, whole = merged(run, kind), hpctk.stats.load(run)
    back = hpctk.stats.load(path, ("steps",))
    for ours, theirs in zip(back.recordings, whole.recordings, strict=True):
        assert (ours.number, ours.size, ours.missing) == (theirs.number, theirs.size, theirs.missing)
        for rank, stats in theirs.ranks.items():
            assert ours.ranks[rank].attributes == stats.attributes
            assert ours.ranks[rank].environment == stats.environment
            assert ours.ranks[rank].progress == stats.progress
    for name in schema.TABLES:
        for column, values in whole.table(name).items():
            np.testing.assert_array_equal(back.table(name)[column], values)
            assert back.table(name)[column].dtype == values.dtype


def test_a_view_moves_with_its_folder(run, tmp_path, monkeypatch):
    merged(run, "view")
    elsewhere = tmp_path / "else" / "where 100%d"
    elsewhere.parent.mkdir()
    run.rename(elsewhere)
    monkeypatch.chdir("/")
    with h5py.File(elsewhere / "merged.h5") as file:
        np.testing.assert_array_equal(file["steps/loss"], expected("steps", "loss"))
    assert len(hpctk.stats.load(elsewhere / "merged.h5").table("steps")["loss"]) == 28


def test_a_view_from_elsewhere(run, tmp_path, monkeypatch):
    # HDF5 takes %d in a name for a pattern.
    odd = tmp_path / "50%d off"
    run.rename(odd)
    monkeypatch.chdir(tmp_path)
    assert main(["merge", "50%d off", "-o", "all.h5"]) == 0
    monkeypatch.chdir("/")
    with h5py.File(tmp_path / "all.h5") as file:
        np.testing.assert_array_equal(file["calls/operation"], expected("calls", "operation"))
    assert len(hpctk.stats.load(tmp_path / "all.h5").table("steps")["loss"]) == 28
    shutil.rmtree(odd)
    with pytest.raises(HpctkError, match="is a view of .*50%d off, which is not there"):
        hpctk.stats.load(tmp_path / "all.h5")


def test_what_lies_outside_its_folder_is_copied(run, tmp_path, capsys):
    (tmp_path / "apart").mkdir()
    path = tmp_path / "apart" / "all.h5"
    assert main(["merge", str(run), "-o", str(path)]) == 0
    assert "a view lies in the folder of its run, or above it: this is a copy" in capsys.readouterr().err
    assert len(hpctk.stats.load(path).table("steps")["loss"]) == 28


@pytest.mark.parametrize("kind", ["absolute", "up"])
def test_a_view_leads_to_its_own_folder_only(run, tmp_path, kind):
    # A file from elsewhere must not bring in what lies on this machine.
    write_run(tmp_path / "secret", 2)
    path = merged(run, "view")
    where = {"absolute": str(tmp_path / "secret"), "up": "../secret"}[kind]
    with h5py.File(path, "r+") as file:
        file.attrs["run"] = np.bytes_(where.encode())
    with pytest.raises(HpctkError) as caught:
        hpctk.stats.load(path)
    assert str(caught.value).startswith(f"{path}: is a view of {where}, outside its own folder")


@pytest.mark.parametrize("way", ["group", "link", "virtual", "external"])
def test_copies_take_nothing_from_another_file(run, tmp_path, way):
    path, other = merged(run, "copy"), tmp_path / "other.h5"
    shutil.copy(path, other)
    with h5py.File(path, "r+") as file:
        name = "steps" if way == "group" else "steps/step"
        shape = file["steps/step"].shape
        del file[name]
        if way in ("group", "link"):
            file[name] = h5py.ExternalLink(str(other), name)
        elif way == "virtual":
            layout = h5py.VirtualLayout(shape, "<i8")
            layout[:] = h5py.VirtualSource(str(other), name, shape)
            file.create_virtual_dataset(name, layout)
        else:
            file.create_dataset(name, shape, "<i8", external=[(str(other), 0, 8 * shape[0])])
    with pytest.raises(HpctkError) as caught:
        hpctk.stats.load(path).table("steps")
    what = "is a link to elsewhere" if way in ("group", "link") else "lies in another file"
    assert str(caught.value) == f"{path}: is not as hpctk writes it: {name} {what}"


def test_what_vanishes_reads_as_fill_values(run):
    path = merged(run, "view")
    (run / "000" / "rank-00003.h5").unlink()
    gone = (owners("steps")[0] == 0) & (owners("steps")[1] == 3)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["steps/loss"], np.where(gone, np.nan, expected("steps", "loss")))
        np.testing.assert_array_equal(file["steps/step"], np.where(gone, -1, expected("steps", "step")))
        np.testing.assert_array_equal(file["peers/sent_bytes"][0, 3], -1)
        assert set(file["calls/operation"][:][owners("calls")[1] == 3][:12]) == {b""}
        np.testing.assert_array_equal(file["steps/rank"], owners("steps")[1])


def test_a_view_shows_what_was_there_when_it_was_made(tmp_path):
    # A rank goes on: its file is replaced by a larger one, and closed in the end.
    tables = rank_tables(0, 1, steps=50)
    write_rank(tmp_path / "000", 0, 1, tables)
    rows = {name: len(table) for name, table in tables.items()} | {"steps": 20}
    attributes = hpctk.stats.load(tmp_path).recordings[0].ranks[0].attributes
    described = {name: value for name, value in attributes.items() if name not in ("schema", "schema_version", "state")}
    file = RankFile(tmp_path / "000" / "rank-00000.h5", described, {}, rows)
    early = tables["progress"].copy()
    early["steps_rows"] = 10
    for name, table in schema.TABLES.items():
        file.write(table, 0, {**tables, "progress": early}[name][: rows[name]])
    view = tmp_path / "merged.h5"
    merge(hpctk.stats.load(tmp_path), view)

    def losses():
        with h5py.File(view) as opened:
            return opened["steps/loss"][:]

    np.testing.assert_array_equal(losses(), tables["steps"]["loss"][:10])
    file.grow(schema.STEPS, 50)
    file.write(schema.STEPS, 0, tables["steps"])
    np.testing.assert_array_equal(losses(), tables["steps"]["loss"][:10])
    file.write(schema.PROGRESS, 0, tables["progress"])
    file.close({**rows, "steps": 50})
    np.testing.assert_array_equal(losses(), tables["steps"]["loss"][:10])
    assert len(hpctk.stats.load(view).table("steps")["loss"]) == 50


def test_recordings_of_different_sizes(tmp_path):
    for number, size in enumerate((2, 3)):
        for rank in range(size):
            write_rank(tmp_path / f"00{number}", rank, size, recording=number)
    for kind in KINDS:
        path = merged(tmp_path, kind, "--force")
        with h5py.File(path) as file:
            assert file["peers/sent_bytes"].shape == (2, 3, 3)
            assert (file["peers/sent_bytes"][0, 2] == -1).all()
            assert (file["peers/sent_bytes"][0, :2, 2] == -1).all()
        assert [one.size for one in hpctk.stats.load(path).recordings] == [2, 3]
        assert len(hpctk.stats.load(path).recordings[0].ranks[0].table("peers")["peer"]) == 2


def test_tables_without_rows(tmp_path):
    tables = {name: values[:0] if name in ("calls", "steps") else values for name, values in rank_tables(0, 1).items()}
    tables["progress"]["calls_rows"] = tables["progress"]["steps_rows"] = 0
    write_rank(tmp_path / "000", 0, 1, tables)
    for kind in KINDS:
        path = merged(tmp_path, kind, "--force")
        with xr.open_dataset(path, engine="h5netcdf", group="calls") as calls:
            assert calls.sizes == {"row": 0}
        assert len(hpctk.stats.load(path).table("calls")["call"]) == 0


def test_nothing_is_overwritten_unasked(run, capsys):
    path = merged(run, "view")
    before = path.read_bytes()
    assert main(["merge", str(run)]) == 2
    assert "merged.h5: is there already; --force replaces it" in capsys.readouterr().err
    assert main(["merge", str(run), "--force", "-o", str(run / "000" / "rank-00000.h5")]) == 2
    assert "is a rank's file and stays what it is" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert main(["merge", str(run), "--force", "--copy"]) == 0
    assert path.read_bytes() != before


def test_a_failure_leaves_nothing(run, capsys, monkeypatch):
    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpctk.stats.merge._put_ranks", full)
    assert main(["merge", str(run)]) == 2
    assert capsys.readouterr().err == f"hpctk merge: {run}/merged.h5: cannot be written (No space left on device)\n"
    assert sorted(os.listdir(run)) == ["000", "001"]
    assert main(["merge", str(run), "-o", str(run / "no" / "where.h5")]) == 2
    assert "no/where.h5: cannot be written (No such file or directory)" in capsys.readouterr().err
    assert main(["merge", str(run / "none")]) == 2
    assert "none: no such folder" in capsys.readouterr().err


def test_what_is_missing_is_said(run, capsys):
    (run / "001" / "rank-00003.h5").write_text("x")
    assert main(["merge", str(run)]) == 0
    caught = capsys.readouterr()
    assert "recording 0: " in caught.err
    assert "rank-00001.h5: no such file" in caught.err
    assert "001/rank-00003.h5: is no HDF5 file" in caught.err
    assert "view of 5 files, 2 recordings, 3 ranks missing" in caught.out


def test_more_files_than_programs_may_open_are_copied(run, capsys, monkeypatch):
    # HDF5 would give fill values for those it cannot open, and say nothing.
    monkeypatch.setattr("hpctk.stats.merge.MOST_VIEWED", 5)
    path = merged(run, "view")
    assert "6 files are more than most programs may open at once: this is a copy" in capsys.readouterr().err
    with h5py.File(path) as file:
        assert not file["calls/step"].is_virtual
    merged(run, "view", "--virtual", "--force")
    with h5py.File(path) as file:
        assert file["calls/step"].is_virtual


def test_large_tables_are_copied_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("hpctk.stats.merge.CHUNK_ROWS", 30)
    monkeypatch.setattr("hpctk.stats.merged.CHUNK_ROWS", 7)
    write_run(tmp_path, 5, missing=(0,))
    path = merged(tmp_path, "copy")
    whole, back = hpctk.stats.load(tmp_path), hpctk.stats.load(path)
    for name in schema.TABLES:
        for column, values in whole.table(name).items():
            np.testing.assert_array_equal(back.table(name)[column], values)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda file: file.attrs.update(schema_version=9), "has schema version 9, this hpctk reads up to 1"),
        (lambda file: file.attrs.update(method=9), "its attribute method must be text"),
        (lambda file: file.__delitem__("ranks"), "lacks ranks"),
        (lambda file: file.__delitem__("calls"), "lacks calls"),
        (lambda file: file["ranks/rank"].write_direct(np.full(8, 3)), "does not have one row for each"),
        (lambda file: file["ranks/rank"].write_direct(np.full(8, -3)), "has rank -3 of 4"),
        (lambda file: file["ranks/size"].write_direct(np.full(8, 10**9)), "does not have one row for each"),
        (lambda file: file["ranks/calls_rows"].write_direct(np.full(8, -9)), "has less than no rows"),
        (lambda file: file["ranks/calls_rows"].write_direct(np.full(8, 10**15)), "calls/call has the shape (58,)"),
    ],
)
def test_damaged_copies(run, change, wanted):
    path = merged(run, "copy")
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(HpctkError) as caught:
        hpctk.stats.load(path).table("calls")
    assert wanted in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count(str(path)) == 1


def test_copies_that_declare_too_much(run):
    path = merged(run, "copy")
    with h5py.File(path, "r+") as file:
        ranks = file["ranks/calls_rows"][:]
        ranks[0] = 10**12
        file["ranks/calls_rows"][:] = ranks
        for column in schema.CALLS.columns:
            del file["calls"][column.name]
            kind = "S8" if column.kind[0] == "S" else column.kind
            total = int(ranks.sum())
            file["calls"].create_dataset(column.name, (total,), kind, chunks=(1024,), compression="gzip")
    with pytest.raises(HpctkError, match="calls/call declares 8000000000368 bytes that are not there"):
        hpctk.stats.load(path).table("calls")
