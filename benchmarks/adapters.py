"""What a way in costs: the same step, with Identity, through hpctk's own optimizer, both ways of Horovod, and DDP.

Start it with `./launch/bench adapters`; it runs as an MPI job on the emulated cluster or in shared memory. A step is
backward, which makes gradients at the cost of one copy, exchange and SGD. Horovod runs only while it is measured: its
thread polls MPI all the time and would slow the others down.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import _rig
import torch

import hpctk
from hpctk.cli.table import seconds_text, table
from hpctk.world import world

REFERENCE = "hpctk"


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
    """Return a step of each way in, and the ways in that need Horovod."""
    model = Model(n, here.rank)
    runs = {REFERENCE: stepper(model, hpctk.DistributedOptimizer(sgd(model), method(), model=model))}
    if hvd is not None:
        hvd.init()
        model = Model(n, here.rank)
        compression = hpctk.horovod.Compression(method(), model)
        opt = hvd.DistributedOptimizer(
            sgd(model), named_parameters=model.named_parameters(), compression=compression
        )
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=float, default=25e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="names of contenders, with commas")
    options = parser.parse_args()
    here = world()
    torch.set_num_threads(1)
    hvd = imported(horovod, "Horovod")
    runs = _rig.only(contenders(here, int(options.elements), hvd), options.only)

    @contextmanager
    def around(name):
        if not name.startswith("horovod:"):
            yield
            return
        hvd.init()
        try:
            yield
        finally:
            hvd.shutdown()

    # Two steps each time: Horovod negotiates names in the first one after its start.
    medians = _rig.measure(here, runs, options.repeats, count=2, around=around)
    if here.rank == 0:
        entries = [
            {"name": name, "seconds": seconds, "ratio": seconds / medians.get(REFERENCE, seconds)}
            for name, seconds in medians.items()
        ]
        print(f"one step of {int(options.elements)} float32, {here.size} ranks, {_rig.where(here)}")
        rows = [[e["name"], seconds_text(e["seconds"]), f"{e['ratio']:.2f}"] for e in entries]
        print(table(["way in", "step", f"x {REFERENCE}"], rows))
        if options.json:
            options.json.write_text(json.dumps(entries, indent=2) + "\n")
    here.barrier("the end of the benchmark")


if __name__ == "__main__":
    main()
