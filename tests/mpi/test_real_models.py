"""Layers that people train, driven by backward() on every rank's own data, against all workers in one process.

The simulation below knows torch and the papers' formulas, nothing of hpctk. A method joins the test by an entry
in METHODS.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import hpctk

STEPS = 5


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2, bias=False))

    def loss(self, draw):
        return nn.functional.cross_entropy(self.layers(draw(6, 3)), draw.integers(2, 6))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten()
        )

    def loss(self, draw):
        return self.layers(draw(3, 2, 4, 4)).square().mean()


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, num_layers=2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def loss(self, draw):
        out, _ = self.recurrent(draw(2, 5, 3))
        return (self.head(out) - draw(2, 5, 1)).square().mean()


class Embedding(nn.Module):
    """Every rank sees other words; nobody sees the last one; the output layer is the same tensor."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 3, padding_idx=0)
        self.norm = nn.LayerNorm(3)
        self.out = nn.Linear(3, 9, bias=False)
        self.out.weight = self.words.weight

    def loss(self, draw):
        return nn.functional.cross_entropy(self.out(self.norm(self.words(draw.integers(8, 7)))), draw.integers(8, 7))


class Draw:
    """The random numbers of a rank's batch."""

    def __init__(self, rank, t):
        self.generator = torch.Generator().manual_seed(100 * rank + t)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, below, n):
        return torch.randint(below, (n,), generator=self.generator)


MODELS = {"linear": Linear, "convolution": Convolution, "lstm": Lstm, "embedding": Embedding}


def build(kind, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[kind]().double()


def make_base(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


class Workers:
    """All workers in this process; derive, and say what one step does once each has its own gradient."""

    def __init__(self, model, size):
        self.models = [copy.deepcopy(model) for _ in range(size)]
        self.bases = [make_base(one) for one in self.models]
        self.t = 0

    def step(self):
        for rank, model in enumerate(self.models):
            model.zero_grad()
            model.loss(Draw(rank, self.t)).backward()
        self.t += 1
        self.combine()

    def gradients(self):
        """One flat gradient of each worker, as rows."""
        return torch.stack([torch.cat([p.grad.flatten() for p in m.parameters()]) for m in self.models])

    def give(self, flat):
        """Let all workers step on the same gradient."""
        for model, base in zip(self.models, self.bases, strict=True):
            parts = flat.split([p.numel() for p in model.parameters()])
            for p, part in zip(model.parameters(), parts, strict=True):
                p.grad = part.view_as(p).clone()
            base.step()

    def average(self):
        with torch.no_grad():
            for rows in zip(*(m.parameters() for m in self.models), strict=True):
                mean = torch.stack([row.detach() for row in rows]).mean(0)
                for row in rows:
                    row.copy_(mean)

    def evaluated(self):
        """What consensus() shows: the mean of the workers' parameters and of their floating point buffers."""
        states = [m.state_dict() for m in self.models]
        return {
            name: torch.stack([state[name] for state in states]).mean(0)
            for name, x in states[0].items()
            if x.is_floating_point()
        }


class MeanWorkers(Workers):
    def combine(self):
        self.give(self.gradients().mean(0))


class AdaConsWorkers(Workers):
    """beta = 0.6, scale "mean_norm", by the formulas of arXiv 2411.03742 with the scale of specs/adacons.md."""

    kept = None

    def combine(self):
        rows = self.gradients()
        if len(rows) == 1:
            self.give(rows[0])
            return
        norms = rows.norm(dim=1)
        units = rows / (norms + 1e-8)[:, None]
        ranked, order = torch.sort(units @ rows.mean(0))
        smoothed = ranked if self.kept is None else 0.6 * self.kept + 0.4 * ranked
        weights = torch.empty_like(smoothed)
        weights[order] = smoothed
        if weights.sum() <= 0.1 * weights.abs().sum():
            self.give(rows.mean(0))
            return
        self.kept = smoothed
        self.give(norms.mean() * (weights / weights.sum()) @ units)


class LocalSgdWorkers(Workers):
    period = 2

    def combine(self):
        for base in self.bases:
            base.step()
        if self.t % self.period == 0:
            self.average()


class CelgcWorkers(Workers):
    """clip = 0.05 at lr = 0.1, period 3: the rate is shortened, so weight decay and momentum are, too."""

    def combine(self):
        for norm, base in zip(self.gradients().norm(dim=1).tolist(), self.bases, strict=True):
            base.param_groups[0]["lr"] = 0.1 * min(1.0, 0.5 / (1e-10 + norm))
            base.step()
        if self.t % 3 == 0:
            self.average()


#: The method, and all its workers in one process.
METHODS = [
    pytest.param(hpctk.Mean, MeanWorkers, id="Mean"),
    pytest.param(lambda: hpctk.AdaCons(momentum=0.6), AdaConsWorkers, id="AdaCons"),
    pytest.param(lambda: hpctk.CELGC(clip=0.05, period=3), CelgcWorkers, id="CELGC"),
    pytest.param(lambda: hpctk.LocalSGD(period=2), LocalSgdWorkers, id="LocalSGD"),
]


def assert_near(got, wanted, what):
    for name, x in wanted.items():
        np.testing.assert_allclose(got[name], x, rtol=0, atol=1e-9, err_msg=f"{what}: {name}")


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("make_method", "simulation"), METHODS)
def test_every_step_is_that_of_the_simulation(world, kind, make_method, simulation):
    model = build(kind, seed=world.rank)
    opt = hpctk.DistributedOptimizer(make_base(model), make_method(), model=model)
    workers = simulation(build(kind), world.size)
    for t in range(STEPS):
        opt.zero_grad()
        model.loss(Draw(world.rank, t)).backward()
        opt.step()
        workers.step()
        # Buffers, too: running statistics stay this rank's own.
        assert_near(model.state_dict(), workers.models[world.rank].state_dict(), f"step {t}")
    held = copy.deepcopy(model.state_dict())
    with opt.averaged_model():
        assert_near(model.state_dict(), workers.evaluated(), "consensus")
    assert all(torch.equal(held[name], x) for name, x in model.state_dict().items())


def test_running_statistics_are_local_and_averaged_only_with_the_model(world):
    model = build("convolution")
    norm = model.layers[1]
    opt = hpctk.DistributedOptimizer(make_base(model), hpctk.Mean(), named_parameters=model.named_parameters())
    model.loss(Draw(world.rank, 0)).backward()
    opt.step()
    mine = norm.running_mean.clone()
    with opt.averaged_model():
        assert torch.equal(norm.running_mean, mine)
    if world.size > 1:
        assert not torch.allclose(hpctk.allreduce(mine), mine, atol=1e-6)
    again = hpctk.DistributedOptimizer(make_base(model), hpctk.Mean(), model=model)
    theirs = norm.running_mean.clone()
    assert torch.equal(theirs, hpctk.ops.broadcast(mine))
    model.loss(Draw(world.rank, 1)).backward()
    again.step()
    with again.averaged_model():
        assert torch.equal(norm.running_mean, hpctk.ops.broadcast(norm.running_mean))
    assert int(norm.num_batches_tracked) == 2
