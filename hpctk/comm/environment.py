"""The environment variables hpctk reads, each checked; besides HPCTK_LOG (hpctk/log.py) no other module reads one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctk.errors import SettingError
from hpctk.log import level as log_level

#: Every variable with what it means, for `hpctk doctor` and the documentation.
VARIABLES = {
    "HPCTK_TIMEOUT_S": "seconds a rank waits for its peers before it gives up [600]",
    "HPCTK_GPU_AWARE": "1: MPI takes device memory, 0: stage through the host [asked from MPI]",
    "HPCTK_CALIBRATION": "the file `hpctk calibrate` writes, for schedule='auto' [~/.config/hpctk/calibration.json]",
    "HPCTK_STATS": "a folder: write statistics of every rank there [none; hpctk train --run has its own]",
    "HPCTK_STATS_EVENTS": "the most rows of calls, and of steps, in a rank's statistics; 0: sums alone [200000]",
    "HPCTK_STATS_FLUSH_S": "seconds after which statistics files are brought up to date [5]",
    "HPCTK_PROGRESS": "bar: one line rewritten, lines: a line every 10 s, none [bar on a terminal, else lines]",
    "HPCTK_LOG": "debug, info, warning, error or critical: the level of the logger `hpctk` [warning]",
    "HPCTK_VENV": "the virtual environment of the scripts in launch/ [.venv]",
    "HPCTK_CLUSTER_NAME": "set by launch/cluster: the name of the emulated cluster",
    "HPCTK_BENCH_MPI_RING": "set by launch/bench: the bytes beyond which Open MPI takes its segmented ring",
    "HPCTK_CLUSTER_HOSTS": "set by launch/cluster: how many emulated hosts there are",
    "HPCTK_CLUSTER_RATE": "set by launch/cluster: the rate of their links",
    "HPCTK_CLUSTER_HEAD": "set by launch/cluster: the address of the first host",
    "HPCTK_RUN": "set by the Slurm templates: the folder of the run",
    "HPCTK_GPU": "set by launch/bind-gpu and the Slurm template for GPUs: the GPU of this rank, among those it sees",
    "HPCTK_SLURM_SITE": "defaults of `hpctk slurm`, a TOML file [~/.config/hpctk/slurm.toml]",
    "HPCTK_TORCH_INDEX": "an index where launch/setup looks for torch, besides pip's own [none]",
    "HPCTK_WHEELS": "a folder of wheels where launch/setup looks, besides pip's own [none]",
    "HPCTK_CACHE": "where launch/setup keeps built Horovod wheels [~/.cache/hpctk]",
}

DEFAULT_TIMEOUT_S = 600.0


def timeout_s(environ: Mapping[str, str] = os.environ) -> float:
    """Return the deadline for waiting on other ranks, from HPCTK_TIMEOUT_S."""
    text = environ.get("HPCTK_TIMEOUT_S", "")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise SettingError(f"HPCTK_TIMEOUT_S={text!r}: need a number of seconds above 0, such as 600")
    return seconds


def readable_timeout_s() -> float:
    """Return HPCTK_TIMEOUT_S, the default where it is nonsense: the ranks must meet before they can say so."""
    try:
        return timeout_s()
    except SettingError:
        return DEFAULT_TIMEOUT_S


def gpu_aware(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return what HPCTK_GPU_AWARE says, None where it is not set."""
    text = environ.get("HPCTK_GPU_AWARE", "")
    if not text:
        return None
    if text not in ("0", "1"):
        raise SettingError(f"HPCTK_GPU_AWARE={text!r}: need 0 (stage through the host) or 1 (device to MPI)")
    return text == "1"


def stats_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where HPCTK_STATS wants statistics, None where it is not set."""
    text = environ.get("HPCTK_STATS", "")
    return Path(text) if text else None


def stats_settings(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings of statistics that the environment gives, by name."""
    found: dict[str, Any] = {}
    events, flush_s = environ.get("HPCTK_STATS_EVENTS", ""), environ.get("HPCTK_STATS_FLUSH_S", "")
    if events:
        if not events.isdecimal():
            raise SettingError(f"HPCTK_STATS_EVENTS={events!r}: need a number of rows, 0 for sums alone")
        found["events"] = int(events)
    if flush_s:
        try:
            found["flush_s"] = float(flush_s)
        except ValueError:
            found["flush_s"] = math.nan
        if not 0 <= found["flush_s"] < math.inf:
            raise SettingError(f"HPCTK_STATS_FLUSH_S={flush_s!r}: need a number of seconds, such as 5")
    return found


def complaints(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what is wrong with the values of HPCTK_* variables, a sentence each."""
    found = []
    for read in (timeout_s, gpu_aware, progress, stats_settings, log_level):
        try:
            read(environ)
        except SettingError as error:
            found.append(str(error))
    return found


def progress(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return how progress is to be shown, None where HPCTK_PROGRESS is not set."""
    text = environ.get("HPCTK_PROGRESS", "")
    if text not in ("", "bar", "lines", "none"):
        raise SettingError(f"HPCTK_PROGRESS={text!r}: need bar, lines or none")
    return text or None


def calibration_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the calibration is kept."""
    return _configured(environ, "HPCTK_CALIBRATION", "calibration.json")


def slurm_site_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the site's defaults for job scripts are."""
    return _configured(environ, "HPCTK_SLURM_SITE", "slurm.toml")


def slurm_site(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the site's defaults: one that was named must be there, the usual one need not."""
    file = slurm_site_file(environ)
    return file if environ.get("HPCTK_SLURM_SITE") or file.exists() else None


def _configured(environ: Mapping[str, str], variable: str, name: str) -> Path:
    given = environ.get(variable, "")
    if given:
        return Path(given)
    config = environ.get("XDG_CONFIG_HOME", "") or os.path.expanduser("~/.config")
    return Path(config) / "hpctk" / name


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the HPCTK_* variables that nothing reads, most likely misspelt."""
    return sorted(name for name in environ if name.startswith("HPCTK_") and name not in VARIABLES)
