"""What describes a recording: who, where, with what. Never a secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence

from hpctk._version import __version__
from hpctk.comm.world import World

#: The only environment variables that are kept. Others may hold anything.
VARIABLES = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_MPI_TYPE", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "HPCTK_TIMEOUT_S", "HPCTK_GPU_AWARE", "OMPI_MCA_btl", "UCX_TLS", "UCX_NET_DEVICES",
    "FI_PROVIDER", "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD",
)  # fmt: skip

#: Words in a name that say its value is nobody's business.
SECRET = re.compile(
    r"secret|token(?!i)|passw|passphrase|passcode|pwd|credential|authori[sz]ation|bearer|cookie|signature|"
    r"(^|[^a-z0-9])(auth|keys?|pat|pw|pass|sig)([^a-z0-9]|$)|apikey",
    re.IGNORECASE,
)
#: The option of one letter that many programs take a password by, in the next word or in its own: mysql -pPASSWORD.
SHORT = "-p"
#: What keys look like by themselves: long, of letters and digits that no person has chosen.
KEY = re.compile(r"(?=[^\s]*[a-z])(?=[^\s]*[A-Z])(?=[^\s]*[0-9])[A-Za-z0-9+/=_-]{20,}|[0-9a-fA-F]{32,}")
#: Name and password in an address.
USERINFO = re.compile(r"(?<=://)[^\s@]*@")
HIDDEN = "***"
#: The longest text that is kept of a command line.
COMMAND_BYTES = 4096
PACKAGES = ("numpy", "torch", "h5py", "mpi4py", "horovod", "numba")


def describe(here: World) -> dict[str, str | int | float]:
    """Return what is known of this rank and of what it runs on."""
    node = next(i for i, ranks in enumerate(here.nodes) if here.rank in ranks)
    return {
        "rank": here.rank, "size": here.size, "node": node, "nodes": len(here.nodes),
        "local_rank": here.local_rank, "local_size": here.local_size,
        "host": socket.gethostname(), "pid": os.getpid(),
        "command": command(sys.argv), "platform": platform.platform(), "python": platform.python_version(),
        "hpctk": __version__, **versions(),
        "communicator": here.name, "library": here.library,
        "gpu_aware": int(here.gpu.aware), "gpu_aware_because": here.gpu.because,
    }  # fmt: skip


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables worth keeping."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def versions() -> dict[str, str]:
    """Return the versions of what is installed here, by package."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def command(words: Sequence[str]) -> str:
    """Return a command line as one would type it, without what might be a secret.

    Hidden are the values of options such as --api-key and -p, up to the next option, and every other word that speaks
    of a secret or looks like one: rather too much than too little.
    """
    shown, hiding = [], False
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            hiding = name == SHORT or bool(SECRET.search(name))
            if word.startswith(SHORT) and not hiding:
                shown.append(SHORT + HIDDEN)
                continue
            shown.append(f"{name}={HIDDEN if hiding else _shown(value)}" if equals else word)
        else:
            shown.append(HIDDEN if hiding else _shown(word))
    return shlex.join(shown)[:COMMAND_BYTES]


def _shown(value: str) -> str:
    return HIDDEN if SECRET.search(value) or KEY.search(value) else USERINFO.sub(f"{HIDDEN}@", value)
