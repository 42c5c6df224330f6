"""Run a training script for a few steps, and write down how long they took: `python -m hpctk.advise.step_probe`.

A process of its own: the script may do what it likes to it. A step lasts from the end of one `optimizer.step()` to the
end of the next, so that loading data, forward and backward are in it. Of several optimizers the one with most
parameters counts. The script is ended after the last step that is looked at.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hpctk.errors import SettingError

WARM_UP, COUNTED = 3, 12
#: The script gets so long.
LIMIT_S = 300.0
#: What mpirun leaves in the environment of its ranks: the script is none of them.
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL")


class Enough(BaseException):
    """Raised inside the script after its last step; no `except Exception` of the script takes it."""


class Watch:
    """Hears of every optimizer's steps."""

    def __init__(self) -> None:
        self._ended: dict[int, list[float]] = {}
        self._params: dict[int, int] = {}
        self._held: list[Any] = []

    def __call__(self, optimizer: Any, *_: Any) -> None:
        """Take the end of a step. Raise Enough where it was the last."""
        key = id(optimizer)
        if key not in self._ended:
            self._held.append(optimizer)
            self._ended[key] = []
            groups = optimizer.param_groups
            self._params[key] = sum(p.numel() for group in groups for p in group["params"] if p.requires_grad)
        self._ended[key].append(time.perf_counter())
        if len(self._ended[self._largest()]) > WARM_UP + COUNTED:
            raise Enough

    def _largest(self) -> int:
        return max(self._params, key=lambda key: self._params[key])

    def result(self) -> dict[str, float]:
        """Return parameters, steps and the median seconds of a step; no seconds where there were too few."""
        if not self._ended:
            return {"params": 0, "steps": 0}
        ended = self._ended[self._largest()]
        spans = [after - before for before, after in pairwise(ended)]
        counted = spans[WARM_UP:] or spans
        found: dict[str, float] = {"params": self._params[self._largest()], "steps": len(ended)}
        return {**found, "seconds": median(counted)} if counted else found


def main(words: Sequence[str]) -> None:
    """Run the script words[1:], and write what was seen to the file words[0]."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    target, script, *_ = words
    watch = Watch()
    register_optimizer_step_post_hook(watch)
    sys.argv = list(words[1:])
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except (Enough, SystemExit):
        pass
    finally:
        Path(target).write_text(json.dumps(watch.result()))
    # What the script left running, such as workers of a loader or a process group, is not waited for.
    sys.stdout.flush()
    os._exit(0)


def probe(script: Path, words: Sequence[str] = ()) -> tuple[int, float]:
    """Return the parameters and the seconds of a step of a training script, which is run as one rank.

    Raise SettingError if it does not train, or fails.
    """
    if not script.is_file():
        raise SettingError(f"--script {script}: no such file")
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "step.json"
        command = [sys.executable, "-m", "hpctk.advise.step_probe", str(target), str(script), *words]
        try:
            # What it prints is no part of the advice.
            ended = subprocess.run(command, stdout=sys.stderr, env={**single, **environ}, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise SettingError(f"--script {script}: no {WARM_UP + COUNTED + 1} steps in {LIMIT_S:.0f} s") from None
        found = json.loads(target.read_text()) if target.exists() else {}
    if ended.returncode:
        raise SettingError(f"--script {script}: ended with status {ended.returncode}; its message is above")
    if not found.get("steps"):
        raise SettingError(
            f"--script {script}: no step of a torch optimizer was seen, and hpctk's own do not count: give a script "
            "without hpctk, or --params and --step-seconds"
        )
    if "seconds" not in found:
        raise SettingError(f"--script {script}: {found.get('steps', 0)} optimizer steps; need 2 or more to time one")
    return int(found["params"]), float(found["seconds"])


if __name__ == "__main__":
    main(sys.argv[1:])
