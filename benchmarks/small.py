"""A training step of a small model, by every method: divided by the step alone, and by DDP's over gloo.

Start it with `./launch/bench small`. Forward, backward and step of a network of 17 thousand parameters, all contenders
taking turns in one run. What such a step costs beside its arithmetic are calls and small messages. With --elements N
the network has about N parameters, for links of a cluster; with --tensors N the model is N parameters of one element,
and a step is the optimizer's alone.
"""

from __future__ import annotations

import _rig
import torch
from mpi4py import MPI
from step import METHODS
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import hpctk
from hpctk.cli.core.table import seconds_text, table
from hpctk.comm.world import world

#: What steps are divided by.
OTHERS = {"to_alone": "alone", "to_ddp": "ddp gloo", "to_ddp_fp16": "ddp gloo fp16"}
DDP = {"ddp gloo": None, "ddp gloo fp16": fp16_compress_hook}
#: Methods that are measured with buckets that leave during backward, too.
OVERLAPPED, OVERLAP = ("Mean", "AdaCons"), " overlap"


class Many(torch.nn.Module):
    """Parameters of one element; their gradients are there already."""

    def __init__(self, count):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1)) for _ in range(count)])
        for part in self.parts:
            part.grad = torch.randn(1)


def network(elements):
    """Three layers for 64 features; where `elements` are given, for 784, and as wide as it takes."""
    torch.manual_seed(0)
    # (784 + 10) w + w^2 elements, and the biases.
    wide = int((794**2 / 4 + elements) ** 0.5 - 397) if elements else 0
    sizes = (784, wide, wide) if elements else (64, 128, 64)
    layers = [torch.nn.Linear(sizes[0], sizes[1]), torch.nn.ReLU(), torch.nn.Linear(sizes[1], sizes[2])]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(sizes[2], 10))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def contender(here, name, tensors, elements=0):
    """Return a function that makes one step."""
    model = Many(tensors) if tensors else network(elements)
    base = opt = sgd(model)
    trained = model
    if name in DDP:
        trained = torch.nn.parallel.DistributedDataParallel(model)
        if DDP[name]:
            trained.register_comm_hook(None, DDP[name])
    elif name != "alone":
        method = name.removesuffix(OVERLAP)
        # Ranks on which calls may be under way block in none: the others must not be among them.
        comm = MPI.COMM_WORLD.Dup() if method != name else MPI.COMM_WORLD
        opt = hpctk.DistributedOptimizer(base, METHODS[method](), model=model, overlap=method != name, comm=comm)
    generator = torch.Generator().manual_seed(here.rank)
    features = 784 if elements else 64
    x, y = torch.randn(32, features, generator=generator), torch.randint(10, (32,), generator=generator)

    def backward():
        if tensors:
            return 0.0
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(trained(x), y)
        loss.backward()
        return loss

    if name == "SASG":
        return lambda: opt.step(backward)

    def step():
        backward()
        opt.step()

    return step


def main() -> None:
    parser = _rig.parser(only=True)
    parser.add_argument("--elements", type=float, default=0, help="parameters of the network [17 thousand]")
    parser.add_argument("--tensors", type=float, default=0, help="parameters of one element instead of a network")
    parser.add_argument("--steps", type=int, default=20, help="steps of each contender in turn [20]")
    options = parser.parse_args()
    here = world()
    torch.set_num_threads(1)
    tensors, elements = int(options.tensors), int(options.elements)
    names = ["alone"]
    if not tensors:
        _rig.start_gloo(here)
        names += DDP
    several = [*METHODS, *(method + OVERLAP for method in OVERLAPPED if elements)]
    names += _rig.only(dict.fromkeys(several), options.only)
    runs = {name: contender(here, name, tensors, elements) for name in names}
    times = _rig.measure(here, runs, options.repeats, count=options.steps)
    if here.rank == 0:
        entries = [
            {
                "name": name,
                "seconds": seconds,
                **{key: seconds / times[other] for key, other in OTHERS.items() if other in times},
            }
            for name, seconds in times.items()
        ]
        rows = [
            [e["name"], seconds_text(e["seconds"]), *(f"{e[key]:.2f}" for key in OTHERS if key in e)] for e in entries
        ]
        what = f"{tensors} parameters of one element" if tensors else f"{elements or '17 thousand'} parameters"
        print(f"one step, {what}, {here.size} ranks, {_rig.where(here)}")
        print(table(["method", "step", *(key for key in OTHERS if key in entries[0])], rows))
        _rig.write(options.json, entries)
    here.barrier("the end of the benchmark")


if __name__ == "__main__":
    main()
