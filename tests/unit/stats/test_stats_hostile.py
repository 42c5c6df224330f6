"""Statistics files that are not what they should be: one line says which and why."""

import subprocess
import sys

import h5py
import numpy as np
import pytest
from jobs import clean_environment
from stats_files import rank_tables, write_rank

import hpctk.stats
from hpctk.errors import HpctkError
from hpctk.stats.merge import merge
from hpctk.telemetry import schema


@pytest.fixture
def path(tmp_path):
    return write_rank(tmp_path / "000", 1, 2)


def refused(path):
    """Return what is said of a file that cannot be read, after its name."""
    with pytest.raises(HpctkError) as caught:
        hpctk.stats.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 300 + len(str(path))
    return text.removeprefix(f"{path}: ")


def changed(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", "is empty"),
        (b"\x89HD", "is no HDF5 file"),
        (b"\x89HDF\r\n\x1a\n", "is damaged (Unable to synchronously open file (bad byte number in an address))"),
        (b"GIF89a" * 100, "is no HDF5 file"),
        (b"\0" * 4096, "is no HDF5 file"),
    ],
)
def test_no_hdf5(tmp_path, content, wanted):
    path = tmp_path / "rank-00000.h5"
    path.write_bytes(content)
    assert refused(path) == wanted


def test_cut_off(path):
    data = path.read_bytes()
    for length in (100, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert refused(path).startswith("is cut off (")


def test_foreign_hdf5(tmp_path):
    old, new = tmp_path / "old.h5", tmp_path / "new.h5"
    with h5py.File(old, "w") as file:
        file["x"] = np.arange(10)
    with h5py.File(new, "w", libver="latest") as file:
        file["x"] = np.arange(10)
    for path in (old, new):
        assert refused(path) == "is no statistics file of hpctk (its attribute schema is not 'hpctk-stats')"


@pytest.mark.parametrize(
    ("attributes", "wanted"),
    [
        ({"schema_version": 2}, "has schema version 2, this hpctk reads up to 1; a newer hpctk wrote it"),
        ({"schema_version": 0}, "has schema version 0, this hpctk reads up to 1; there is no such"),
        ({"schema_version": np.bytes_(b"x")}, "has schema version x, this hpctk reads up to 1"),
        ({"schema_version": np.arange(3)}, "has schema version None, this hpctk reads up to 1"),
        ({"rank": 2}, "is damaged: it says to be of rank 2 of 2"),
        ({"rank": -1}, "is damaged: it says to be of rank -1 of 2"),
        ({"size": 10**9}, "is damaged: it says to be of rank 1 of 1000000000"),
        ({"size": 10**6}, "is damaged: it has 2 peers and 1000000 ranks"),
        ({"rank": np.bytes_(b"1")}, "is damaged: its attribute rank must be a whole number"),
        ({"rank": 1.0}, "is damaged: its attribute rank must be a whole number"),
        ({"node": 2}, "is damaged: it says to be of node 2, with 2 ranks"),
        ({"host": 7}, "is damaged: its attribute host must be text"),
        # What h5py makes of a str by itself: its length stands elsewhere in the file.
        ({"host": "varying"}, "is damaged: its attribute host must be text"),
        ({"clock_offset_s": np.bytes_(b"0")}, "is damaged: its attribute clock_offset_s must be a number"),
        ({"clock_offset_s": np.arange(2.0)}, "is damaged: its attribute clock_offset_s must be a number"),
    ],
)
def test_attributes(path, attributes, wanted):
    changed(path, lambda file: file.attrs.update(attributes))
    assert refused(path).startswith(wanted)


@pytest.mark.parametrize("name", ["schema_version", "state", "rank", "size"])
def test_attributes_that_are_missing(path, name):
    changed(path, lambda file: file.attrs.__delitem__(name))
    assert name.replace("_", " ") in refused(path).replace("_", " ")


def test_attributes_one_can_do_without(path):
    def change(file):
        for name in ("host", "node", "clock_error_s"):
            del file.attrs[name]
        del file["environment"]

    changed(path, change)
    stats = hpctk.stats.load(path).recordings[0].ranks[1]
    assert (stats.attributes["host"], stats.attributes["node"], stats.environment) == ("", -1, {})
    assert np.isnan(stats.attributes["clock_error_s"])


def replaced(name, **settings):
    def change(file):
        del file[name]
        file.create_dataset(name, **settings)

    return change


STEPS = 20


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda file: file.__delitem__("calls"), "lacks calls"),
        (lambda file: file.__delitem__("steps/loss"), "lacks steps/loss"),
        (lambda file: file.__delitem__("progress"), "lacks progress"),
        (replaced("steps", data=np.arange(3)), "is damaged (Unable to synchronously open group"),
        (replaced("steps/loss", data=np.zeros(STEPS, "<f4")), "is damaged: steps/loss is of type <f4, not <f8"),
        (replaced("steps/loss", data=np.zeros(STEPS, ">f8")), "is damaged: steps/loss is of type >f8, not <f8"),
        (replaced("steps/step", data=np.zeros(STEPS)), "is damaged: steps/step is of type <f8, not <i8"),
        (replaced("steps/step", data=np.zeros(STEPS, "<u8")), "is damaged: steps/step is of type <u8, not <i8"),
        (replaced("calls/tensor", data=np.arange(40)), "is damaged: calls/tensor is of type <i8, not S64"),
        (replaced("calls/tensor", data=["x"] * 40), "is damaged: calls/tensor is of type |O, not S64"),
        (replaced("calls/tensor", data=np.zeros(40, "S2000")), "is damaged: calls/tensor has text of 2000 bytes"),
        (replaced("steps/loss", data=0.0), "is damaged: the columns of steps have 1 to 20 rows"),
        (replaced("steps/loss", data=np.zeros(STEPS - 1)), "is damaged: the columns of steps have 19 to 20 rows"),
        (replaced("steps/loss", shape=(10**12,), dtype="<f8"), "is damaged: the columns of steps have 0 to 20 rows"),
        (
            replaced("steps/loss", shape=(10**12,), dtype="<f8", chunks=(1024,)),
            "is damaged: the columns of steps have 0 to 20 rows",
        ),
        (
            replaced("steps/loss", data=np.zeros(STEPS), chunks=(4,)),
            "is not as hpctk writes it: steps/loss does not lie in one piece",
        ),
        (
            replaced("steps/loss", data=np.zeros(STEPS), compression="gzip"),
            "is not as hpctk writes it: steps/loss does not lie in one piece",
        ),
        (
            replaced("steps/loss", shape=(STEPS,), dtype="<f8", external=[("/dev/zero", 0, 160)]),
            "is not as hpctk writes it: steps/loss lies in another file",
        ),
        (replaced("sizes/calls", data=np.zeros(9, "<i8")), "is damaged: the columns of sizes have 9 to 48 rows"),
        (replaced("progress/steps", data=np.zeros(2, "<i8")), "is damaged: the columns of progress have 1 to 2"),
    ],
)
def test_tables(path, change, wanted):
    changed(path, change)
    assert refused(path).startswith(wanted)


def test_links_are_not_followed(path, tmp_path):
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["loss"] = np.ones(STEPS)

    def soft(file):
        del file["steps/loss"]
        file["steps/loss"] = h5py.SoftLink("/steps/seconds")

    def external(file):
        del file["steps/loss"]
        file["steps/loss"] = h5py.ExternalLink(str(secret), "loss")

    changed(path, soft)
    assert refused(path) == "is not as hpctk writes it: steps/loss is a link to elsewhere"
    changed(path, external)
    assert refused(path) == "is not as hpctk writes it: steps/loss is a link to elsewhere"


@pytest.mark.parametrize("name", ["steps", "environment"])
def test_groups_are_not_taken_from_another_file(path, tmp_path, name):
    other = write_rank(tmp_path / "other", 1, 2)

    def change(file):
        del file[name]
        file[name] = h5py.ExternalLink(str(other), name)

    changed(path, change)
    assert refused(path) == f"is not as hpctk writes it: {name} is a link to elsewhere"


def test_virtual_columns_are_not_followed(path, tmp_path):
    layout = h5py.VirtualLayout((STEPS,), "<f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "loss", (STEPS,))

    def change(file):
        del file["steps/loss"]
        file.create_virtual_dataset("steps/loss", layout)

    changed(path, change)
    assert refused(path).startswith("is not as hpctk writes it: steps/loss lies in another file")


def test_groups_in_themselves(path):
    def change(file):
        file["calls/calls"] = file["calls"]
        file["steps/root"] = file["/"]

    changed(path, change)
    assert len(hpctk.stats.load(path).table("steps")["step"]) == STEPS


@pytest.mark.parametrize("count", [-1, -(2**63), 41, 2**63 - 1])
def test_progress_beyond_what_is_there(tmp_path, count):
    tables = rank_tables(0, 1)
    tables["progress"]["calls_rows"] = count
    path = write_rank(tmp_path, 0, 1, tables, closed=False)
    text = refused(path)
    assert text in (
        f"is damaged: progress says calls_rows = {count}",
        f"is damaged: progress says {count} rows of calls, there are 40",
    )


def test_columns_upon_each_other(path):
    # Twenty columns at one place could be twenty times as long as the file.
    with h5py.File(path) as file:
        columns = [file["steps"][column.name].id for column in schema.STEPS.columns]
        places = [(h5py.h5o.get_info(column).addr, column.get_offset()) for column in columns]
    data = bytearray(path.read_bytes())
    rows, old = len(data) // 8 - 12, STEPS.to_bytes(8, "little")
    for header, offset in places:
        # A dataspace: version 1, one dimension, its largest size given, too.
        shape = data.index(b"\1\1\1" + bytes(5) + old + old, header) + 8
        data[shape : shape + 16] = 2 * rows.to_bytes(8, "little")
        layout = data.index(offset.to_bytes(8, "little") + (8 * STEPS).to_bytes(8, "little"))
        data[layout : layout + 16] = (96).to_bytes(8, "little") + (8 * rows).to_bytes(8, "little")
    path.write_bytes(data)
    assert refused(path) == "is damaged: steps is longer than the file"


def test_the_same_fault_is_told_whichever_way_strings_hash(path):
    def change(file):
        for name in ("calls", "peers", "sizes", "steps"):
            del file[name][next(iter(file[name]))]

    changed(path, change)
    program = f"import hpctk.stats; hpctk.stats.load({str(path)!r})"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=clean_environment(PYTHONHASHSEED=seed), capture_output=True, text=True, timeout=60,
        ).stderr.splitlines()[-1]
        for seed in ("1", "2", "3", "4")
    }  # fmt: skip
    assert len(said) == 1
    assert ": lacks " in said.pop()


def test_nan_and_any_bytes_are_values(tmp_path):
    tables = rank_tables(0, 1)
    tables["steps"]["loss"][:2] = np.nan, -np.inf
    tables["calls"]["tensor"][1] = b"\xff\xfe<script>\n\x1b[2J"
    tables["progress"]["flushed_s"] = np.nan
    path = write_rank(tmp_path, 0, 1, tables)
    changed(path, lambda file: file.attrs.update(host=np.bytes_(b"\xff\xfe<b>"), clock_offset_s=np.nan))
    stats = hpctk.stats.load(path).recordings[0].ranks[0]
    assert stats.attributes["host"] == "��<b>"
    assert np.isnan(stats.attributes["clock_offset_s"])
    assert stats.table("calls")["tensor"][1] == b"\xff\xfe<script>\n\x1b[2J"
    assert np.isnan(stats.table("steps")["loss"][0])


def test_what_a_newer_writer_adds_is_ignored(path):
    def change(file):
        file["steps/new"] = np.arange(5)
        file["steps"].attrs["new"] = [1, 2]
        file.create_group("new/deep").attrs["x"] = 1
        file.attrs.update(new="any", newer=[1, 2], newest=7)

    changed(path, change)
    stats = hpctk.stats.load(path).recordings[0].ranks[1]
    assert list(stats.table("steps")) == [column.name for column in schema.STEPS.columns]
    assert stats.attributes["newest"] == 7
    assert "newer" not in stats.attributes


def test_columns_that_came_later_read_as_zeros_where_they_are_missing(path):
    later = [column.name for column in schema.STEPS.columns if column.later]

    def change(file):
        for name in later:
            del file["steps"][name]

    changed(path, change)
    steps = hpctk.stats.load(path).recordings[0].ranks[1].table("steps")
    assert list(steps) == [column.name for column in schema.STEPS.columns]
    assert later
    assert all(not steps[name].any() and len(steps[name]) == len(steps["step"]) for name in later)
    copy = path.with_name("copy.h5")
    merge(hpctk.stats.load(path), copy, copy=True)
    changed(copy, change)
    assert not hpctk.stats.load(copy).table("steps")["lost_ranks"].any()
