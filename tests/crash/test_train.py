"""The bundled job as users start it."""

import json
import sys

import pytest
from jobs import ROOT, mpirun, run

TRAIN = [sys.executable, "-m", "mpi4py", "-m", "hpctk", "train", "digits"]


def test_digits_trains_and_accounts(tmp_path):
    target = tmp_path / "result.json"
    ended = run(mpirun(4, *TRAIN, "--epochs", "8", "--json", str(target)), timeout_s=120)
    assert ended.code == 0, ended.output
    document = json.loads(target.read_text())
    assert len(document["results"]) == 4
    # The model has 17226 parameters; a ring sends 2*3/4 of them in each step, give or take a block's rounding.
    parameters = 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10
    for result in document["results"]:
        assert result["accuracy"] > 0.9
        wanted = result["steps"] * parameters * 4 * 2 * 3 / 4
        assert result["sent_bytes"] == pytest.approx(wanted, rel=1e-3)
    assert {result["accuracy"] for result in document["results"]} == {document["results"][0]["accuracy"]}
    assert "sent per rank" in ended.output


def test_the_same_seed_gives_the_same_result(tmp_path):
    losses = []
    for name in ("a.json", "b.json"):
        ended = run(mpirun(2, *TRAIN, "--epochs", "2", "--json", str(tmp_path / name)), timeout_s=120)
        assert ended.code == 0, ended.output
        losses.append([result["loss"] for result in json.loads((tmp_path / name).read_text())["results"]])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--epochs", "0"], "epochs=0: allowed are 1 to"),
        (["--schedule", "star"], "known are ring"),
        (["--batch", "1497"], "need 2994 images"),
        (["--json", "no/such/folder/x.json", "--epochs", "1"], "No such file"),
    ],
)
def test_bad_settings(words, wanted):
    ended = run(mpirun(2, *TRAIN, *words), timeout_s=120)
    assert ended.code != 0
    assert wanted in ended.output
    assert "Traceback" not in ended.output


def test_quickstart_refuses_nonsense():
    ended = run([str(ROOT / "launch" / "quickstart"), "--ranks", "many"])
    assert ended.code == 2
    assert "number of ranks" in ended.output
