"""What must hold of a method, tried on ranks of its own: processes that gloo joins, without MPI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def check_method(
    name: str,
    *,
    ranks: int = 2,
    steps: int = 24,
    lr: float = 0.05,
    momentum: float = 0.9,
    timeout_s: float = 300,
    **settings: Any,
) -> None:
    """Hold a method to what hpctk's own are held to. Raise AssertionError with what does not hold.

    On `ranks` processes that this one starts, a small regression is trained:

    - all ranks come to the same model, and what they hold alike (`shared_state`) is the same after every step
    - two trainings come to the same bits, and the loss falls
    - a training that goes on from a checkpoint comes to the bits of one that was not interrupted
    - a gradient that is NaN on one rank raises on all of them, or is skipped by all where that is asked for
    - ranks may run out of data at different times
    - a parameter may have a gradient on one rank only
    - a gradient method works under DistributedDataParallel, too

    Parameters
    ----------
    name : str
        As on a command line, or as "package.module:Class".
    ranks, steps : int
    lr, momentum : float
        Of SGD. Methods that are made for SGD without momentum, as SASG at its defaults is, need momentum=0.
    timeout_s : float
        Seconds after which ranks that hang are ended.
    **settings
        Of the method, as values that JSON knows; compressors as texts, such as compressor="topk:0.1".
    """
    with tempfile.TemporaryDirectory(prefix="hpctk-testing-") as folder:
        how = {"steps": steps, "lr": lr, "momentum": momentum, "folder": folder}
        job = json.dumps({"name": name, "settings": settings, **how})
        outputs = [Path(folder) / f"{rank}.log" for rank in range(ranks)]
        running = [_started(job, rank, ranks, outputs[rank], timeout_s) for rank in range(ranks)]
        late = []
        try:
            for rank, process in enumerate(running):
                try:
                    process.wait(timeout_s)
                except subprocess.TimeoutExpired:
                    late.append(rank)
        finally:
            for process in running:
                process.kill()
                process.wait()
        texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    if late:
        raise AssertionError(f"{name}: ranks {late} did not end within {timeout_s:g} s\n{_shown(texts)}")
    if any(process.returncode for process in running):
        raise AssertionError(f"{name} on {ranks} ranks: {_reason(texts)}\n{_shown(texts)}")


def _started(job: str, rank: int, ranks: int, output: Path, timeout_s: float) -> subprocess.Popen[bytes]:
    # Waits of hpctk end before ours, with a word on who waited for whom.
    environ = {
        "HPCTK_TIMEOUT_S": str(timeout_s / 2), "OMP_NUM_THREADS": "1", **os.environ,
        "RANK": str(rank), "WORLD_SIZE": str(ranks),
    }  # fmt: skip
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "hpctk.testing.method_rank", job],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environ,
        )  # fmt: skip


def _reason(texts: list[str]) -> str:
    """Return what the first rank says whose check failed; else the last line of the first rank that says anything."""
    lines = [text.strip().splitlines()[-1] for text in texts if text.strip()]
    told = [line[line.index("AssertionError") :] for line in lines if "AssertionError" in line]
    return (told or lines or ["no rank said why"])[0].removeprefix("AssertionError: ")


def _shown(texts: list[str]) -> str:
    return "\n".join(f"rank {rank}:\n{text.rstrip()}" for rank, text in enumerate(texts))
