"""`hpctk checkpoint inspect`: what is inside, and what is wrong, from outside of a job."""

import json
import zlib

import h5py
import numpy as np
import pytest
import torch

from hpctk.checkpoint import folder, rank_file, tree
from hpctk.checkpoint.folder import Index
from hpctk.checkpoint.rank_file import Header
from hpctk.cli import main

SETTINGS = {"method": "SAEF", "compressor": {"compressor": "TopK", "density": 0.01}, "average_every": 0}


def made(home, step, ranks=2):
    """Write a small checkpoint without a job."""
    place = folder.next_place(home, step)
    place.mkdir(parents=True)
    seals = []
    for rank in range(ranks):
        content = {
            "model": {"state": {"w": torch.full((2, 3), 2.0), "half": torch.ones(4, dtype=torch.bfloat16)}},
            "method": {"residuals": {"w": torch.zeros(2, 3)}, "t": 5},
            "extra": {"epoch": 3, "scheduler": {"last": 1}},
        }
        writer = tree.Writer()
        structure = json.dumps(writer.encode(content))
        path = place / rank_file.name(rank)
        seals.append(rank_file.write(path, Header(f"id{step}", rank, ranks), structure, writer.arrays))
    index = Index(f"id{step}", step, ranks, "2026-01-01T00:00:00+00:00", "0.1.0", SETTINGS, tuple(seals))
    folder.write_index(place, index)
    return place


def inspect(capsys, *words):
    code = main(["checkpoint", "inspect", *map(str, words)])
    caught = capsys.readouterr()
    return code, caught.out, caught.err


def test_the_newest_is_shown(tmp_path, capsys):
    made(tmp_path, 10)
    place = made(tmp_path, 20)
    code, out, _ = inspect(capsys, tmp_path)
    assert code == 0
    assert out.startswith(f"{place}\nstep 20 of 2 ranks")
    assert "SAEF(compressor=TopK(density=0.01), average_every=0)" in out
    assert "also there: 000001-step-10" in out
    assert "extra: epoch=3" in out
    assert "scheduler" not in out
    rows = dict(line.split(None, 1) for line in out.splitlines() if line.startswith(("method/", "model", "rank-")))
    assert rows["model"].split() == ["2", "32", "B"]
    assert rows["method/residuals"].split() == ["1", "24", "B"]
    assert rows["rank-00001.h5"].endswith("whole")


def test_tensors(tmp_path, capsys):
    made(tmp_path, 10)
    code, out, _ = inspect(capsys, tmp_path, "--tensors", "--json")
    assert code == 0
    found = {one["name"]: one for one in json.loads(out)["tensors"]}
    assert found["model/state/w"]["norm"] == pytest.approx(np.sqrt(24))
    assert found["model/state/w"]["shape"] == "2x3"
    assert found["model/state/half"]["dtype"] == "bfloat16"


def raw(file, other, shape):
    file.create_dataset("w", shape, "<f4", external=[(str(other), 0, 24)])


def virtual(file, other, shape):
    layout = h5py.VirtualLayout(shape, "<f4")
    layout[:] = h5py.VirtualSource(str(other), "w", shape)
    file.create_virtual_dataset("w", layout)


def external_link(file, other, shape):
    file["w"] = h5py.ExternalLink(str(other), "w")


def soft_link(file, other, shape):
    file["w"] = h5py.SoftLink("/method/residuals/w")


@pytest.mark.parametrize("way", [raw, virtual, external_link, soft_link])
def test_what_leads_out_of_a_file_is_told(tmp_path, capsys, way):
    place, other = made(tmp_path, 10, ranks=1), tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["w"] = np.full((2, 3), 7, "<f4")
    path = place / "rank-00000.h5"
    with h5py.File(path, "r+") as file:
        del file["model/state/w"]
        way(file["model/state"], other, (2, 3))
    data, index = path.read_bytes(), json.loads((place / "index.json").read_text())
    index["files"][0] |= {"bytes": len(data), "crc32": zlib.crc32(data)}
    (place / "index.json").write_text(json.dumps(index))
    code, out, _ = inspect(capsys, place)
    assert code == 1
    wrong = "is a link to elsewhere" if "link" in way.__name__ else "lies in another file"
    assert f"is not as hpctk writes it: model/state/w {wrong}" in out


def test_damage_is_told_and_is_an_error(tmp_path, capsys):
    place = made(tmp_path, 10, ranks=4)
    (place / "rank-00001.h5").write_bytes((place / "rank-00001.h5").read_bytes()[:-1])
    (place / "rank-00002.h5").unlink()
    (place / "rank-00003.h5").unlink()
    (place / "rank-00003.h5").mkdir()
    code, out, _ = inspect(capsys, place)
    assert code == 1
    assert "is cut off: it has" in out
    assert "is missing" in out
    assert "is too long" in out or "Is a directory" in out or "is cut off" in out
    assert "method/residuals" in out


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "holds no whole checkpoint"),
        ("{", "index.json: is damaged"),
        ("[]", "index.json: is damaged"),
        ('{"format": "hpctk-checkpoint", "version": 9}', "format version 9, this hpctk reads 1"),
        ('{"format": "hpctk-checkpoint", "version": "x"}', "format version x, this hpctk reads 1; it is unknown"),
        ('{"format": "hpctk-checkpoint", "version": 1}', "is damaged (KeyError: 'files')"),
        ('{"format": "x"}', "is no index of a checkpoint"),
    ],
)
def test_an_index_that_is_none(tmp_path, capsys, text, wanted):
    place = tmp_path / "000001-step-1"
    place.mkdir()
    if text is not None:
        (place / "index.json").write_text(text)
    code, _, err = inspect(capsys, tmp_path)
    assert code == 2
    assert wanted in err
    assert "Traceback" not in err


def test_which_go_and_which_stay(tmp_path):
    places = [made(tmp_path, step, ranks=1) for step in (5, 3, 9)]
    unfinished = tmp_path / "000004-step-12"
    unfinished.mkdir()
    (tmp_path / "notes").mkdir()
    assert folder.newest(tmp_path) == places[2]
    assert folder.outdated(tmp_path) == [places[0].name]
    assert folder.unfinished(tmp_path) == [unfinished.name]
    assert folder.before(places[2]) == places[1]
    assert folder.before(places[0]) is None
    # A million saves later names grow longer, and the order is still that of the numbers.
    late = tmp_path / "1000000-step-7"
    made_late = made(tmp_path, 1, ranks=1)
    made_late.rename(late)
    assert folder.newest(tmp_path) == late
    assert folder.next_place(tmp_path, 8).name == "1000001-step-8"


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path):
    target = tmp_path / "x"
    target.write_text("before")

    def fail():
        with rank_file.beside(target) as partial:
            partial.write_text("half")
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        fail()
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
