"""Statistics of jobs that end badly, or whose disk is full: what was written is there, and training does not care."""

import numpy as np
import pytest
from jobs import run_ranks
from killed_statistics import kill_and_look
from small_disk import mounted

import hpctk


def test_killed_ranks_leave_files_that_can_be_read(tmp_path, monkeypatch, capsys):
    kill_and_look(tmp_path, monkeypatch, capsys, kills=2)


#: In a function, as most programs: when it returns, the optimizer is gone.
TRAIN = """
    import os, sys, torch, hpctk

    def main():
        model = torch.nn.Linear(3, 1)
        opt = hpctk.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model, schedule="ring"
        )
        for step in range({steps}):
            opt.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            opt.step()
        {then}
        print("trained", opt.stats.steps, flush=True)

    main()
"""


@pytest.fixture
def small_disk(tmp_path):
    """A disk with enough room for two files to begin with, not for them to grow."""
    with mounted(tmp_path / "disk", "4500k") as disk:
        yield disk


def test_a_disk_that_fills_up(tmp_path, small_disk):
    """Training goes on; each rank that has to stop says so once; what was written before is there."""
    program = TRAIN.format(steps=3000, then="")
    settings = {"HPCTK_STATS": str(small_disk / "stats"), "HPCTK_STATS_FLUSH_S": "0.05"}
    ended = run_ranks(2, program, tmp_path, timeout_s=120, **settings)
    assert ended.code == 0, ended.output
    assert ended.output.count("trained 3000") == 2
    warned = ended.output.count("no more statistics on this rank")
    assert 1 <= warned <= 2, ended.output
    assert "No space left on device" in ended.output
    assert "Traceback" not in ended.output
    (recording,) = hpctk.stats.load(small_disk / "stats").recordings
    for rank in recording.ranks.values():
        calls = rank.table("calls")["call"]
        assert len(calls) > 0
        np.testing.assert_array_equal(calls, np.arange(len(calls)))
    assert not list((small_disk / "stats").rglob(".*"))


@pytest.mark.parametrize(
    "then",
    ["raise ValueError('of the user')", pytest.param("sys.exit(3)", marks=pytest.mark.full), "os.abort()"],
    ids=["exception", "exit", "abort"],
)
def test_a_job_that_fails_leaves_what_it_flushed(tmp_path, then):
    settings = {"HPCTK_STATS": str(tmp_path / "stats"), "HPCTK_STATS_FLUSH_S": "0"}
    ended = run_ranks(2, TRAIN.format(steps=5, then=then), tmp_path, **settings)
    assert ended.code != 0
    (recording,) = hpctk.stats.load(tmp_path / "stats").recordings
    assert set(recording.ranks) == {0, 1}
    for rank in recording.ranks.values():
        assert rank.table("steps")["step"].tolist() == [0, 1, 2, 3, 4]


def test_a_job_that_ends_closes_its_files(tmp_path):
    ended = run_ranks(2, TRAIN.format(steps=5, then=""), tmp_path, HPCTK_STATS=str(tmp_path / "stats"))
    assert ended.code == 0, ended.output
    (recording,) = hpctk.stats.load(tmp_path / "stats").recordings
    for rank in recording.ranks.values():
        assert rank.attributes["state"] == "closed"
        assert rank.table("steps")["step"].tolist() == [0, 1, 2, 3, 4]
