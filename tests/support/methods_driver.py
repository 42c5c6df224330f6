"""Drive a method through DistributedOptimizer on real ranks, on the problems of the simulations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from simulation.optimizers import SGD, Adam, AdamW
from simulation.problem import FixedProblem

import hpctk

#: The same base optimizer twice: of torch, and of the simulations.
BASES = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), lambda: SGD(0.1)),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        lambda: SGD(0.05, momentum=0.9, weight_decay=0.01),
    ),
    "nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda: SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), lambda: Adam(0.01)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), lambda: AdamW(0.01, weight_decay=0.1)),
}


class Quadratic(torch.nn.Module):
    """Worker k's loss of a simulated problem, as a model: its gradients come from backward()."""

    def __init__(self, problem: FixedProblem, worker: int, dtype=torch.float64) -> None:
        super().__init__()
        self.problem, self.worker, self.dtype = problem, worker, dtype
        start = [torch.from_numpy(np.array(x)).to(dtype) for x in problem.start()]
        self.tensors = torch.nn.ParameterList([torch.nn.Parameter(x) for x in start])

    def _rows(self, arrays):
        return [torch.from_numpy(np.array(x)).to(self.dtype) for x in arrays]

    def forward(self, t: int) -> torch.Tensor:
        k = self.worker
        rows = zip(
            self._rows(self.problem.scales[k]),
            self._rows(self.problem.targets[k]),
            self._rows(self.problem.shift(k, t)),
            self.tensors,
            strict=True,
        )
        return sum((0.5 * a * (x - b) ** 2 + c * x).sum() for a, b, c, x in rows)

    def arrays(self) -> list[np.ndarray]:
        return [x.detach().numpy().copy() for x in self.tensors]


@dataclass
class Drive:
    """What was seen on this rank after every step."""

    held: list = field(default_factory=list)
    consensus: list = field(default_factory=list)
    optimizer: object = None
    model: object = None


def drive(
    world,
    problem,
    method,
    steps,
    make_base,
    *,
    lr=None,
    start=None,
    closure=False,
    consensus=True,
    dtype=torch.float64,
    **settings,
) -> Drive:
    """Run `method` for `steps` steps; `lr(t)` sets the rate before step t, `start` the parameters afterwards made."""
    model = Quadratic(problem, world.rank, dtype)
    base = make_base(model.parameters())
    opt = hpctk.DistributedOptimizer(base, method, model=model, **settings)
    if start is not None:
        with torch.no_grad():
            for x, value in zip(model.tensors, start, strict=True):
                x.copy_(torch.from_numpy(np.array(value)))
    seen = Drive(optimizer=opt, model=model)
    for t in range(steps):
        if lr is not None:
            for group in opt.param_groups:
                group["lr"] = lr(t)
        if closure:

            def evaluate(t=t):
                opt.zero_grad()
                loss = model(t)
                loss.backward()
                return loss

            opt.step(evaluate)
        else:
            opt.zero_grad()
            loss = model(t)
            loss.backward()
            opt.step(loss=float(loss.detach()))
        seen.held.append(model.arrays())
        if consensus:
            with opt.averaged_model():
                seen.consensus.append(model.arrays())
            assert all(np.array_equal(a, b) for a, b in zip(model.arrays(), seen.held[-1], strict=True))
    return seen


def assert_follows(world, seen: Drive, trajectory, atol=1e-10) -> None:
    """The model held on this rank, and the consensus, follow the simulation in every step."""
    for t, (mine, consensus) in enumerate(zip(seen.held, seen.consensus, strict=True)):
        for i, (got, wanted) in enumerate(zip(mine, trajectory.held[t][world.rank], strict=True)):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=f"held, step {t}, tensor {i}")
        for i, (got, wanted) in enumerate(zip(consensus, trajectory.consensus[t], strict=True)):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=f"consensus, step {t}, tensor {i}")


def assert_same_bits(world, arrays, what="parameters") -> None:
    """All ranks hold the same bits."""
    import hashlib

    digest = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()
    world.agree(what, [("sha256", digest)])
