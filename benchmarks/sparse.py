"""Top-k all-reduce from end to end in one run, interleaved: select, exchange, scatter.

Start it with `./launch/bench sparse`; it runs as an MPI job on the emulated cluster or in shared memory. All
contenders but gloo do the same job: add the gradient to the residual, take out the largest, sum them over all
ranks, write the sum into a dense tensor.
"""

from __future__ import annotations

import os

import _rig
import numpy as np
import torch
import torch.distributed as dist

from hpctk.cli.core.table import bytes_text, seconds_text, table
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.sparse_allreduce import Choices, reduce_pairs
from hpctk.comm.world import world
from hpctk.compressors.core.sparse import wire_bytes
from hpctk.kernels.merge import scatter
from hpctk.kernels.select import feed_top_k
from hpctk.schedules.core.registry import names
from hpctk.schedules.cost import sparse as sparse_cost


class Job:
    """One rank's gradient, residual and result."""

    def __init__(self, here, n, k):
        self.here, self.n, self.k = here, n, k
        self.gradient = np.random.default_rng(here.rank).standard_normal(n, np.float32)
        self.residual = np.zeros(n, np.float32)
        self.result = np.zeros(n, np.float32)
        self.sent = {}
        self.found = {}

    def ours(self, name, schedule, keep=None):
        def run():
            before = engine_of(self.here).counter.sent_bytes
            indices, values = feed_top_k(self.residual, self.gradient, self.k)
            found, total, _ = reduce_pairs(self.here, indices, values, self.n, keep, schedule)
            self.result.fill(0)
            scatter(self.result, found, total)
            self.sent[name] = engine_of(self.here).counter.sent_bytes - before
            self.found[name] = len(found)

        return run

    def grace(self):
        """The way of GRACE's top-k: torch.topk, then float32 values and int64 indices to everyone."""
        gradient, residual = torch.from_numpy(self.gradient), torch.from_numpy(self.residual)
        residual += gradient
        indices = torch.topk(residual.abs(), self.k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0
        all_values = [torch.empty_like(values) for _ in range(self.here.size)]
        all_indices = [torch.empty_like(indices) for _ in range(self.here.size)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_indices, indices)
        result = torch.from_numpy(self.result).zero_()
        for theirs, where in zip(all_values, all_indices, strict=True):
            result.index_add_(0, where, theirs)

    def gloo(self):
        dist.all_reduce(torch.from_numpy(self.gradient))

    def reset(self):
        # Sums of sums would overflow, and a residual of nothing is the same start for everyone.
        self.gradient[:] = np.random.default_rng(self.here.rank).standard_normal(self.n, np.float32)
        self.residual.fill(0)


def main() -> None:
    parser = _rig.parser(only=True)
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument(
        "--no-calibration", action="store_true", help="choose by the calibration in use, measure none first"
    )
    options = parser.parse_args()
    n = int(options.elements)
    k = max(1, int(options.density * n))
    here = world()
    # Ranks share the machine's cores.
    torch.set_num_threads(1)
    _rig.calibrated(here, measured=not options.no_calibration)
    _rig.start_gloo(here)
    job = Job(here, n, k)
    runs = {f"sparse:{name}": job.ours(f"sparse:{name}", name) for name in ("auto", *names("sparse_allreduce"))}
    runs["sparse:keep"] = job.ours("sparse:keep", "split", keep=k)
    runs |= {"grace": job.grace, "gloo": job.gloo}
    seconds = _rig.measure(here, _rig.only(runs, options.only), options.repeats, prepare=job.reset)
    sent = {name: -here.minimum([-nbytes], "bench")[0] for name, nbytes in sorted(job.sent.items())}
    if here.rank == 0:
        show(here, job, seconds, sent, options.json)
    here.barrier("the end of the benchmark")
    dist.destroy_process_group()


def formula_bytes(here, job, name):
    """Return what a rank sends, by the closed form with the union as it was."""
    size, n, k = here.size, job.n, job.k
    if name == "allgather":
        return (size - 1) * wire_bytes(k, n, 4)
    if name in ("split", "keep"):
        return (size - 1) / size * (wire_bytes(k, n, 4) + wire_bytes(job.found[f"sparse:{name}"], n, 4))
    stages = sparse_cost.stages(name, size, n, k, None, lambda k, n: wire_bytes(k, n, 4))
    return sum(nbytes for _, nbytes in stages)


def show(here, job, seconds, sent, target):
    chosen = next(iter(here.attached[Choices].values())) if Choices in here.attached else ""
    entries = []
    for name, value in sorted(seconds.items(), key=lambda item: item[1]):
        entry = {"name": name, "seconds": value}
        entry |= {
            f"times_faster_than_{other}": seconds[other] / value for other in ("grace", "gloo") if other in seconds
        }
        if name in sent:
            way = name.removeprefix("sparse:")
            entry["schedule"] = chosen if way == "auto" else way
            entry["sent_bytes"] = sent[name]
            entry["formula_bytes"] = formula_bytes(here, job, entry["schedule"])
            entry["sent_over_k_elements"] = sent[name] / (4 * job.k)
        entries.append(entry)
    print(f"top {job.k} of {job.n} float32, {here.size} ranks, {_rig.where(here)}")
    rows = [
        [
            e["name"] + (f" = {e['schedule']}" if e["name"] == "sparse:auto" else ""),
            seconds_text(e["seconds"]),
            *(f"{e[key]:.2f}" if key in e else "" for key in ("times_faster_than_grace", "times_faster_than_gloo")),
            bytes_text(e["sent_bytes"]) if "sent_bytes" in e else "",
            f"{e['sent_bytes'] / e['formula_bytes']:.3f}" if e.get("formula_bytes") else "",
            f"{e['sent_over_k_elements']:.2f}" if "sent_bytes" in e else "",
        ]
        for e in entries
    ]
    columns = ["contender", "median", "x grace", "x gloo", "sent per rank", "sent / formula", "sent / (4 B k)"]
    print(table(columns, rows), flush=True)
    _rig.write(target, entries)


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    main()
