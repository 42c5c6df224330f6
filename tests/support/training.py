"""A tiny training job on real ranks, and the same with the batches of all ranks in this process."""

from __future__ import annotations

import copy

import numpy as np
import torch

import hpctk


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Return a small network; the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(dtype)


def loss_of(model: torch.nn.Module, rank: int, t: int) -> torch.Tensor:
    """Return the loss of a rank's batch number t."""
    like = next(model.parameters())
    generator = torch.Generator().manual_seed(1000 * rank + t)
    x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64).to(like) for n in (3, 2))
    return ((model(x) - y) ** 2).mean()


def sgd(parameters) -> torch.optim.Optimizer:
    """Return an optimizer that remembers and decays: what it sees of a parameter leaves a trace."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def wrapped(model, method=None, base=None, **settings) -> hpctk.DistributedOptimizer:
    """Return the distributed optimizer of a model, Mean where no method is given."""
    base = sgd(model.parameters()) if base is None else base
    if "named_parameters" not in settings:
        settings["model"] = model
    return hpctk.DistributedOptimizer(base, hpctk.Mean() if method is None else method, **settings)


def train(world, model, opt, steps, first=0) -> None:
    """Do steps on this rank's batches."""
    for t in range(first, first + steps):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()


def mean_gradients(model, size, t, loss=loss_of) -> None:
    """Leave in .grad the mean over all ranks of the gradients of their batches; a missing one counts as zeros."""
    models = [copy.deepcopy(model) for _ in range(size)]
    for rank, one in enumerate(models):
        one.zero_grad()
        loss(one, rank, t).backward()
    for parameter, *rows in zip(model.parameters(), *(one.parameters() for one in models), strict=True):
        held = [row.grad for row in rows if row.grad is not None]
        parameter.grad = sum(held) / size if held else None


def alone(size, steps, *, model=None, make_base=sgd, loss=loss_of, first=0, before=None) -> torch.nn.Module:
    """Return a model trained in this process on the mean gradients of all ranks; `before(model, base, t)` each step."""
    model = net() if model is None else model
    base = make_base(model.parameters())
    for t in range(first, first + steps):
        mean_gradients(model, size, t, loss)
        if before is not None:
            before(model, base, t)
        base.step()
    return model


def values(model) -> list[np.ndarray]:
    """Return copies of parameters and buffers."""
    return [x.detach().numpy().copy() for x in (*model.parameters(), *model.buffers())]


def assert_alike(model, other, atol=1e-12) -> None:
    """Two models hold the same."""
    for i, (got, wanted) in enumerate(zip(values(model), values(other), strict=True)):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=atol, err_msg=f"tensor {i}")
