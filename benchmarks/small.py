"""A training step of a small model, by every method: divided by the step alone, and by DDP's over gloo in fp16.

Start it with `./launch/bench small`. Forward, backward and step of a network of 17 thousand parameters, all contenders
taking turns in one run. What such a step costs beside its arithmetic are calls and small messages. With --tensors N the
model is N parameters of one element instead, and a step is the optimizer's alone.
"""

from __future__ import annotations

import _rig
import torch
from step import METHODS

import hpctk
from hpctk.cli.core.table import seconds_text, table
from hpctk.comm.world import world


class Many(torch.nn.Module):
    """Parameters of one element; their gradients are there already."""

    def __init__(self, count):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(1)) for _ in range(count)])
        for part in self.parts:
            part.grad = torch.randn(1)


def small():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def contender(here, make, tensors):
    """Return a function that makes one step; `make` makes the method, None is a step alone, "ddp" DDP's."""
    model = Many(tensors) if tensors else small()
    base = opt = sgd(model)
    trained = model
    if make == "ddp":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        trained = torch.nn.parallel.DistributedDataParallel(model)
        trained.register_comm_hook(None, fp16_compress_hook)
    elif make is not None:
        opt = hpctk.DistributedOptimizer(base, make(), model=model)
    generator = torch.Generator().manual_seed(here.rank)
    x, y = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)

    def backward():
        if tensors:
            return 0.0
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(trained(x), y)
        loss.backward()
        return loss

    if make is METHODS["SASG"]:
        return lambda: opt.step(backward)

    def step():
        backward()
        opt.step()

    return step


def main() -> None:
    parser = _rig.parser(only=True)
    parser.add_argument("--tensors", type=float, default=0, help="parameters of one element instead of a network")
    parser.add_argument("--steps", type=int, default=20, help="steps of each contender in turn [20]")
    options = parser.parse_args()
    here = world()
    torch.set_num_threads(1)
    tensors = int(options.tensors)
    makers = {"alone": None}
    if not tensors:
        _rig.start_gloo(here)
        makers["ddp gloo fp16"] = "ddp"
    makers |= _rig.only(METHODS, options.only)
    runs = {name: contender(here, make, tensors) for name, make in makers.items()}
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
        what = f"{tensors} parameters of one element" if tensors else "17 thousand parameters"
        print(f"one step, {what}, {here.size} ranks, {_rig.where(here)}")
        print(table(["method", "step", *(key for key in OTHERS if key in entries[0])], rows))
        _rig.write(options.json, entries)
    here.barrier("the end of the benchmark")


#: What steps are divided by.
OTHERS = {"to_alone": "alone", "to_ddp": "ddp gloo fp16"}

if __name__ == "__main__":
    main()
