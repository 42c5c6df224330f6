"""Optimizers and kinds of models of torch on real ranks: all come to the model of one process with all the data."""

import pytest
import torch
import torch_offers
from methods_driver import assert_same_bits
from torch import nn
from training import values

import hpctk


def plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()


def tied():
    model = plain()
    model[2].weight = model[0].weight
    return model


CASES = {
    "SGD fused": (plain, lambda p: torch_offers.optimizer("SGD", p, lr=0.1, momentum=0.9, fused=True)),
    "AdamW foreach": (plain, lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
    "Adafactor": (plain, lambda p: torch_offers.optimizer("Adafactor", p, lr=0.01)),
    "compiled": (lambda: torch.compile(plain(), backend="eager"), lambda p: torch.optim.SGD(p, lr=0.1)),
    "tied weights": (tied, lambda p: torch.optim.SGD(p, lr=0.1)),
}


def loss(model, rank, t):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * t + rank), dtype=torch.float64)
    return (model(x) - x.sin()).square().mean()


@pytest.mark.parametrize("name", CASES)
def test_it_is_one_training(world, name):
    make, optimizer = CASES[name]
    model, alone = make(), make()
    opt = hpctk.DistributedOptimizer(optimizer(model.parameters()), hpctk.Mean(), model=model, schedule="ring")
    base = optimizer(alone.parameters())
    for t in range(4):
        opt.zero_grad()
        loss(model, world.rank, t).backward()
        opt.step()
        base.zero_grad()
        (sum(loss(alone, rank, t) for rank in range(world.size)) / world.size).backward()
        base.step()
    assert_same_bits(world, values(model))
    for one, other in zip(values(model), values(alone), strict=True):
        assert abs(one - other).max() < 1e-9
