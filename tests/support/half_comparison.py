"""One method on a task, in float32 and with parameters in bfloat16: the loss on held-out data in the end.

./launch/mpirun -n 2 python -m mpi4py tests/support/half_comparison.py digits|lstm [STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

import hpctk
from hpctk.comm.world import world
from hpctk.tasks.digits import load
from hpctk.tasks.lm import Reader, manual

SEEDS = (0, 1, 2)
METHODS = {
    "Mean": hpctk.Mean(),
    "Mean(TopK)": hpctk.Mean(hpctk.TopK(0.1)),
    "AdaCons": hpctk.AdaCons(0.9, "coefficients"),
    "EF21(TopK)": hpctk.EF21(hpctk.TopK(0.1)),
    "SAEF(TopK)": hpctk.SAEF(hpctk.TopK(0.05)),
    "SAEF(Sign, Sign)": hpctk.SAEF(hpctk.Sign(), hpctk.Sign()),
    "SASG": hpctk.SASG(0.1, alpha=0.1, max_delay=2, reduce="mean"),
    "LocalSGD": hpctk.LocalSGD(4),
    "LocalSGD(TopK)": hpctk.LocalSGD(4, compressor=hpctk.TopK(0.1)),
    "EASGD": hpctk.EASGD(4),
    "LSGD": hpctk.LSGD(4),
    "CELGC": hpctk.CELGC(0.5, 4),
    "EPISODE": hpctk.EPISODE(0.5, 4),
    "MGRAWA": hpctk.MGRAWA(4),
    "LGRAWA": hpctk.LGRAWA(4),
    "DiLoCo": hpctk.DiLoCo(4),
    "SparseLoCo": hpctk.SparseLoCo(4, k=64, chunk=512),
}


class Digits:
    """The bundled images and a network of two hidden layers."""

    lr, momentum, steps = 0.05, 0.9, 60

    def __init__(self) -> None:
        self.train, self.test = load()

    def model(self) -> torch.nn.Module:
        """Return the network."""
        sizes = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.ReLU()]
        return torch.nn.Sequential(*sizes, torch.nn.Linear(32, 10))

    def batch(self, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random images and their labels."""
        chosen = torch.randint(len(self.train.labels), (32,), generator=draws)
        return self.train.images[chosen], self.train.labels[chosen]

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images for testing."""
        return self.test.images, self.test.labels


class Lstm:
    """The language model of `hpctk train lm`, small: it predicts the next byte of CPython's manual."""

    lr, momentum, steps = 0.5, 0.9, 60
    window, held = 24, 64

    def __init__(self) -> None:
        text = torch.frombuffer(bytearray(manual()), dtype=torch.uint8).long()
        n = (len(text) - 1) // self.window
        starts = torch.arange(n).unsqueeze(1) * self.window
        windows = text[starts + torch.arange(self.window + 1)]
        self.train, self.test = windows[: -self.held], windows[-self.held :]

    def model(self) -> torch.nn.Module:
        """Return embedding, LSTM and scores."""
        return Reader(32)

    def batch(self, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random windows, and the byte after each of theirs."""
        chosen = self.train[torch.randint(len(self.train), (8,), generator=draws)]
        return chosen[:, :-1], chosen[:, 1:]

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last windows."""
        return self.test[:, :-1], self.test[:, 1:]


TASKS = {"digits": Digits, "lstm": Lstm}


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, in float32."""
    x = x.to(next(model.parameters()).dtype) if x.is_floating_point() else x
    return torch.nn.functional.cross_entropy(model(x).float().flatten(0, -2), y.flatten())


def trained(task, name: str, dtype: torch.dtype, seed: int, steps: int) -> float:
    """Return the loss on held-out data of the model to be evaluated. Collective over all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = task.model().to(dtype)
    base = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    opt = hpctk.DistributedOptimizer(base, METHODS[name], model=model)
    draws = torch.Generator().manual_seed(100 * seed + opt.world.rank)
    for _ in range(steps):
        x, y = task.batch(draws)

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        opt.step(closure)
    with opt.averaged_model(), torch.no_grad():
        return float(loss_of(model, *task.held_out()))


def compared(task, name: str, steps: int, seeds=SEEDS) -> tuple[list[float], list[float]]:
    """Return the losses in float32 for each of SEEDS, and in bfloat16 for each of `seeds`."""
    wide = [trained(task, name, torch.float32, seed, steps) for seed in SEEDS]
    return wide, [trained(task, name, torch.bfloat16, seed, steps) for seed in seeds]


def main() -> None:
    """Print a row for each method."""
    torch.set_num_threads(1)
    task = TASKS[sys.argv[1]]()
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else task.steps
    for name in METHODS:
        wide, half = compared(task, name, steps)
        off, spread = abs(sum(half) - sum(wide)) / len(SEEDS), max(wide) - min(wide)
        if world().rank == 0:
            verdict = "within" if off <= spread else "OUTSIDE"
            means = f"{sum(wide) / 3:.3f} | {sum(half) / 3:.3f}"
            print(f"| {name} | {means} | {spread:.3f} | {off:.3f} | {verdict}", flush=True)


if __name__ == "__main__":
    main()
