"""What the benchmarks share: options, the form of their JSON; for MPI jobs gloo, the network's rate, medians in turn.

Every benchmark writes the same JSON: an array with a row for each contender, which has at least a `name` and the
`seconds` that it took, the median where there were several. tests/crash/test_benchmarks.py runs each of them, small.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median


def parser(repeats: int = 5, *, only: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser()
    made.add_argument("--repeats", type=int, default=repeats, help=f"medians over so many [{repeats}]")
    made.add_argument("--json", type=Path, metavar="FILE", help="write a row for each contender to FILE")
    if only:
        made.add_argument(
            "--only",
            metavar="NAMES",
            help="names of contenders, with commas, or with semicolons where names have commas",
        )
    return made


def write(target: Path | None, rows: Sequence[dict]) -> None:
    """Write the rows of a benchmark as JSON, where a file was asked for."""
    if target is None:
        return
    for row in rows:
        if not isinstance(row["name"], str) or not math.isfinite(row["seconds"]):
            raise ValueError(f"a row of a benchmark needs a name and seconds: {row}")
    target.write_text(json.dumps(rows, indent=2) + "\n")


def calibrated(here, measured: bool) -> None:
    """Choose by a calibration that is measured now, or else by the one in use. Collective."""
    from hpctk.collectives.tuning import auto
    from hpctk.collectives.tuning.calibrate import calibrate

    if measured:
        auto.use(here, calibrate(here, reporter(here)))


def bits_per_second(rate: str) -> float | None:
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    return None


def where(here) -> str:
    rate = os.environ.get("HPCTK_CLUSTER_RATE")
    return f"{len(here.nodes)} nodes at {rate}" if rate else "shared memory"


def start_gloo(here):
    """Join a gloo process group over the job's own network. Collective."""
    import torch.distributed as dist

    head = os.environ.get("HPCTK_CLUSTER_HEAD", "127.0.0.1")
    port = here.run_on_root("choosing a port", free_port)
    dist.init_process_group("gloo", init_method=f"tcp://{head}:{port}", rank=here.rank, world_size=here.size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def only(runs, names):
    """Return the chosen contenders; ends the job where one is unknown."""
    if not names:
        return runs
    # Some names have commas in them.
    wanted = names.split(";" if ";" in names else ",")
    unknown = set(wanted) - set(runs)
    if unknown:
        sys.exit(f"bench: no contender {', '.join(unknown)}; there are {'; '.join(runs)}")
    return {name: run for name, run in runs.items() if name in wanted}


def reporter(here):
    def report(line):
        if here.rank == 0:
            print(f"bench: {line}", file=sys.stderr, flush=True)

    return report


def measure(here, runs, repeats, *, prepare=lambda: None, count=1, around=lambda name: nullcontext()):
    """Return the median seconds of each contender, of the slowest rank, taking turns. Collective."""
    times = {name: [] for name in runs}
    report = reporter(here)
    for repeat in range(repeats + 1):
        report(f"repeat {repeat} of {repeats}" if repeat else "warming up")
        for name, run in runs.items():
            prepare()
            with around(name):
                here.barrier("bench")
                began = time.perf_counter()
                for _ in range(count):
                    run()
                spent = round((time.perf_counter() - began) * 1e9)
            slowest = -here.minimum([-spent], "bench")[0] / 1e9 / count
            if repeat:
                times[name].append(slowest)
    return {name: median(row) for name, row in times.items()}
