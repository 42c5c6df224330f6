"""What a way in costs: the same step, with Identity, through hpctk's own optimizer, both ways of Horovod, and DDP.

Start it with `./launch/bench adapters`; it runs as an MPI job on the emulated cluster or in shared memory. A step is
backward, which makes gradients at the cost of one copy, exchange and SGD.

Horovod's thread polls MPI all the time and takes time from everybody, so the same step of hpctk's own optimizer is
measured twice: `hpctk` while Horovod runs, as under both of its ways in, and `hpctk:alone` while it does not, as
under DDP. The first tells what a way in costs, the second what Horovod's thread does. Its cycle is CYCLE_MS unless
HOROVOD_CYCLE_TIME says otherwise: there is no core to spare for it here.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

import _rig
import torch

import hpctk
from hpctk.cli.core.table import seconds_text, table
from hpctk.comm.world import world

REFERENCE = "hpctk"
#: Milliseconds; as docs/horovod.md advises. Horovod's own default is 1.
CYCLE_MS = "20"
#: Measured while Horovod runs.
BESIDE_HOROVOD = ("hpctk", "horovod:compression", "horovod:optimizer")


class Gradients(torch.autograd.Function):
    """A loss whose backward hands out gradients that are there already."""

    @staticmethod
    def forward(ctx, gradients, *parameters):
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.gradients


class Model(torch.nn.Module):
    """Some large tensors and many small ones, as in a network."""

    def __init__(self, n, rank):
        super().__init__()
        sizes = [n // 4, n // 4, n // 8, n // 8] + [n // 400] * 90
        sizes.append(n - sum(sizes))
        self.tensors = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size)) for size in sizes])
        generator = torch.Generator().manual_seed(rank)
        self.gradients = [torch.randn(size, generator=generator) for size in sizes]

    def forward(self):
        return Gradients.apply(self.gradients, *self.tensors)


def stepper(model, opt, loss=None):
    """Return one step of training."""

    def step():
        opt.zero_grad()
        (loss or model)().backward()
        opt.step()

    return step


def method():
    return hpctk.Mean(hpctk.Identity())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def contenders(here, n, hvd):
    """Return a step of each way in."""
    model = Model(n, here.rank)
    runs = {REFERENCE: stepper(model, hpctk.DistributedOptimizer(sgd(model), method(), model=model))}
    runs["hpctk:alone"] = runs[REFERENCE]
    if hvd is not None:
        hvd.init()
        model = Model(n, here.rank)
        compression = hpctk.horovod.Compression(method(), model)
        opt = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), compression=compression)
        runs["horovod:compression"] = stepper(model, opt)
        model = Model(n, here.rank)
        opt = hpctk.horovod.DistributedOptimizer(sgd(model), method(), model=model)
        runs["horovod:optimizer"] = stepper(model, opt)
        hvd.shutdown()
    ddp = imported(lambda: hpctk.ddp, "ddp")
    if ddp is not None:
        _rig.start_gloo(here)
        model = Model(n, here.rank)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        ddp.attach(wrapped, method())
        runs["ddp"] = stepper(wrapped, sgd(model))
    return runs


def imported(find, name):
    """Return a module, None with a message where it is not there."""
    try:
        return find()
    except (ImportError, AttributeError) as error:
        print(f"bench: no {name} ({error})", file=sys.stderr)
        return None


def horovod():
    import horovod.torch as hvd

    return hvd


def main() -> None:
    parser = _rig.parser(only=True)
    parser.add_argument("--elements", type=float, default=25e6)
    options = parser.parse_args()
    here = world()
    torch.set_num_threads(1)
    os.environ.setdefault("HOROVOD_CYCLE_TIME", CYCLE_MS)
    hvd = imported(horovod, "Horovod")
    runs = _rig.only(contenders(here, int(options.elements), hvd), options.only)

    @contextmanager
    def around(name):
        if hvd is None or name not in BESIDE_HOROVOD:
            yield
            return
        hvd.init()
        # Horovod negotiates every name in the first step after its start.
        runs[name]()
        try:
            yield
        finally:
            hvd.shutdown()

    medians = _rig.measure(here, runs, options.repeats, count=2, around=around)
    if here.rank == 0:
        entries = [
            {"name": name, "seconds": seconds, "ratio": seconds / medians.get(REFERENCE, seconds)}
            for name, seconds in medians.items()
        ]
        cycle = f"Horovod's cycle {os.environ['HOROVOD_CYCLE_TIME']} ms"
        print(f"one step of {int(options.elements)} float32, {here.size} ranks, {_rig.where(here)}, {cycle}")
        rows = [[e["name"], seconds_text(e["seconds"]), f"{e['ratio']:.2f}"] for e in entries]
        print(table(["way in", "step", f"x {REFERENCE}"], rows))
        _rig.write(options.json, entries)
    here.barrier("the end of the benchmark")


if __name__ == "__main__":
    main()
