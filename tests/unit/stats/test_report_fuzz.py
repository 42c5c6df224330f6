"""Reports on files with values overwritten: what can be read is shown, nothing raises, nothing becomes markup."""

import io
import json
import random

import h5py
import pytest
from stats_files import write_run

from hpctk.stats.read import load
from hpctk.stats.report import compare
from hpctk.stats.report.account import account
from hpctk.stats.report.document import document
from hpctk.stats.report.figures import Material
from hpctk.stats.report.page import page
from hpctk.stats.report.text import WIDTH, text
from hpctk.stats.report.timeline import lanes
from hpctk.stats.trace import write

#: Eight bytes that are NaN, infinite, the largest, the least, -1, 0, or markup.
NASTY = (
    b"\0\0\0\0\0\0\xf8\x7f", b"\0\0\0\0\0\0\xf0\x7f", b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x80", b"\xff" * 8, bytes(8),
    b"<script>", b"\x1b[2J\r\n\"'",
)  # fmt: skip


def spoil(path, data, places, rng):
    """Write a file with some of its values replaced; of HDF5's own bytes none."""
    spoiled = bytearray(data)
    for place in rng.choices(places, k=rng.choice([1, 20, 500])):
        spoiled[place : place + 8] = rng.choice(NASTY) if rng.random() < 0.7 else rng.randbytes(8)
    path.write_bytes(spoiled)
    if rng.random() < 0.5:
        with h5py.File(path, "r+") as file:
            for name in rng.sample(("host", "method", "settings", "communicator", "command", "run_id"), 2):
                file.attrs.modify(name, rng.choice(NASTY).rstrip(b"\0") or b"?")
            for name in rng.sample(("clock_offset_s", "began_unix_s", "clock_error_s"), 2):
                file.attrs.modify(name, rng.choice((float("nan"), float("inf"), -1e300, 1e18)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, what its files hold, and where every eight bytes of their columns lie."""
    run = write_run(tmp_path_factory.mktemp("fuzz"), 3, steps=6)
    files = {}
    for path in sorted(run.glob("*/*.h5")):
        with h5py.File(path) as file:
            columns = [dataset.id for group in file.values() for dataset in group.values()]
            places = [
                place
                for column in columns
                for place in range(
                    column.get_offset() or 0, (column.get_offset() or 0) + column.get_storage_size() - 7, 8
                )
            ]
        files[path] = path.read_bytes(), places
    return run, files


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(40))
def test_overwritten_values(made, seed):
    (run, files), rng = made, random.Random(seed)
    for path in list(files)[1:]:
        spoil(path, *files[path], rng)
    # One file is whole, so there is something to show.
    stats = load(run)
    found = account(stats)
    shown = document(found)
    json.dumps(shown, allow_nan=False)
    lines = text(shown)
    assert max(map(len, lines.splitlines())) <= WIDTH
    assert "\x1b" not in lines
    drawn = page(Material(shown, found, lanes(stats)))
    side_by_side = compare.comparison([shown, shown])
    for html in (drawn, compare.page(side_by_side, [shown, shown])):
        assert html.count("<script") == 1
    assert max(map(len, compare.text(side_by_side).splitlines())) <= WIDTH
    file = io.StringIO()
    write(stats, file)
    json.loads(file.getvalue())
