"""The environment variables hpctk reads, each declared as a setting; no other module but hpctk/log.py reads HPCTK_*."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctk.errors import SettingError
from hpctk.log import LEVELS
from hpctk.settings import Setting

_ROWS = "the most rows of calls, and of steps, in a rank's statistics; 0: sums alone"
_GPU = "set by the Slurm template for GPUs: the GPU of this rank, among those it sees"
_RING = "set by the benchmarks of a checkout: the bytes beyond which Open MPI takes its segmented ring"

#: Every variable: `hpctk --help`, `hpctk doctor` and docs/settings.md list them from here.
VARIABLES = {
    "HPCTK_TIMEOUT_S": Setting("seconds a rank waits for its peers before it gives up", float, 600.0, above=0),
    "HPCTK_GPU_AWARE": Setting(
        "1: MPI takes device memory, 0: stage through the host",
        default=None, choices=("0", "1"), shown="asked from MPI",
    ),
    "HPCTK_CALIBRATION": Setting(
        "the file `hpctk calibrate` writes, for schedule='auto'",
        Path, None, shown="~/.config/hpctk/calibration.json",
    ),
    "HPCTK_AUTO": Setting(
        "learn: schedule='auto' tries what could be chosen in the first calls of each size, and keeps what was fastest",
        default="fixed", choices=("fixed", "learn"),
    ),
    "HPCTK_STATS": Setting(
        "a folder: write statistics of every rank there", Path, None, shown="none; hpctk train --run has its own"
    ),
    "HPCTK_STATS_EVENTS": Setting(_ROWS, int, 200_000, at_least=0),
    "HPCTK_STATS_FLUSH_S": Setting(
        "seconds after which statistics files are brought up to date", float, 5.0, at_least=0
    ),
    "HPCTK_PROGRESS": Setting(
        "bar: one line rewritten, lines: a line every 10 s",
        default=None, choices=("bar", "lines", "none"), shown="bar on a terminal, else lines",
    ),
    "HPCTK_ON_LOST_RANK": Setting(
        "what DistributedOptimizer does when a rank is gone: end the job, or go on without it",
        default="raise", choices=("raise", "shrink"),
    ),
    "HPCTK_BUDDY": Setting(
        "steps after which each rank gives the next one a copy of its residuals, to be shared out when it is gone",
        int, None, at_least=1, shown="never",
    ),
    "HPCTK_RESPAWN": Setting(
        "set by hpctk mpirun --respawn: how often ranks may still leave, to be begun anew with those that were lost",
        int, None, at_least=0,
    ),
    "HPCTK_STRICT": Setting(
        "1: ranks compare the names of their collective calls, and say who is elsewhere",
        default=None, choices=("0", "1"), shown="0",
    ),
    "HPCTK_LOG": Setting("the level of the logger `hpctk`", default=None, choices=LEVELS, shown="warning"),
    "HPCTK_VENV": Setting("the virtual environment of a checkout's scripts", default=None, shown=".venv"),
    "HPCTK_SLURM_SITE": Setting(
        "defaults of `hpctk slurm`, a TOML file", Path, None, shown="~/.config/hpctk/slurm.toml"
    ),
    "HPCTK_TORCH_INDEX": Setting(
        "an index where the set-up of a checkout looks for torch, besides pip's own", default=None
    ),
    "HPCTK_WHEELS": Setting("a folder of wheels where the set-up of a checkout looks, besides pip's own", Path, None),
    "HPCTK_CACHE": Setting("where `hpctk setup horovod` keeps what it built", Path, None, shown="~/.cache/hpctk"),
    "HPCTK_RUN": Setting("set by the Slurm templates: the folder of the run", Path, None),
    "HPCTK_GPU": Setting(_GPU, int, None, at_least=0),
    "HPCTK_BENCH_MPI_RING": Setting(_RING, int, None, at_least=0),
    "HPCTK_CLUSTER_NAME": Setting("set by hpctk cluster: the name of the emulated cluster", default=None),
    "HPCTK_CLUSTER_HOSTS": Setting(
        "set by hpctk cluster: how many emulated hosts there are", int, None, at_least=1
    ),
    "HPCTK_CLUSTER_RATE": Setting("set by hpctk cluster: the rate of their links", default=None),
    "HPCTK_CLUSTER_HEAD": Setting("set by hpctk cluster: the address of the first host", default=None),
}  # fmt: skip


def read(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Return the value of a variable; its default, often None, where it is empty or not set.

    Raises
    ------
    SettingError
        For a value that is not allowed; names the variable, the value and what is allowed.
    """
    text = environ.get(name, "")
    return VARIABLES[name].parse(name, text) if text else VARIABLES[name].default


def readable_timeout_s() -> float:
    """Return HPCTK_TIMEOUT_S, the default where it is nonsense: the ranks must meet before they can say so."""
    try:
        seconds = read("HPCTK_TIMEOUT_S")
    except SettingError:
        seconds = VARIABLES["HPCTK_TIMEOUT_S"].default
    return float(seconds)


def complaints(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what is wrong with the values of HPCTK_* variables, a sentence each."""
    found = []
    for name in VARIABLES:
        try:
            read(name, environ)
        except SettingError as error:
            found.append(str(error))
    return found


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the HPCTK_* variables that nothing reads, most likely misspelt."""
    return sorted(name for name in environ if name.startswith("HPCTK_") and name not in VARIABLES)


def calibration_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the calibration is kept."""
    return read("HPCTK_CALIBRATION", environ) or _configured("calibration.json", environ)


def slurm_site_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the site's defaults for job scripts are."""
    return read("HPCTK_SLURM_SITE", environ) or _configured("slurm.toml", environ)


def slurm_site(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the site's defaults: one that was named must be there, the usual one need not."""
    file = slurm_site_file(environ)
    return file if read("HPCTK_SLURM_SITE", environ) or file.exists() else None


def _configured(name: str, environ: Mapping[str, str]) -> Path:
    config = environ.get("XDG_CONFIG_HOME", "") or os.path.expanduser("~/.config")
    return Path(config) / "hpctk" / name
