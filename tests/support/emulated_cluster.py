"""The emulated cluster of launch/cluster, for tests: how to drive it, and whether it can be had here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "launch" / "cluster"
TIMEOUT_S = 60

if os.geteuid() != 0:
    reason = "an emulated cluster needs root"
elif not shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
    reason = "not installed: iproute2, for an emulated cluster (apt-get install iproute2)"
else:
    reason = ""
needs_cluster = pytest.mark.skipif(bool(reason), reason=reason)


def environment():
    job = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(job)}
    return kept | {"HPCTK_VENV": sys.prefix}


def cluster(*arguments):
    return subprocess.run(
        [CLUSTER, *map(str, arguments)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def succeed(*arguments):
    done = cluster(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
