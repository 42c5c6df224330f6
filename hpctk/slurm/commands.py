"""Slurm's own commands: is sbatch there, does it take a script, submit it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from hpctk.errors import HpctkError, SettingError

#: Seconds for a controller that is slow to answer.
ANSWER_S = 120


def find_sbatch() -> str:
    """Return where sbatch is; SettingError where it is not, or cannot know of any Slurm."""
    found = shutil.which("sbatch")
    if found is None:
        raise SettingError(
            "no sbatch here: submit on a login node of a cluster that runs Slurm. `hpctk slurm render` works without"
        )
    conf = os.environ.get("SLURM_CONF")
    if conf and not os.path.exists(conf):
        # sbatch itself would look for it for a minute.
        raise SettingError(f"SLURM_CONF={conf}: no such file; is that Slurm down?")
    return found


def check(script: Path) -> str:
    """Return what `sbatch --test-only` says of a script; HpctkError where Slurm would not run it."""
    done = _sbatch("--test-only", script)
    said = _without_prefix(done.stderr)
    if "configuration source" in said:
        raise SettingError(
            "sbatch is here, but it finds no configuration of Slurm: submit on a login node, or set SLURM_CONF"
        )
    if done.returncode != 0:
        raise HpctkError(f"Slurm does not take this job: {said}. The script is {script}")
    return said


def submit(script: Path) -> str:
    """Submit a script; return the id of the job."""
    done = _sbatch("--parsable", script)
    if done.returncode != 0:
        raise HpctkError(f"sbatch failed: {_without_prefix(done.stderr)}. The script is {script}")
    # With the cluster behind it, where there are several.
    return done.stdout.strip().partition(";")[0]


def _sbatch(option: str, script: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [find_sbatch(), option, str(script)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=ANSWER_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HpctkError(f"sbatch did not answer within {ANSWER_S} s: is Slurm's controller up?") from None
    except OSError as error:
        raise HpctkError(f"sbatch cannot be run: {error.strerror}") from None


def _without_prefix(text: str) -> str:
    """Return sbatch's messages in one line, without its name before each."""
    lines = [re.sub(r"^sbatch: (error: |fatal: )?", "", line).strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line) or "it does not say why"
