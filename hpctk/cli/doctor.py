"""Say what this installation has and lacks: the first thing to put into a bug report.

Starts no MPI unless asked, so it works on a login node. Where mpi4py is not installed, or torchrun started this, a
missing MPI is no problem. The exit status is 1 if hpctk cannot train with what is here.

Examples:
  hpctk doctor
  hpctk doctor --json > doctor.json
  hpctk mpirun -n 2 hpctk doctor --mpi
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from hpctk._version import __version__
from hpctk.comm import environment, launcher
from hpctk.comm.mpi import library

#: Every fact is gathered so that a missing or broken part is a fact too, never a traceback.
Facts = dict[str, Any]

PACKAGES = ("torch", "numpy", "mpi4py", "h5py", "numba", "horovod", "matplotlib", "pytest", "pytest-mpi")

#: What runs the arithmetic of compression on the host, by whether numba compiles it.
KERNELS = {True: "compiled by numba", False: "in numpy: the same bits, slower", None: "not asked"}

#: Seconds for the imports below; torch on a cold network file system takes its time.
PROBE_S = 120
#: Run apart, because importing torch takes seconds and a broken Horovod can take the process with it.
PROBE = """
import json
facts = {}
try:
    import torch
    facts["cuda"] = torch.version.cuda
    facts["devices"] = torch.cuda.device_count()
    import torch.distributed as dist
    names = ("gloo", "nccl", "xccl", "ucc") if dist.is_available() else ()
    facts["backends"] = [name for name in names if getattr(dist, f"is_{name}_available", bool)()]
    from hpctk.kernels import compiled
    facts["kernels"] = {"compiled": compiled.missing is None, "because": str(compiled.missing or "")}
except Exception as error:
    facts["torch_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(facts), flush=True)
try:
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    import horovod.torch as hvd
    facts["horovod"] = {name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl", "cuda", "rocm")}
except Exception as error:
    facts["horovod_error"] = str(error)
print(json.dumps(facts))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print the facts and the advice as JSON")
    parser.add_argument("--mpi", action="store_true", help="start MPI, and say what only a started one can tell")


def run(options: argparse.Namespace) -> int:
    """Print the facts; on rank 0 only where MPI was started with several ranks."""
    facts = collect(start_mpi=options.mpi)
    facts["advice"] = advise(facts)
    facts["next"] = next_command(facts)
    if facts["mpi"].get("rank", 0) == 0:
        print(json.dumps(facts, indent=2) if options.json else render(facts))
    return int(essential_missing(facts))


def collect(start_mpi: bool = False) -> Facts:
    """Return the facts; with `start_mpi`, MPI is initialised in this process."""
    probed = probe()
    return {
        "hpctk": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
        "packages": {name: version(name) for name in PACKAGES},
        "torch": {key: probed[key] for key in ("cuda", "devices", "backends", "torch_error") if key in probed},
        "kernels": probed.get("kernels", {"compiled": None, "because": "not asked"}),
        "mpi": guarded(lambda: library.describe(start_mpi)),
        "launcher": launcher.variables(os.environ),
        "torchrun": {"RANK", "WORLD_SIZE"} <= os.environ.keys(),
        "horovod": probed.get("horovod") or {"error": probed.get("horovod_error", "not asked")},
        "slurm": slurm_facts(),
        "hdf5": guarded(hdf5_facts),
        "compiler": {tool: shutil.which(tool) is not None for tool in ("g++", "cmake", "make")},
        "environment": {name: os.environ[name] for name in environment.VARIABLES if name in os.environ},
        "unknown_variables": environment.unknown_variables(),
        "bad_settings": environment.complaints(),
    }


def guarded(facts: Callable[[], Facts]) -> Facts:
    """Return the facts, or the error that kept them from us."""
    try:
        return facts()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def version(package: str) -> str | None:
    """Return the installed version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def probe() -> Facts:
    """Return what a process of its own found out about torch and Horovod."""
    # Without the launcher's variables: this process is no rank of the job we may be in.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "HYDI_", "PRTE_"))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, env=environ, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        return {"torch_error": f"importing it took longer than {PROBE_S} s", "horovod_error": "not asked"}
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    ended = f"importing it ended with status {done.returncode}: {last}"
    try:
        facts: Facts = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"torch_error": ended, "horovod_error": "torch cannot be imported"}
    # It got past torch: what ended it is Horovod.
    return facts if done.returncode == 0 else {**facts, "horovod_error": ended}


def slurm_facts() -> Facts:
    """Return whether Slurm's commands are here, and what srun can start MPI with."""
    if shutil.which("sbatch") is None:
        return {"found": False}
    version = re.search(r"^slurm\S* \d.*", output(["sbatch", "--version"]), re.M)
    if version is None:
        return {"found": True, "version": None, "mpi_types": []}
    types = mpi_types(output(["srun", "--mpi=list"]))
    return {"found": True, "version": version[0].strip(), "mpi_types": types}


def mpi_types(text: str) -> list[str]:
    """Return the types in what `srun --mpi=list` prints: one in a line, others behind a colon."""
    found = re.findall(r"^\s*(?:srun: )?([a-z]\w*)\s*$", text, re.M)
    for line in re.findall(r"available:(.*)$", text, re.M):
        found += re.findall(r"\w+", line)
    return found


def hdf5_facts() -> Facts:
    """Return how h5py was built."""
    import h5py

    return {"library": h5py.version.hdf5_version, "parallel": bool(h5py.get_config().mpi)}


def output(command: list[str]) -> str:
    """Return what a command prints within 10 s, on either channel."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


def advise(facts: Facts) -> list[str]:
    """Return one sentence for each thing that is missing: what does not work, and how to mend it."""
    mpi, packages, horovod, slurm = facts["mpi"], facts["packages"], facts["horovod"], facts["slurm"]
    by_mpi = not without_mpi(facts)
    unknown = ", ".join(facts["unknown_variables"])
    compiler = "" if all(facts["compiler"].values()) else " (install g++, cmake and make first)"
    rules = {
        f"MPI cannot be loaded ({mpi.get('error')}): `pip install 'hpctk[mpi]'` gives a complete one, on a "
        "cluster load its MPI module": "error" in mpi and by_mpi,
        "no mpirun on PATH: use `hpctk mpirun`, activate the environment, or `pip install 'hpctk[mpi]'`":
            "error" not in mpi and by_mpi and not mpi.get("mpirun"),
        "MPI runs without THREAD_MULTIPLE: Horovod and asynchronous GRAWA need it":
            mpi.get("thread_level") not in (None, "MULTIPLE"),
        "no torch: `pip install torch`": packages["torch"] is None,
        f"no compiled kernels ({facts['kernels']['because']}): numpy gives the same bits, several times slower; "
        "`pip install 'hpctk[fast]'` brings numba": facts["kernels"]["compiled"] is False,
        "there are GPUs but MPI is not GPU-aware: tensors are staged through the host. If your MPI does take "
        "device memory, set HPCTK_GPU_AWARE=1":
            facts["torch"].get("devices") and by_mpi and not mpi.get("gpu_aware"),
        f"no Horovod: only hpctk.horovod needs it. `hpctk setup horovod` builds it{compiler}":
            "error" in horovod and by_mpi,
        "this Horovod was built without MPI, which hpctk.horovod needs: rebuild it with HOROVOD_WITH_MPI=1":
            horovod.get("mpi") is False,
        "no h5py: statistics and checkpoints need it, `pip install h5py`": "error" in facts["hdf5"],
        f"no Slurm here (sbatch is not on PATH): jobs start with {'mpirun' if by_mpi else 'torchrun'}":
            not slurm["found"],
        "Slurm's commands are here but find no configuration: set SLURM_CONF if there is a Slurm":
            slurm["found"] and not slurm["version"],
        "no matplotlib: reports have no pictures, `pip install 'hpctk[plot]'`": packages["matplotlib"] is None,
        f"nothing reads {unknown}; known are {', '.join(environment.VARIABLES)}": unknown,
    }  # fmt: skip
    return [*facts["bad_settings"], *(sentence for sentence, applies in rules.items() if applies)]


def without_mpi(facts: Facts) -> bool:
    """Return whether jobs start without MPI here: torchrun started this, or mpi4py was left out."""
    return facts["torchrun"] or facts["packages"]["mpi4py"] is None


def next_command(facts: Facts) -> str:
    """Return what to type next."""
    no_torch = facts["packages"]["torch"] is None
    if no_torch or essential_missing(facts):
        return "pip install torch" if no_torch else "hpctk doctor, once the first advice is followed"
    if without_mpi(facts):
        more = "" if facts["torchrun"] else "; with MPI: pip install 'hpctk[mpi]', then hpctk quickstart"
        return f"torchrun --nproc-per-node=2 train.py, where train.py uses hpctk.ddp{more}"
    if facts["slurm"].get("version"):
        return "hpctk quickstart, or for a job: hpctk slurm render mpi -- hpctk train digits"
    return "hpctk quickstart"


def essential_missing(facts: Facts) -> bool:
    """Return whether hpctk cannot train at all with what is here."""
    no_torch = facts["packages"]["torch"] is None or "torch_error" in facts["torch"]
    no_mpi = "error" in facts["mpi"] and not without_mpi(facts)
    return no_mpi or no_torch or bool(facts["bad_settings"])


def render(facts: Facts) -> str:
    """Return the facts as text for a terminal."""
    mpi, slurm, hdf5, torch = facts["mpi"], facts["slurm"], facts["hdf5"], facts["torch"]
    aware = "yes" if mpi.get("gpu_aware") else "no"
    gpus = f"{torch.get('devices', 0)}, torch's CUDA {torch.get('cuda') or 'none'}"
    rows = {
        "hpctk": f"{facts['hpctk']}, Python {facts['python']}, {facts['system']}",
        "packages": "  ".join(f"{name} {number or '-'}" for name, number in facts["packages"].items()),
        "kernels": KERNELS[facts["kernels"]["compiled"]],
        "MPI": mpi_text(facts) if "error" in mpi else f"{mpi['library']}, MPI {mpi['standard']}, {started(mpi)}",
        "GPU-aware MPI": f"{aware} ({mpi.get('gpu_aware_because', 'not asked')})",
        "GPUs": torch.get("torch_error") or gpus,
        "process groups": device_path(torch),
        "launcher": assignments(facts["launcher"]) or "no launcher's variables",
        "Horovod": built_with(facts["horovod"]),
        "Slurm": "no",
        "HDF5": hdf5.get("error") or f"{hdf5['library']}, {'parallel' if hdf5['parallel'] else 'serial'}",
        "settings": assignments(facts["environment"]) or "defaults",
    }
    if slurm["found"]:
        types = " ".join(slurm["mpi_types"]) or "unknown"
        rows["Slurm"] = f"{slurm['version'] or 'no configuration'}, srun --mpi: {types}"
    lines = [wrapped(f"{label:<15}", text) for label, text in rows.items()]
    if facts["advice"]:
        lines += ["", "advice", *(wrapped("     - ", text) for text in facts["advice"])]
    return "\n".join([*lines, "", wrapped(f"{'next':<15}", facts["next"])])


def device_path(torch: Facts) -> str:
    """Return how tensors travel in jobs of torchrun."""
    backends = torch.get("backends", [])
    if "gloo" not in backends:
        return "none: torch has no gloo, which hpctk.ddp needs"
    if not torch.get("devices"):
        return "host tensors by gloo; no device here"
    if "nccl" not in backends:
        return "host tensors by gloo; device tensors through host memory, for torch has no NCCL"
    return (
        "host tensors by gloo; device tensors by NCCL itself after init_process_group('cpu:gloo,cuda:nccl') or 'nccl', "
        "through host memory after 'gloo'"
    )


def mpi_text(facts: Facts) -> str:
    """Return why there is no MPI; where none is needed, that."""
    return "none, and jobs of torchrun need none" if without_mpi(facts) else str(facts["mpi"]["error"])


def wrapped(label: str, text: str) -> str:
    """Return `text` behind its label in lines of at most 100 columns, broken between words."""
    indent = " " * len(label)
    return textwrap.fill(
        text, 100, initial_indent=label, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def assignments(variables: dict[str, str]) -> str:
    """Return variables with their values, on one line."""
    return "  ".join(f"{name}={value}" for name, value in variables.items())


def started(mpi: Facts) -> str:
    """Return whether MPI runs, and as what."""
    if not mpi["started"]:
        return "not started (--mpi starts it)"
    return f"thread level {mpi['thread_level']}, rank {mpi['rank']} of {mpi['size']} on {mpi['host']}"


def built_with(horovod: Facts) -> str:
    """Return with what Horovod was built."""
    if "error" in horovod:
        return f"no ({horovod['error']})"
    return f"built with {', '.join(name for name, built in horovod.items() if built) or 'nothing'}"
