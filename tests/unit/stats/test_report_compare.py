"""Runs side by side."""

import json

import numpy as np
import pytest
from stats_memory import run

from hpctk.stats.report.account import account
from hpctk.stats.report.compare import comparison, text
from hpctk.stats.report.document import document


def documents(*runs, names=None):
    found = [document(account(one)) for one in runs]
    for i, one in enumerate(found):
        one["run"] = names[i] if names else f"runs/{'abcdefgh'[i]}/stats"
    return found


def losses(rate):
    def change(_, tables):
        tables["steps"]["loss"] = 2.0 - rate * np.arange(len(tables["steps"]))

    return change


def test_losses_are_compared_where_the_shorter_run_ended():
    dense, sparse = run(4, steps=10, change=losses(0.1)), run(4, steps=20, density=0.5, change=losses(0.05))
    found = comparison(documents(dense, sparse))
    a, b = found["runs"]
    assert found["equal"] == {
        "steps": 9, "sent_bytes": pytest.approx(60e6), "seconds": pytest.approx(0.2),
    }  # fmt: skip
    assert a["loss_at_steps"] == pytest.approx(2 - 0.9)
    assert b["loss_at_steps"] == pytest.approx(2 - 0.45)
    # 60 MB are the dense run's tenth step and the sparse run's twentieth.
    assert a["loss_at_bytes"] == pytest.approx(2 - 0.9)
    assert b["loss_at_bytes"] == pytest.approx(2 - 0.95)
    assert b["dense_wire"] == pytest.approx(2)


def test_text_shows_all_runs_within_80_columns():
    many = documents(*[run(2, steps=2) for _ in range(7)], names=[f"runs/{'long' * i}/x{i}" for i in range(7)])
    lines = text(comparison(many)).splitlines()
    assert max(map(len, lines)) <= 80
    for i in range(7):
        assert any(f"x{i}" in line for line in lines)


def test_names_are_as_short_as_tells_them_apart():
    runs = [run(1, steps=2) for _ in range(2)]
    told = [one["name"] for one in comparison(documents(*runs, names=["a/mean/stats", "b/mean/stats"]))["runs"]]
    assert told == ["a/mean", "b/mean"]
    told = [one["name"] for one in comparison(documents(*runs, names=["a/stats", "a/stats"]))["runs"]]
    assert told == ["a/stats (1)", "a/stats (2)"]


def test_what_is_missing_is_said_of_each():
    shown = text(comparison(documents(run(2, steps=2), run(3, steps=2, missing=(1,)))))
    assert "- b: rank 1 is missing: no such file" in shown


def test_runs_without_steps_or_losses():
    def nothing(_, tables):
        tables["steps"] = tables["steps"][:0]
        tables["progress"]["steps_rows"] = 0

    found = comparison(documents(run(2, change=nothing), run(2, change=nothing)))
    json.dumps(found, allow_nan=False)
    assert found["runs"][0]["loss_at_bytes"] is None
    assert "?" in text(found)
