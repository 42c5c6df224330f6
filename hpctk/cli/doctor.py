"""Say what this installation has and lacks: the first thing to put into a bug report.

Starts no MPI unless asked, so it works on a login node. The exit status is 1 if hpctk cannot train
with what is here.

Examples:
  hpctk doctor
  hpctk doctor --json > doctor.json
  mpirun -n 2 python -m mpi4py -m hpctk doctor --mpi
"""

from __future__ import annotations

import argparse
import json

from hpctk.cli.core import installation as doctor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print the facts and the advice as JSON")
    parser.add_argument(
        "--mpi", action="store_true", help="start MPI, and say what only a started one can tell"
    )


def run(options: argparse.Namespace) -> int:
    """Print the facts; on rank 0 only where MPI was started with several ranks."""
    facts = doctor.collect(start_mpi=options.mpi)
    facts["advice"] = doctor.advise(facts)
    if facts["mpi"].get("rank", 0) == 0:
        print(json.dumps(facts, indent=2) if options.json else render(facts))
    return int(doctor.essential_missing(facts))


def render(facts: doctor.Facts) -> str:
    """Return the facts as text for a terminal."""
    mpi, slurm, hdf5, torch = facts["mpi"], facts["slurm"], facts["hdf5"], facts["torch"]
    packages = "  ".join(f"{name} {number or '-'}" for name, number in facts["packages"].items())
    rows = [
        ("hpctk", f"{facts['hpctk']}, Python {facts['python']}, {facts['system']}"),
        ("packages", packages),
        ("MPI", mpi.get("error") or f"{mpi['library']}, MPI {mpi['standard']}, {started(mpi)}"),
        (
            "GPU-aware MPI",
            f"{'yes' if mpi.get('gpu_aware') else 'no'} ({mpi.get('gpu_aware_because', 'not asked')})",
        ),
        (
            "GPUs",
            torch.get("torch_error")
            or f"{torch.get('devices', 0)}, torch's CUDA {torch.get('cuda') or 'none'}",
        ),
        (
            "launcher",
            "  ".join(f"{k}={v}" for k, v in facts["launcher"].items()) or "no launcher's variables",
        ),
        ("Horovod", horovod(facts["horovod"])),
        (
            "Slurm",
            f"{slurm['version'] or 'no configuration'}, srun --mpi: {' '.join(slurm['mpi_types']) or 'unknown'}"
            if slurm["found"]
            else "no",
        ),
        ("HDF5", hdf5.get("error") or f"{hdf5['library']}, {'parallel' if hdf5['parallel'] else 'serial'}"),
        ("settings", "  ".join(f"{k}={v}" for k, v in facts["environment"].items()) or "defaults"),
    ]
    lines = [line for label, text in rows for line in wrapped(label, text)]
    if facts["advice"]:
        lines += ["", "advice"] + [line for text in facts["advice"] for line in wrapped("     -", text, 7)]
    return "\n".join(lines)


def wrapped(label: str, text: str, indent: int = 15) -> list[str]:
    """Return `text` behind its label in lines of at most 100 columns, broken between words."""
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > 100 - indent:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    heads = [label, *[""] * len(lines)]
    return [f"{head:<{indent}}{body}" for head, body in zip(heads, [*lines, line], strict=True)]


def started(mpi: doctor.Facts) -> str:
    """Say whether MPI runs, and as what."""
    if not mpi["started"]:
        return "not started (--mpi starts it)"
    return f"thread level {mpi['thread_level']}, rank {mpi['rank']} of {mpi['size']} on {mpi['host']}"


def horovod(facts: doctor.Facts) -> str:
    """Say with what Horovod was built."""
    if "error" in facts:
        return f"no ({facts['error']})"
    with_parts = [name for name, built in facts.items() if built]
    return f"built with {', '.join(with_parts) or 'nothing'}"
