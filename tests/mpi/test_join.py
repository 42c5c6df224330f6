"""join(): ranks with different numbers of batches, against a simulation in which those without contribute zeros."""

import copy

import numpy as np
import pytest
import torch
from methods_driver import assert_same_bits
from simulation.adacons import Aggregator
from simulation.compress import TopK
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from training import assert_alike, loss_of, net, sgd, values, wrapped

import hpctk
from hpctk.errors import HpctkError

#: Batches of a rank.
UNEVEN = {
    "more on higher ranks": lambda rank, size: 3 + rank,
    "none on the last": lambda rank, size: 0 if rank == size - 1 else 4,
    "only on the first": lambda rank, size: 5 if rank == 0 else 0,
    "the same on all": lambda rank, size: 3,
    "none at all": lambda rank, size: 0,
}


class Workers:
    """All workers in this process, on one shared model."""

    def __init__(self, size):
        self.size, self.model = size, net()
        self.base = sgd(self.model.parameters())

    def gradients(self, t, batches):
        """The gradient of every worker, zeros where it has no batch t."""
        rows = []
        for rank in range(self.size):
            one = copy.deepcopy(self.model)
            one.zero_grad()
            (loss_of(one, rank, t) * (t < batches[rank])).backward()
            rows.append([parameter.grad.numpy() for parameter in one.parameters()])
        return rows

    def run(self, batches, after_step=None):
        for t in range(max(batches)):
            combined = self.combine(self.gradients(t, batches))
            for parameter, gradient in zip(self.model.parameters(), combined, strict=True):
                parameter.grad = torch.from_numpy(np.array(gradient))
            if after_step is None:
                self.base.step()
            else:
                after_step(self.model, self.base)
        return self.model

    def combine(self, rows):
        return [sum(column) / self.size for column in zip(*rows, strict=True)]


class AdaConsWorkers(Workers):
    aggregator = None

    def combine(self, rows):
        if self.aggregator is None:
            self.aggregator = Aggregator(momentum=0.6)
        return self.aggregator(rows).out


class TopKWorkers(Workers):
    """A rank without data goes on sending what is left in its residuals."""

    residuals = None

    def combine(self, rows):
        if self.residuals is None:
            self.residuals = [[np.zeros_like(x) for x in row] for row in rows]
        sent = []
        for row, kept in zip(rows, self.residuals, strict=True):
            for i, x in enumerate(row):
                kept[i] = kept[i] + x
            sent.append([TopK(0.4)(x) for x in kept])
            for i, x in enumerate(sent[-1]):
                kept[i] = kept[i] - x
        return super().combine(sent)


GRADIENT_METHODS = {
    "Mean": (hpctk.Mean, Workers),
    "AdaCons": (lambda: hpctk.AdaCons(momentum=0.6), AdaConsWorkers),
    "Mean of TopK": (lambda: hpctk.Mean(hpctk.TopK(0.4)), TopKWorkers),
}


def train(world, model, opt, batches, step=None):
    with opt.join():
        for t in range(batches[world.rank]):
            opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            opt.step() if step is None else step()
    return model


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_gradient_methods(world, name, uneven):
    batches = [UNEVEN[uneven](rank, world.size) for rank in range(world.size)]
    make, simulation = GRADIENT_METHODS[name]
    model = net(seed=world.rank)
    opt = wrapped(model, make())
    train(world, model, opt, batches)
    assert_alike(model, simulation(world.size).run(batches), 1e-11)
    assert_same_bits(world, values(model))
    assert opt.stats.steps == max(batches)


class LocalWorkers:
    """Local steps while there is data; averages at every round of those who have some, and at the end."""

    def __init__(self, size, clip):
        self.clip = clip
        self.models = [net() for _ in range(size)]
        self.bases = [sgd(model.parameters()) for model in self.models]

    def run(self, batches, period):
        for t in range(max(batches)):
            for rank, (model, base) in enumerate(zip(self.models, self.bases, strict=True)):
                if t < batches[rank]:
                    model.zero_grad()
                    loss_of(model, rank, t).backward()
                    norm = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
                    base.param_groups[0]["lr"] = 0.1 * min(1.0, self.clip / 0.1 / (1e-10 + norm))
                    base.step()
            if (t + 1) % period == 0:
                self.average()
        self.average()
        return self.models[0]

    @torch.no_grad()
    def average(self):
        for row in zip(*(model.parameters() for model in self.models), strict=True):
            mean = sum(row) / len(row)
            for parameter in row:
                parameter.copy_(mean)


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("period", [1, 2, 10])
@pytest.mark.parametrize("name", ["LocalSGD", "CELGC"])
def test_model_methods(world, name, period, uneven):
    batches = [UNEVEN[uneven](rank, world.size) for rank in range(world.size)]
    method = hpctk.LocalSGD(period) if name == "LocalSGD" else hpctk.CELGC(0.05, period)
    model = net(seed=world.rank)
    train(world, model, wrapped(model, method), batches)
    clip = float("inf") if name == "LocalSGD" else 0.05
    assert_alike(model, LocalWorkers(world.size, clip).run(batches, period))
    # The last round is one of all ranks: they end together.
    assert_same_bits(world, values(model))


def test_several_epochs(world):
    """Leaving join() leaves nothing behind: other ranks may be the ones that run out in the next epoch."""
    model, simulated = net(), Workers(world.size)
    opt = wrapped(model)
    for epoch in range(3):
        batches = [2 + (rank + epoch) % world.size for rank in range(world.size)]
        train(world, model, opt, batches)
        simulated.run(batches)
    assert_alike(model, simulated.model)
    assert_same_bits(world, values(model))


@pytest.mark.parametrize("base", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["exponential", "one cycle"])
def test_schedulers_inside_the_loop(world, base, kind):
    """Ranks that are through do not step their scheduler; in the end all hold what the longest has."""

    def make_base(parameters):
        return sgd(parameters) if base == "sgd" else torch.optim.Adam(parameters, lr=0.05)

    def make_scheduler(optimizer):
        if kind == "exponential":
            return ExponentialLR(optimizer, 0.5)
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=12)

    batches = [2 + 2 * rank for rank in range(world.size)]
    model = net()
    opt = wrapped(model, base=make_base(model.parameters()))
    scheduler = make_scheduler(opt)

    def step():
        opt.step()
        scheduler.step()

    train(world, model, opt, batches, step)
    simulated = Workers(world.size)
    simulated.base = make_base(simulated.model.parameters())
    simulated_scheduler = make_scheduler(simulated.base)

    def both(one, its_base):
        its_base.step()
        simulated_scheduler.step()

    assert_alike(model, simulated.run(batches, both))
    for key in ("lr", "momentum", "betas"):
        assert opt.param_groups[0].get(key) == simulated.base.param_groups[0].get(key)
    # And they go on together: state and rates are the same everywhere.
    for t in range(2):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()
    assert_same_bits(world, values(model))
    kept = [x for state in opt.state.values() for x in state.values() if torch.is_tensor(x)]
    assert_same_bits(world, [x.numpy() for x in kept])
    assert kept


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapping"])
def test_clipping_inside_the_loop(world, overlap):
    batches = [1 + 2 * rank for rank in range(world.size)]
    model = net()
    opt = wrapped(model, overlap=overlap)

    def step():
        opt.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        opt.step()

    def clipped(one, its_base):
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.2)
        its_base.step()

    train(world, model, opt, batches, step)
    assert_alike(model, Workers(world.size).run(batches, clipped))
    assert_same_bits(world, values(model))


@pytest.mark.parametrize("make", [hpctk.Mean, lambda: hpctk.LocalSGD(2)], ids=["Mean", "LocalSGD"])
def test_a_bad_gradient_after_others_ran_out(world, make):
    """All hear of it, those that are through as well; and all may go on."""
    model = net()
    opt = wrapped(model, make())
    last = world.size - 1
    with pytest.raises(HpctkError, match=f"rank {last}: the gradient of '0.weight'"), opt.join():
        for t in range(6 if world.rank == last else 2):
            opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            if t == 3:
                model[0].weight.grad.fill_(float("nan"))
            opt.step()
    train(world, model, opt, [2 + rank for rank in range(world.size)])
    assert_same_bits(world, values(model))


def test_skipping_after_others_ran_out(world):
    batches = [4 if rank == world.size - 1 else 2 for rank in range(world.size)]
    model = net()
    opt = wrapped(model, on_bad_gradient="skip")
    count = iter(range(10))

    def step():
        if next(count) == 3:
            model[0].weight.grad.fill_(float("nan"))
        opt.step()

    train(world, model, opt, batches, step)
    assert_alike(model, Workers(world.size).run([min(n, 3) for n in batches]))
    assert opt.stats.counts["skipped_steps"] == 1


def test_an_exception_inside_passes(world):
    """Nobody waits for anybody when all leave by an exception, wherever each of them is."""
    model = net()
    opt = wrapped(model, hpctk.LocalSGD(10))
    with pytest.raises(KeyError, match="of the user's"), opt.join():
        for t in range(4):
            opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            opt.step()
            if t == world.rank:
                raise KeyError("of the user's")
    assert opt.stats.steps == world.rank + 1
