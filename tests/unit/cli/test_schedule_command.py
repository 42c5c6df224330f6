"""`hpctk schedule`, as a user types it."""

import json
import subprocess
import sys

import pytest

from hpctk.cli import main


def output(capsys, *words):
    assert main(["schedule", *words]) == 0
    return capsys.readouterr().out


def test_list_names_every_schedule(capsys):
    text = output(capsys, "list")
    for name in ("ring", "rotation", "recursive_doubling", "halving_doubling", "binomial", "hierarchical", "mpi"):
        assert f"\n{name}" in f"\n{text}"
    assert {entry["name"] for entry in json.loads(output(capsys, "list", "--json"))} >= {"ring", "binomial"}


def test_show_draws_each_round(capsys):
    text = output(capsys, "show", "ring", "--ranks", "3")
    assert "3 ranks" in text
    assert len([line for line in text.splitlines() if line.strip()[:1].isdigit()]) == 4


def test_price_is_sorted_and_counts_the_volume(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HPCTK_CALIBRATION", str(tmp_path / "none.json"))
    entries = json.loads(output(capsys, "price", "--ranks", "4", "--bytes", "24e6", "--json"))
    seconds = [entry["seconds"] for entry in entries]
    assert seconds == sorted(seconds)
    ring = next(entry for entry in entries if entry["name"] == "ring")
    assert (ring["rounds"], ring["sent_bytes"]) == (6, 36e6)


def test_prices_65536_ranks_without_walking_through_them(capsys, monkeypatch, tmp_path):
    from hpctk.schedules.core.plan import Plan

    monkeypatch.setenv("HPCTK_CALIBRATION", str(tmp_path / "none.json"))
    monkeypatch.setattr(Plan, "rounds", lambda self, rank: pytest.fail("walked through the rounds"))
    assert "hierarchical" in output(capsys, "price", "--ranks", "65536", "--bytes", "1e9", "--per-node", "8")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["show", "star"], "known are ring"),
        (["show", "ring", "--kind", "broadcast"], "knows allreduce"),
        (["price", "--ranks", "0"], "1 or more"),
        (["price", "--bytes", "1.5"], "whole number"),
    ],
)
def test_bad_words(capsys, words, wanted):
    assert main(["schedule", *words]) == 2
    assert wanted in capsys.readouterr().err


def test_starts_no_mpi():
    program = (
        "import sys; from hpctk.cli import main; main(['schedule', 'price']); "
        "assert 'mpi4py.MPI' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
