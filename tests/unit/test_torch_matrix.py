"""What torch's models and optimizers may be, on one rank: each comes to what plain torch does, or is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch_offers
from torch import nn

import hpctk
from hpctk.errors import SettingError


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))


def tied():
    model = plain()
    model[2].weight = model[0].weight
    return model


def parametrized():
    model = plain()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def convolution():
    torch.manual_seed(1)
    return nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 6, 1, bias=False), nn.Flatten()).to(
        memory_format=torch.channels_last
    )


MODELS = {
    "plain": plain,
    "compiled": lambda: torch.compile(plain(), backend="eager"),
    "tied weights": tied,
    "parametrized": parametrized,
    "channels last": convolution,
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch_offers.optimizer("SGD", p, lr=0.1, momentum=0.9, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch_offers.optimizer("AdamW", p, lr=0.01, fused=True),
    "Adafactor": lambda p: torch_offers.optimizer("Adafactor", p, lr=0.01),
    "Muon": lambda p: torch_offers.optimizer("Muon", p, lr=0.01),
    "groups": lambda p: torch.optim.SGD([{"params": [x], "lr": 0.1 / (i + 1)} for i, x in enumerate(p)], lr=0.1),
}
METHODS = {"Mean": hpctk.Mean, "LocalSGD": lambda: hpctk.LocalSGD(2)}


def train(model, opt, steps=4, after=()):
    for t in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t))
        opt.zero_grad()
        (model(x) - x.sin()).square().mean().backward()
        opt.step()
        for action in after:
            action()
    return [p.detach().clone() for p in model.parameters()]


def shared(model, base, method=hpctk.Mean):
    return hpctk.ddp.DistributedOptimizer(base, method(), model=model)


def assert_same(one, two):
    assert len(one) == len(two)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


CASES = [("plain", name) for name in OPTIMIZERS] + [(name, "SGD") for name in MODELS if name != "plain"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_it_is_what_plain_torch_computes(model, optimizer, method):
    alone, ours = MODELS[model](), MODELS[model]()
    expected = train(alone, OPTIMIZERS[optimizer](list(alone.parameters())))
    base = OPTIMIZERS[optimizer](list(ours.parameters()))
    assert_same(train(ours, shared(ours, base, METHODS[method])), expected)


def test_one_cycle_changes_rates_and_momenta():
    found = []
    for wrap in (lambda model, base: base, shared):
        model = plain()
        opt = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=6)
        found.append([*train(model, opt, after=[cycle.step]), torch.tensor(opt.param_groups[0]["momentum"])])
    assert_same(*found)
    assert float(found[0][-1]) != 0.9


def test_averages_of_weights():
    found = []
    for wrap in (lambda model, base: base, shared):
        model = plain()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        opt = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, opt, after=[lambda a=averaged, m=model: a.update_parameters(m)])
        found.append([p.detach().clone() for p in averaged.parameters()])
    assert_same(*found)


def test_a_lazy_module_is_refused_until_it_has_shapes():
    model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 6))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match="weight"):
        shared(model, base)
    model(torch.ones(2, 6))
    other = copy.deepcopy(model)
    expected = train(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert_same(train(model, shared(model, torch.optim.SGD(model.parameters(), lr=0.1))), expected)


def test_lbfgs_is_refused_with_the_reason():
    model = plain()
    with pytest.raises(SettingError, match="evaluates its closure several times"):
        shared(model, torch.optim.LBFGS(model.parameters()))
