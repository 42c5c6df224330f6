"""What on_lost_rank="shrink" costs while no rank is lost: a training step with it, divided by one with "raise".

Start it with `./launch/bench shrink`. Forward, backward and step of a network of 17 thousand parameters, or --elements.
The same method steps with the one and with the other in turn, a few steps each; the ratio is the median over all turns,
so that whatever else the machine does falls on both. Each on a communicator of its own: ranks that are to outlive each
other exchange also what opens a step in a way of their own.
"""

from __future__ import annotations

import time
from statistics import median

import _rig
import torch
from faults import METHODS as FREQUENT
from mpi4py import MPI

import hpctk
from hpctk.cli.core.table import seconds_text, table
from hpctk.comm.world import world

#: With rounds as far apart as they are by default.
METHODS = {**FREQUENT, "CELGC": "hpctk.CELGC(1.0)"}
NAMES = ("Mean", "AdaCons", "Mean TopK", "SAEF TopK", "SASG", "CELGC")
CHOICES = ("raise", "shrink")
COMMS = {choice: MPI.COMM_WORLD.Dup() for choice in CHOICES}


def network(elements: int) -> torch.nn.Module:
    """Return a network of about so many parameters."""
    torch.manual_seed(0)
    width = max(1, round((37**2 + elements) ** 0.5 - 37))
    layers = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def stepper(here, name: str, choice: str, elements: int, batch: int):
    """Return a function that makes one training step."""
    model = network(elements)
    base = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    method = eval(METHODS[name], {"hpctk": hpctk})
    opt = hpctk.DistributedOptimizer(base, method, model=model, comm=COMMS[choice], on_lost_rank=choice)
    generator = torch.Generator().manual_seed(here.rank)
    x, y = torch.randn(batch, 64, generator=generator), torch.randint(10, (batch,), generator=generator)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: opt.step(closure)


def turns(here, steps: dict, repeats: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of a step in each turn, of the slowest rank. Collective."""
    spent: dict[str, list[float]] = {choice: [] for choice in steps}
    for repeat in range(repeats + 1):
        # Each goes first as often as the other.
        for choice in sorted(steps, reverse=bool(repeat % 2)):
            here.barrier("bench")
            began = time.perf_counter()
            for _ in range(count):
                steps[choice]()
            mine = round((time.perf_counter() - began) * 1e9)
            slowest = -here.minimum([-mine], "bench")[0] / 1e9 / count
            if repeat:
                spent[choice].append(slowest)
    return spent


def main() -> None:
    """Run the benchmark."""
    parser = _rig.parser(30, only=True)
    parser.add_argument("--elements", type=float, default=17e3, help="parameters of the model [17e3]")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step on each rank [32]")
    parser.add_argument("--steps", type=int, default=10, help="steps in each turn [10]")
    options = parser.parse_args()
    here = world()
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else NAMES
    entries = []
    for name in names:
        steps = {choice: stepper(here, name, choice, int(options.elements), options.batch) for choice in CHOICES}
        spent = turns(here, steps, options.repeats, options.steps)
        ratio = median(b / a for a, b in zip(spent["raise"], spent["shrink"], strict=True))
        fastest = min(spent["shrink"]) / min(spent["raise"])
        entries.append({"name": name, "seconds": median(spent["shrink"]), "to_raise": ratio, "fastest": fastest})
        del steps
    if here.rank == 0:
        rows = [[e["name"], seconds_text(e["seconds"]), f"{e['to_raise']:.3f}", f"{e['fastest']:.3f}"] for e in entries]
        print(f"one step, {int(options.elements)} parameters, {here.size} ranks, {_rig.where(here)}")
        print(table(["method", "step with shrink", "to raise", "fastest to fastest"], rows))
        _rig.write(options.json, entries)
    here.barrier("the end of the benchmark")


if __name__ == "__main__":
    main()
