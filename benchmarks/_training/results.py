"""The results of one set-up: a JSON file that grows by one run at a time, so that what was measured is never lost."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from statistics import median

from hpctk.advise.evidence import FORMAT

VERSION = 1
FOLDER = Path(__file__).parents[1] / "results"
#: Of the published experiments.
PAPERS = FOLDER / "paper"


def begin(path, settings, params, data, *, fresh=False):
    """Return the document in a file, or a new one. Raise ValueError where the file is about another set-up."""
    if path.exists() and not fresh:
        document = json.loads(path.read_text())
        differing = [key for key in settings if document["settings"].get(key) != settings[key]]
        if differing:
            raise ValueError(f"{path}: was measured with other {', '.join(differing)}; --fresh begins anew")
        return document
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": settings,
        "params": params,
        "data": data,
        "machine": machine(),
        "search": [],
        "runs": [],
        "summary": [],
        "predictions": [],
    }


#: What a search for rates depends on: not on the links, which change seconds and no loss.
SEARCHED_FOR = ("task", "tiny", "hosts", "metric", "batch_of_a_rank", "rates", "search_steps")


def take_search(document, path):
    """Take over what another result found of rates. Raise ValueError where it searched for something else."""
    other = json.loads(path.read_text())
    differing = [key for key in SEARCHED_FOR if other["settings"].get(key) != document["settings"][key]]
    if differing:
        raise ValueError(f"{path}: was searched with other {', '.join(differing)}")
    known = {(run["method"], run["rate"]) for run in document["search"]}
    document["search"] += [run for run in other["search"] if (run["method"], run["rate"]) not in known]
    document["searched_at"] = other["settings"]["rate"]


def machine():
    """Return what it was measured on and with."""
    import mpi4py
    import torch

    import hpctk

    root = Path(__file__).parents[2]
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "load_at_start": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mpi4py": mpi4py.__version__,
        "hpctk": hpctk.__version__,
        "commit": commit.stdout.strip() or None,
    }


def keep(path, document):
    """Write the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def chosen_rate(document, method, metric):
    """Return a method's best rate, by the held-out metric after equally many steps; None if all failed."""
    tried = [run for run in document["search"] if run["method"] == method and run["loss"] is not None]
    if not tried:
        return None
    better = (lambda run: -run["accuracy"]) if metric == "accuracy" else (lambda run: run["loss"])
    return min(tried, key=better)["rate"]


def summary(document, methods):
    """Return a row for each method: medians over its seeds, and the least and the most."""
    rows = []
    for method in methods:
        runs = [run for run in document["runs"] if run["method"] == method]
        if not runs:
            continue
        times = sorted(run["seconds"] for run in runs if run["reached"])
        complete = len(times) == len(runs)
        rows.append(
            {
                "name": method,
                "seconds": median(run["step_s"] for run in runs),
                "seeds": len(runs),
                "reached": len(times),
                # A median over those that arrived alone would flatter those of whom few did.
                "to_target_s": median(times) if complete else None,
                "to_target_range_s": [times[0], times[-1]] if times else None,
                "samples": median(run["samples"] for run in runs),
                "wire_bytes": middle([run["wire_bytes"] for run in runs]),
                "account_bytes": middle([run["account_bytes"] for run in runs]),
                "loss": middle([run["loss"] for run in runs]),
                "accuracy": middle([run["accuracy"] for run in runs]),
                "rate": runs[0]["rate"],
            }
        )
    return rows


def middle(values):
    """Return the median of what is known, None where something is not."""
    return None if None in values else median(values)
