"""All contenders at an all-reduce in one run, interleaved: medians, and how far from the network's limit.

Start it with `./launch/bench allreduce`; it runs as an MPI job on the emulated cluster or in shared memory.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import cache

import _rig
import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import hpctk
from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.consensus import aggregate_in_place
from hpctk.collectives.engine.consensus_weights import ConsensusState
from hpctk.collectives.tuning import auto
from hpctk.comm.buffers import DTYPES
from hpctk.comm.world import world
from hpctk.schedules import build
from hpctk.schedules.core.registry import SHARED_MEMORY, names

FLOAT32 = DTYPES["float32"]
#: launch/bench tells Open MPI to take its segmented ring for messages from this many bytes more than asked.
RING_MORE_BYTES = 4096


@cache
def horovod():
    """Return Horovod, None where it is not built."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        print(f"bench: no Horovod ({error})", file=sys.stderr)
        return None
    return hvd


@contextmanager
def running(name):
    """Let Horovod run only while it is measured: its thread polls MPI all the time and slows the others down."""
    if name != "horovod":
        yield
        return
    horovod().init()
    try:
        yield
    finally:
        horovod().shutdown()


def two_pass(here, data):
    """AdaCons as its authors do it, over hpctk's best all-reduce: gradients, then weighted gradients."""
    total = torch.from_numpy(data.copy())
    reduce_in_place(here, total, FLOAT32, "sum", "auto")
    mine = np.array([np.dot(data, total.numpy()), np.dot(data, data)], np.float64)
    everyone = np.empty((here.size, 2))
    here.data.Allgather([mine, MPI.DOUBLE], [everyone, MPI.DOUBLE])
    weights = everyone[:, 0] / np.sqrt(everyone[:, 1])
    scaled = torch.from_numpy(data * np.float32(weights[here.rank] / weights.sum()))
    reduce_in_place(here, scaled, FLOAT32, "sum", "auto")


def two_pass_mpi(here, data):
    """The same over MPI's own all-reduce."""
    total = data.copy()
    here.data.Allreduce(MPI.IN_PLACE, [total, MPI.FLOAT])
    mine = np.array([np.dot(data, total), np.dot(data, data)], np.float64)
    everyone = np.empty((here.size, 2))
    here.data.Allgather([mine, MPI.DOUBLE], [everyone, MPI.DOUBLE])
    weights = everyone[:, 0] / np.sqrt(everyone[:, 1])
    scaled = data * np.float32(weights[here.rank] / weights.sum())
    here.data.Allreduce(MPI.IN_PLACE, [scaled, MPI.FLOAT])


def contenders(here, nbytes):
    data = np.random.default_rng(here.rank).standard_normal(nbytes // 4).astype(np.float32) + 1
    longer = np.zeros((nbytes + RING_MORE_BYTES) // 4, np.float32)
    tensor = torch.from_numpy(data)

    def ours(schedule):
        # A sum, as the others': none of them forms a mean.
        return lambda: reduce_in_place(here, tensor, FLOAT32, "sum", schedule)

    found = {f"plan:{name}": ours(name) for name in names("allreduce", with_nodes=True)}
    if here.shares_memory:
        found[SHARED_MEMORY] = ours(SHARED_MEMORY)
    found["auto"] = ours("auto")
    found["auto:mean"] = lambda: reduce_in_place(here, tensor, FLOAT32, "mean", "auto")
    found["mpi"] = ours("mpi")
    found["hpctk.allreduce"] = lambda: hpctk.allreduce(tensor, op="sum")
    found["mpi:default"] = lambda: here.data.Allreduce(MPI.IN_PLACE, [data, MPI.FLOAT])
    if os.environ.get("HPCTK_BENCH_MPI_RING") == str(nbytes):
        found["mpi:ring"] = lambda: here.data.Allreduce(MPI.IN_PLACE, [longer, MPI.FLOAT])
    found["gloo"] = lambda: dist.all_reduce(tensor)
    if horovod():
        found["horovod"] = lambda: horovod().allreduce_(tensor, name="bench", op=horovod().Average)
    found["adacons:one-pass"] = lambda: aggregate_in_place(
        here, data, [0, len(data)], ConsensusState(), 0.99, "mean_norm"
    )
    found["adacons:two-pass"] = lambda: two_pass(here, data)
    found["adacons:two-pass-mpi"] = lambda: two_pass_mpi(here, data)
    return found, data


def main() -> None:
    parser = _rig.parser(only=True)
    parser.add_argument("--bytes", type=float, default=24e6)
    parser.add_argument(
        "--no-calibration", action="store_true", help="choose by the calibration in use, measure none first"
    )
    options = parser.parse_args()
    nbytes = int(options.bytes) // 4 * 4
    here = world()
    torch.set_num_threads(1)

    _rig.calibrated(here, measured=not options.no_calibration)
    _rig.start_gloo(here)
    runs, data = contenders(here, nbytes)
    # Values must not overflow over many sums; the mean of equal values stays what it is.
    seconds = _rig.measure(
        here,
        _rig.only(runs, options.only),
        options.repeats,
        prepare=lambda: data.fill(1.0),
        count=50 if nbytes < 65536 else 5 if nbytes < 2**20 else 1,
        around=running,
    )
    if here.rank == 0:
        show(here, seconds, nbytes, options.json)
    here.barrier("the end of the benchmark")
    dist.destroy_process_group()


def show(here, seconds, nbytes, target):
    rate = _rig.bits_per_second(os.environ.get("HPCTK_CLUSTER_RATE", ""))
    limit = 2 * (here.size - 1) / here.size * nbytes * 8 / rate if rate else None
    known = auto.calibration(here)
    entries = []
    for name, value in sorted(seconds.items(), key=lambda item: item[1]):
        entry = {"name": name, "seconds": value, "limit_ratio": value / limit if limit else None}
        if name.startswith("plan:"):
            plan = build(name.removeprefix("plan:"), "allreduce", here.size, nodes=here.nodes)
            entry["priced_seconds"] = known.seconds(plan, nbytes, here.nodes)
        if name == "auto":
            entry["chosen"] = auto.choose(here, "allreduce", nbytes)
        entries.append(entry)
    print(f"all-reduce of {bytes_text(nbytes)}, {here.size} ranks, {_rig.where(here)}")
    rows = [
        [
            e["name"] + (f" = {e['chosen']}" if "chosen" in e else ""),
            seconds_text(e["seconds"]),
            f"{e['limit_ratio']:.2f}" if limit else "-",
            f"{e['priced_seconds'] / e['seconds']:.2f}" if "priced_seconds" in e else "",
        ]
        for e in entries
    ]
    print(table(["contender", "median", "times the limit", "priced / measured"], rows), flush=True)
    _rig.write(target, entries)


if __name__ == "__main__":
    main()
