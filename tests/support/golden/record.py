"""Write the digests of all cases at this number of ranks into digests.json.

    ./launch/mpirun -n 2 python -m mpi4py tests/support/golden/record.py [--ways mpi torch ddp horovod compression]
                                                                 [--cases "SAEF*"] [--new] [--compare]

Says which entries have changed. Golden digests are recorded anew only for new cases, and where a commit says that,
and why, the same numbers are added in another order; see golden/__init__.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist
from mpi4py import MPI

from golden import digests
from golden.cases import CASES, EVERY
from golden.ways import train


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=EVERY, default=list(EVERY))
    parser.add_argument("--cases", metavar="PATTERN", default="*", help="leave other cases as they are")
    parser.add_argument("--new", action="store_true", help="only cases that are not recorded yet")
    parser.add_argument("--compare", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    folder = comm.bcast(tempfile.mkdtemp(prefix="hpctk-golden-") if comm.rank == 0 else None)
    if {"torch", "ddp"} & set(arguments.ways):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    if {"horovod", "compression"} & set(arguments.ways):
        import horovod.torch as hvd

        hvd.init()
    for way in arguments.ways:
        _record(comm, way, arguments, Path(folder))
    comm.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    if comm.rank == 0:
        shutil.rmtree(folder)


def _record(comm: MPI.Intracomm, way: str, arguments: argparse.Namespace, folder: Path) -> None:
    began = time.monotonic()
    recorded = digests.read()
    kept = recorded.get(str(comm.size), {}).get(way, {"machine": digests.machine(), "cases": {}})
    known = {name: case for name, case in CASES.items() if way in case.ways}
    chosen = [name for name in fnmatch.filter(known, arguments.cases) if not (arguments.new and name in kept["cases"])]
    every, inexact = len(chosen) == len(known), [name for name in chosen if known[name].inexact]
    if not every and inexact and kept["machine"] != digests.machine():
        # The others are the same bits on every machine, and may be added on any.
        raise SystemExit(
            f"recorded on {kept['machine']}, but this is {digests.machine()}: record all cases, or none of {inexact}"
        )
    machine = digests.machine() if every else kept["machine"]
    found = {}
    for name in chosen:
        seen = train(way, known[name], folder / way / str(len(found)))
        found[name] = digests.entry(seen, bool(known[name].inexact), comm.allgather)
    if comm.rank > 0:
        return
    before = {name: line for name, line in kept["cases"].items() if name in known}
    new = [name for name in found if name not in before]
    seconds, gone = time.monotonic() - began, len(kept["cases"]) - len(before)
    print(f"{way} at {comm.size} ranks: {len(found)} cases, {len(new)} new, {gone} gone, {seconds:.1f} s")
    for name, line in found.items():
        if name in before and before[name] != line:
            print(f"  CHANGED {name}: {before[name]} -> {line}", flush=True)
    if not arguments.compare:
        recorded.setdefault(str(comm.size), {})[way] = {"machine": machine, "cases": before | found}
        digests.write(recorded)


if __name__ == "__main__":
    main()
