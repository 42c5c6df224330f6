"""Training that is killed while it writes statistics as often as it can, and what is left of them."""

from __future__ import annotations

import os
import random
import signal
import time

import h5py
import numpy as np
from interrupted import Running

import hpctk
from hpctk.cli import main

METHODS = ("mean_topk", "lgrawa", "sasg", "saef_onebit")


def kill_and_look(tmp_path, monkeypatch, capsys, kills):
    """Kill one rank or both at a random moment, so often; all files must be readable up to their last flush."""
    run, draws = tmp_path / "stats", random.Random(kills)
    monkeypatch.setenv("HPCTK_STATS", str(run))
    # After every call: so that kills come while the file is written, and while it grows.
    monkeypatch.setenv("HPCTK_STATS_FLUSH_S", "0")
    for number in range(kills):
        job = Running(tmp_path / "job", method=METHODS[number % len(METHODS)], every=10**6, pause_s=0)
        pids = [job.pid(rank) for rank in (0, 1)]
        time.sleep(draws.uniform(0, 1.0))
        for pid in draws.choice((pids, pids[:1], pids[1:])):
            os.kill(pid, signal.SIGKILL)
        code, output = job.ended()
        assert code != 0, output
        (tmp_path / "job" / "kept").rename(tmp_path / f"kept-{number}")
        look(run / f"{number:03d}")
    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    assert "running" in text or "not closed" in text, text
    (run / "000" / "rank-00001.h5").unlink()
    assert main(["report", str(run)]) == 0
    assert "missing" in capsys.readouterr().out


def look(folder):
    """Read everything that two killed ranks have left, by HDF5 itself and by hpctk."""
    assert sorted(path.name for path in folder.glob("*.h5")) == ["rank-00000.h5", "rank-00001.h5"]
    (recording,) = hpctk.stats.load(folder).recordings
    assert recording.missing == {}
    for rank in recording.ranks.values():
        with h5py.File(rank.path) as file:
            file.visititems(lambda _, item: item[:] if isinstance(item, h5py.Dataset) else None)
        calls, steps = rank.table("calls"), rank.table("steps")
        assert len(calls["call"]) > 0
        np.testing.assert_array_equal(calls["call"], np.arange(len(calls["call"])))
        np.testing.assert_array_equal(steps["step"], np.arange(len(steps["step"])))
        assert (np.diff(calls["end_s"]) > -1).all()
        assert set(calls["operation"]) <= {b"allreduce", b"allgather", b"broadcast", b"flags", b"reduce_scatter"}
        assert rank.table("summary")["calls"].sum() >= len(calls["call"])
