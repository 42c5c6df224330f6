"""Reports on files with bytes overwritten: what can be read is shown, nothing raises, nothing becomes markup."""

import io
import json
import random

import pytest
from stats_files import write_run

from hpctk.stats.read import load
from hpctk.stats.report import compare, compare_page
from hpctk.stats.report.account import account
from hpctk.stats.report.document import document
from hpctk.stats.report.figures import Material
from hpctk.stats.report.layout import WIDTH
from hpctk.stats.report.page import page
from hpctk.stats.report.text import text
from hpctk.stats.report.timeline import lanes
from hpctk.stats.trace import write

#: Eight bytes that are NaN, infinite, the largest, the least, -1, 0, or markup.
NASTY = (
    b"\0\0\0\0\0\0\xf8\x7f", b"\0\0\0\0\0\0\xf0\x7f", b"\xff" * 7 + b"\x7f", b"\0" * 7 + b"\x80", b"\xff" * 8, bytes(8),
    b"<script>", b"\x1b[2J\r\n\"'",
)  # fmt: skip


def spoiled(data, rng):
    bytes_ = bytearray(data)
    for _ in range(rng.choice([1, 20, 500])):
        place = rng.randrange(len(bytes_) // 8) * 8
        bytes_[place : place + 8] = rng.choice(NASTY) if rng.random() < 0.7 else rng.randbytes(8)
    return bytes(bytes_)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and what its files hold."""
    run = write_run(tmp_path_factory.mktemp("fuzz"), 3, steps=6)
    return run, {path: path.read_bytes() for path in sorted(run.glob("*/*.h5"))}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(40))
def test_overwritten_files(made, seed):
    (run, files), rng = made, random.Random(seed)
    for path in list(files)[1:]:
        path.write_bytes(spoiled(files[path], rng))
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
    for html in (drawn, compare_page.page(side_by_side, [shown, shown])):
        assert html.count("<script") == 1
    assert max(map(len, compare.text(side_by_side).splitlines())) <= WIDTH
    file = io.StringIO()
    write(stats, file)
    json.loads(file.getvalue())
