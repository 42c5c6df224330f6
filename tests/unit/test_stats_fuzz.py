"""Statistics files with flipped, cut and shuffled bytes: a clear error or a table, nothing else."""

import random
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
from stats_files import write_rank, write_run

import hpctk.stats
from hpctk.errors import HpctkError
from hpctk.stats import schema
from hpctk.stats.merge import merge
from hpctk.stats.plain_hdf5 import PlainFile

CASES = 2500


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = write_rank(tmp_path_factory.mktemp("made") / "000", 1, 4, closed=False)
    data = path.read_bytes()
    structure = np.ones(len(data), bool)
    with h5py.File(path) as file:
        for group in file.values():
            for dataset in group.values():
                first = dataset.id.get_offset() or 0
                structure[first : first + dataset.id.get_storage_size()] = False
        progress = [file["progress"][column.name].id.get_offset() for column in schema.PROGRESS.columns]
    for first in progress:
        structure[first : first + 8] = True
    return data, np.flatnonzero(structure)


def damaged(original, seed):
    data, places = bytearray(original[0]), original[1]
    rng = random.Random(seed)
    for _ in range(rng.choice([1, 1, 2, 4, 16, 64])):
        place = int(places[rng.randrange(len(places))])
        match rng.randrange(6):
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place] = rng.choice([0, 1, 127, 128, 255])
            case 2:
                data[place : place + 8] = rng.choice([0, 1, 2**63 - 1, 2**64 - 1, len(data)]).to_bytes(
                    8, "little"
                )
            case 3:
                start = int(places[rng.randrange(len(places))])
                data[place : place + 8] = data[start : start + 8]
            case 4:
                # Where addresses stand, other addresses of the file are the best lie.
                data[place : place + 8] = int(places[rng.randrange(len(places))]).to_bytes(8, "little")
            case 5:
                data[place] = rng.randrange(256)
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    return bytes(data[: len(original[0])])


def everything(path: Path):
    """Read all that there is; return whether it could be."""
    try:
        run = hpctk.stats.load(path)
        for rank in run.recordings[0].ranks.values():
            tables = rank.tables(*schema.TABLES)
            for name, table in tables.items():
                assert list(table) == [column.name for column in schema.TABLES[name].columns]
                assert len({len(values) for values in table.values()}) == 1
    except HpctkError as error:
        told = str(error)
    else:
        return True
    assert told.startswith(f"{path}: ")
    assert "\n" not in told
    return False


def test_nothing_but_clear_errors(original, tmp_path, monkeypatch):
    path, read, reads, most, at = tmp_path / "rank-00001.h5", 0, [], 0, PlainFile.at
    monkeypatch.setattr(PlainFile, "at", lambda file, *place: reads.append(place) or at(file, *place))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(CASES):
        path.write_bytes(damaged(original, seed))
        reads.clear()
        read += everything(path)
        most = max(most, len(reads))
    # Some harm does no harm (names of units), most does: a test that sees only one kind sees nothing.
    assert CASES // 10 < read < CASES * 9 // 10
    # A whole file takes 400: no tree that bites its own tail is followed for long.
    assert most < 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_cut_anywhere(original, tmp_path):
    path, data = tmp_path / "rank-00001.h5", original[0]
    for length in {*range(0, 200, 7), *range(200, len(data), 997), len(data) - 1}:
        path.write_bytes(data[:length])
        assert not everything(path)
    path.write_bytes(data)
    assert everything(path)


def test_merged_copies(tmp_path):
    # Their compressed tables are read by HDF5: what that says of them becomes a clear error, too.
    run, path = write_run(tmp_path / "run", 3, missing=[1], steps=3), tmp_path / "merged.h5"
    merge(hpctk.stats.load(run), path, copy=True)
    data, read = path.read_bytes(), 0
    for seed in range(150):
        path.write_bytes(damaged((data, range(len(data))), seed))
        read += everything(path)
    assert 15 < read < 135
