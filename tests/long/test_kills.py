"""Fifty times SIGKILL while training saves in every step: whatever is left goes on to the same end."""

import os
import random
import signal
import time

import pytest
from interrupted import Running, digests

KILLS = 10


@pytest.mark.parametrize("method", ["saef_onebit", "sasg", "mean_topk", "lgrawa", "easgd"])
def test_ten_kills(tmp_path, method):
    """One rank or both, at any moment; the method keeps residuals, messages, or a model of its own on each rank."""
    draws, unfinished = random.Random(method), 0
    home = tmp_path / "killed"
    for _ in range(KILLS):
        job = Running(home, method=method, every=1, pause_s=0)
        pids = [job.pid(rank) for rank in (0, 1)]
        time.sleep(draws.uniform(0, 0.3))
        for pid in draws.choice((pids, pids[:1], pids[1:])):
            os.kill(pid, signal.SIGKILL)
        code, output = job.ended()
        assert code not in (0, 85), output
        assert job.checkpoints(), output
        unfinished += any(not (place / "index.json").exists() for place in (home / "kept").iterdir())
    # Saving takes most of the time here, so some kills came in the middle of it.
    assert unfinished
    steps = job.step() + 20
    seen = []
    for folder in (home, tmp_path / "straight"):
        code, output = Running(folder, steps, method=method).ended()
        assert code == 0, output
        seen.append(digests(output))
    assert len(seen[0]) == 2
    assert seen[0] == seen[1]
