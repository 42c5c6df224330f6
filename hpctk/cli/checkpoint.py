"""Show what a checkpoint holds, and whether it is whole.

Examples:
  hpctk checkpoint inspect run/checkpoints                    the newest one, and which others there are
  hpctk checkpoint inspect run/checkpoints/000008-step-400    one of them
  hpctk checkpoint inspect run/checkpoints --tensors          every tensor of rank 0 with its size and norm
  hpctk checkpoint inspect run/checkpoints --json             for programs
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hpctk.cli.core.table import bytes_text, table
from hpctk.stats.report.numbers import plural


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("action", choices=["inspect"])
    parser.add_argument("path", type=Path, help="a folder of checkpoints, or one of them")
    parser.add_argument("--tensors", action="store_true", help="list every tensor of rank 0")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(options: argparse.Namespace) -> int:
    """Print what is inside; 1 where a file is not what was written."""
    from hpctk.checkpoint import survey
    from hpctk.tasks.core.run_folder import finite

    found = survey.survey(options.path, tensors=options.tensors)
    print(json.dumps(finite(found), indent=2, allow_nan=False) if options.json else shown(found))
    return 0 if all(one["state"] == "whole" for one in found["files"]) else 1


def shown(found: dict[str, Any]) -> str:
    """Return what was found, for people."""
    files = [[one["name"], bytes_text(one["bytes"]), one["state"]] for one in found["files"]]
    lines = [
        found["checkpoint"],
        f"step {found['step']} of {plural(found['ranks'], 'rank')}, saved {found['saved']} by hpctk {found['hpctk']}",
        called(found["settings"], "method"),
        "",
        table(["file", "bytes", "state"], files),
    ]
    if found["parts"]:
        rows = [[part["name"], str(part["tensors"]), bytes_text(part["bytes"])] for part in found["parts"]]
        lines += ["", table(["in rank 0's file", "tensors", "bytes"], rows)]
    if found["extra"]:
        lines += ["", "extra: " + ", ".join(f"{key}={value}" for key, value in found["extra"].items())]
    if found["tensors"]:
        rows = [[one["name"], one["dtype"], one["shape"], f"{one['norm']:.4g}"] for one in found["tensors"]]
        lines += ["", table(["tensor", "dtype", "shape", "2-norm"], rows)]
    if found["others"]:
        lines += ["", "also there: " + ", ".join(found["others"])]
    return "\n".join(lines)


def called(settings: dict[str, Any], name: str) -> str:
    """Return settings as they are written in a program: TopK(density=0.01, ...)."""
    texts = [
        f"{key}={called(value, 'compressor') if isinstance(value, dict) else value}"
        for key, value in settings.items()
        if key != name
    ]
    return f"{settings.get(name)}({', '.join(texts)})"
