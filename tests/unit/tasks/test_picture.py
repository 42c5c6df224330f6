"""The picture of a comparison: what is drawn of a result, and that it is a PNG."""

import pytest

from hpctk.advise.elsewhere import predicted, step_alone
from hpctk.cli.core.table import results_table
from hpctk.tasks.core.picture import draw, lines, smoothed
from hpctk.tasks.core.result import document, entry


def rank(**changes):
    curve = {"steps": [1, 2], "seconds": [0.5, 1.0], "sent_bytes": [0, 3_000_000], "losses": [2.0, 0.5]}
    return {
        "metrics": {"accuracy": 0.875, "test loss": 0.4}, "loss": 0.5, "seconds": 1.0, "steps": 2, "rounds": 1,
        "sent_bytes": 3_000_000, "complete": True, "parameters_sha256": "ab", "counts": {"rounds": 1},
        "curve": curve, **changes,
    }  # fmt: skip


def whole(methods=("mean", "saef", "celgc")):
    return document("digits", 2, {}, {name: entry({}, [rank(), rank()]) for name in methods})


def test_there_is_a_line_for_every_method():
    drawn = lines(whole())
    assert [line.method for line in drawn] == ["mean", "saef", "celgc"]
    assert drawn[0].megabytes == [0.0, 3.0]
    assert drawn[0].seconds == [0.5, 1.0]
    assert drawn[0].losses == pytest.approx([1.0, 1.0])


def test_losses_that_no_logarithm_has_are_left_out():
    result = whole(("mean",))
    result["methods"]["mean"]["curve"]["losses"] = [None, 0.0]
    assert lines(result)[0].losses == []


def test_smoothing_keeps_length_and_constants():
    assert smoothed([2.0] * 9) == pytest.approx([2.0] * 9)
    assert smoothed([1.0, 4.0], width=3) == pytest.approx([2.0, 2.0])
    assert smoothed([1.0, 8.0, 1.0, 8.0], width=3) == pytest.approx([8**0.5, 2.0, 4.0, 8**0.5])


@pytest.mark.parametrize("methods", [("mean",), tuple(f"m{i}" for i in range(12))], ids=["one", "twelve"])
def test_the_picture_opens(tmp_path, methods):
    from matplotlib.image import imread

    draw(whole(methods), tmp_path / "folder" / "picture.png")
    pixels = imread(tmp_path / "folder" / "picture.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 800
    # More than white paper and black text.
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[2])[::50].tolist()}) > 10
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["picture.png"]


def test_a_run_without_any_point_can_be_drawn(tmp_path):
    empty = {"steps": [], "seconds": [], "sent_bytes": [], "losses": []}
    result = document("digits", 1, {}, {"mean": entry({}, [rank(curve=empty)])})
    draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_the_dearest_rank():
    slow = rank(sent_bytes=5_000_000, seconds=9.0, rounds=3)
    early = rank(complete=False, sent_bytes=None, metrics={"accuracy": None})
    text = results_table({"saef": entry({}, [rank(), slow]), "mean": entry({}, [early])})
    # Of the held-out data, 0.4; not the 0.5 of the last training steps.
    assert text.splitlines()[0].split()[:4] == ["method", "accuracy", "test", "loss"]
    assert text.splitlines()[2].split() == ["saef", "87.5%", "0.4", "2", "2", "5", "MB", "9.0", "-"]
    assert "MPI does not tell" in text
    assert text.endswith("ended by the time budget: mean")


def test_the_table_predicts_a_step_on_a_network():
    # A step alone took 0.25 s at best; a million gradients need 60 ms on such a network, models every 8 steps less.
    curve = {"steps": [1, 2, 4, 6], "seconds": [3.0, 4.0, 4.5, 5.5], "sent_bytes": [0] * 4, "losses": [1.0] * 4}
    one = rank(curve=curve, params=1_000_000)
    settings = {
        "mean": {"method": "Mean", "compressor": None},
        "saef": {"method": "SAEF", "compressor": {"compressor": "TopK", "density": 0.01}, "server": None, "period": 1},
        "celgc": {"method": "CELGC", "clip": 0.5, "period": 8, "compressor": None},
        "qsgd": {"method": "Mean", "compressor": {"compressor": "QSGD", "bits": 4}},
    }
    entries = {name: entry(given, [one, one]) for name, given in settings.items()}
    assert step_alone(entries) == pytest.approx(0.25)
    steps = predicted(entries)
    assert 0.25 < steps["celgc"] < steps["saef"] < steps["mean"] < 0.33
    assert steps["qsgd"] is None
    text = results_table(entries)
    assert text.endswith("predicted: a step at 1 Gbit/s on 16 ranks, one to a node")
    assert [line.split()[-1] for line in text.splitlines()[2:6]] == ["ms", "ms", "ms", "-"]
    assert max(map(len, text.splitlines())) <= 80
