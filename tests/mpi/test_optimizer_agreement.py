"""Making a DistributedOptimizer: wrong arguments, handshake and broadcast; and evaluation by consensus()."""

import copy
import importlib

import numpy as np
import pytest
import torch
from methods_driver import assert_same_bits
from training import assert_alike, loss_of, net, sgd, train, values, wrapped

import hpctk
from hpctk.errors import HpctkError, MismatchError, SettingError, TensorError


def same_error(world, kind, make):
    """Return the text of the error that `make` raises, the same on every rank."""
    with pytest.raises(HpctkError) as caught:
        make()
    assert type(caught.value) is kind
    world.agree("text of the error", [("text", str(caught.value))])
    return str(caught.value)


def named(model):
    return list(model.named_parameters())


def half_frozen(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return wrapped(model)


def mixed():
    model = net()
    model[0].float()
    return wrapped(model)


WRONG = {
    "need a method": lambda: wrapped(net(), "AdaCons"),
    "need a method such": lambda: wrapped(net(), hpctk.Mean),
    "need a torch optimizer": lambda: hpctk.DistributedOptimizer(net(), hpctk.Mean(), model=net()),
    "is a DistributedOptimizer already": lambda: wrapped(net(), base=wrapped(net())),
    "LBFGS": lambda: wrapped(net(), base=torch.optim.LBFGS(net().parameters())),
    "2 parameters of the optimizer have no name in named_parameters": lambda: wrapped(
        model := net(), named_parameters=named(model)[:2]
    ),
    "4 parameters of the optimizer have no name in the model": lambda: wrapped(net(), base=sgd(net().parameters())),
    "gives a name twice": lambda: wrapped(
        model := net(), named_parameters=[("x", parameter) for parameter in model.parameters()]
    ),
    "gives a parameter under two names": lambda: wrapped(
        model := net(), named_parameters=[*named(model), ("again", model[0].weight)]
    ),
    "give either model= or named_parameters=": lambda: hpctk.DistributedOptimizer(
        sgd(net().parameters()), hpctk.Mean()
    ),
    "give either model= or named": lambda: hpctk.DistributedOptimizer(
        sgd((model := net()).parameters()), hpctk.Mean(), model=model, named_parameters=named(model)
    ),
    "parameters of float16, float64: need all float64, or float32": lambda: wrapped(
        torch.nn.ModuleList([net(dtype=torch.float16), net()])
    ),
    "parameters of float32, float64: need": mixed,
    "no parameter of the optimizer requires a gradient": lambda: half_frozen(net()),
    "overlap=True: LocalSGD does not exchange gradients": lambda: wrapped(net(), hpctk.LocalSGD(), overlap=True),
    "on_bad_gradient='ignore': allowed are raise, skip": lambda: wrapped(net(), on_bad_gradient="ignore"),
    "check_every=-1: need": lambda: wrapped(net(), check_every=-1),
    "schedule='rnig': did you mean ring? known are": lambda: wrapped(net(), schedule="rnig"),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments(world, text):
    said = same_error(world, TensorError if text.startswith("parameters of") else SettingError, WRONG[text])
    assert text in said
    assert "rank 0" in said


def test_wrong_on_one_rank_only(world):
    last = world.size - 1
    said = same_error(
        world, SettingError, lambda: wrapped(net(), on_bad_gradient="no" if world.rank == last else "skip")
    )
    assert f"rank {last}: on_bad_gradient='no'" in said


def wider(model):
    model.extra = torch.nn.Linear(1, 1).double()
    return model


def other_shape():
    model = net()
    model[2] = torch.nn.Linear(4, 3).double()
    return model


def other_names():
    return [(f"odd.{name}", parameter) for name, parameter in named(net())]


def with_named(names):
    return hpctk.DistributedOptimizer(sgd([parameter for _, parameter in names]), hpctk.Mean(), named_parameters=names)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


#: What the message names: how most ranks make it, how the odd one does.
ODD = {
    "method is Mean on rank 0 and AdaCons on": (lambda: wrapped(net()), lambda: wrapped(net(), hpctk.AdaCons())),
    "momentum is 0.9 on rank 0 and 0.8 on": (
        lambda: wrapped(net(), hpctk.AdaCons(momentum=0.9)),
        lambda: wrapped(net(), hpctk.AdaCons(momentum=0.8)),
    ),
    "compressor is {'compressor': 'TopK', 'density': 0.1": (
        lambda: wrapped(net(), hpctk.Mean(hpctk.TopK(0.1))),
        lambda: wrapped(net(), hpctk.Mean(hpctk.TopK(0.2))),
    ),
    "period is 4 on rank 0 and 5 on": (
        lambda: wrapped(net(), hpctk.LocalSGD(4)),
        lambda: wrapped(net(), hpctk.LocalSGD(5)),
    ),
    "lr of group 0 is 0.1 on rank 0 and 0.2 on": (
        lambda: wrapped(net()),
        lambda: wrapped(
            model := net(), base=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        ),
    ),
    "optimizer is SGD on rank 0 and AdamW on": (
        lambda: wrapped(net()),
        lambda: wrapped(model := net(), base=adamw(model)),
    ),
    "'0.weight' on rank 0 and 'odd.0.weight' on": (lambda: with_named(named(net())), lambda: with_named(other_names())),
    "2.weight is torch.float64 (2, 4) trained in group 0, number 2 on rank 0 and torch.float64 (3, 4)": (
        lambda: wrapped(net()),
        lambda: wrapped(other_shape()),
    ),
    "0.weight is torch.float64 (4, 3) trained in group 0, number 0 on rank 0 and torch.float32": (
        lambda: wrapped(net()),
        lambda: wrapped(net(dtype=torch.float32)),
    ),
    "'extra.weight' is only on": (lambda: wrapped(net()), lambda: wrapped(wider(net()))),
    "schedule is auto on rank 0 and ring on": (lambda: wrapped(net()), lambda: wrapped(net(), schedule="ring")),
    "overlap is False on rank 0 and True on": (lambda: wrapped(net()), lambda: wrapped(net(), overlap=True)),
    "on_bad_gradient is raise on rank 0 and skip on": (
        lambda: wrapped(net()),
        lambda: wrapped(net(), on_bad_gradient="skip"),
    ),
}


@pytest.mark.parametrize("text", ODD)
def test_ranks_that_disagree(world, text):
    if world.size == 1:
        pytest.skip("nobody to disagree with")
    odd = world.size - 1
    said = same_error(world, MismatchError, lambda: ODD[text][world.rank == odd]())
    assert text in said
    assert f"rank {odd}" in said


class Everything(torch.nn.Module):
    """Parameters, a frozen one, and buffers of many kinds; all different on every rank at first."""

    def __init__(self, rank):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.net = net(seed=rank)
        self.norm = torch.nn.BatchNorm1d(3).double()
        with torch.no_grad():
            self.norm.running_mean.copy_(random(3))
            self.norm.num_batches_tracked.fill_(7 + rank)
        self.frozen = torch.nn.Parameter(random(5), requires_grad=False)
        self.frozen_half = torch.nn.Parameter(random(3).half(), requires_grad=False)
        self.scalar = torch.nn.Parameter(random())
        self.empty = torch.nn.Parameter(random(0, 3))
        self.picture = torch.nn.Parameter(random(2, 3, 2, 2).to(memory_format=torch.channels_last))
        for name, buffer in {
            "single": random(4).float(),
            "brain": random(3).bfloat16(),
            "flags": random(5) > 0,
            "bytes": (random(5) * 10).to(torch.uint8),
            "turning": torch.view_as_complex(random(3, 2).float()),
            "nothing": torch.empty(0, dtype=torch.int16),
        }.items():
            self.register_buffer(name, buffer)
        self.register_buffer("hidden", random(2), persistent=False)


def contents(model):
    return {name: x.detach().clone() for name, x in (*model.named_parameters(), *model.named_buffers())}


def assert_equal(got, wanted):
    assert list(got) == list(wanted)
    for name in wanted:
        assert torch.equal(got[name], wanted[name]), name


def test_everyone_begins_with_what_rank_0_holds(world):
    model = Everything(world.rank)
    wrapped(model)
    assert_equal(contents(model), contents(Everything(0)))
    assert model.picture.is_contiguous(memory_format=torch.channels_last)


def test_without_a_model_buffers_stay(world):
    model = Everything(world.rank)
    wrapped(model, named_parameters=model.named_parameters())
    mine, first = contents(Everything(world.rank)), contents(Everything(0))
    names = {name for name, _ in model.named_buffers()}
    assert_equal(contents(model), {name: (mine if name in names else first)[name] for name in mine})


def test_parameters_that_nobody_optimizes_are_broadcast_too(world):
    model = net(seed=world.rank)
    wrapped(model, base=sgd(model[2].parameters()))
    assert_alike(model, net(seed=0), 0)


def test_odd_parameters_are_trained(world):
    """A scalar, an empty one, and one in channels-last order."""
    for make in (hpctk.Mean, hpctk.AdaCons, lambda: hpctk.Mean(hpctk.TopK(0.5)), lambda: hpctk.LocalSGD(1)):
        model = Everything(world.rank)
        opt = wrapped(model, make(), base=torch.optim.SGD(model.parameters(), lr=1.0))
        before = contents(model)
        total = model.scalar * 2 + model.empty.sum() + model.picture.sum() * (world.rank + 1)
        total.backward()
        opt.step()
        assert_same_bits(world, [x.detach().numpy() for x in (model.scalar, model.picture)])
        if isinstance(opt.method, hpctk.LocalSGD) or opt.method == hpctk.Mean():
            assert torch.allclose(model.scalar, before["scalar"] - 2)
            assert torch.allclose(model.picture, before["picture"] - (world.size + 1) / 2)


def apart(world, method):
    """Return a model with buffers, trained until the ranks differ, and its optimizer."""
    model = Everything(0)
    opt = wrapped(model, method)
    for name, buffer in model.named_buffers():
        buffer.copy_(dict(Everything(10 + world.rank).named_buffers())[name])
    train(world, model.net, opt, 3)
    return model, opt


METHODS = [hpctk.Mean, lambda: hpctk.LocalSGD(2), lambda: hpctk.CELGC(0.01, 2)]


@pytest.mark.parametrize("make", METHODS, ids=["Mean", "LocalSGD", "CELGC"])
def test_consensus_is_the_mean_and_restores(world, make):
    model, opt = apart(world, make())
    before = contents(model)
    parameters = {name for name, _ in model.named_parameters()}
    with opt.averaged_model():
        inside = contents(model)
    assert_equal(contents(model), before)
    assert_same_bits(world, [x.double().numpy() for x in inside.values() if x.is_floating_point()])
    for name, x in before.items():
        if not x.is_floating_point():
            assert torch.equal(inside[name], x)
            continue
        mean = hpctk.allreduce(x.double())
        tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-6}.get(x.dtype, 1e-12)
        assert torch.allclose(inside[name].double(), mean, rtol=0, atol=tolerance), name
        if name in parameters and isinstance(opt.method, hpctk.Mean):
            assert torch.equal(inside[name], x)


def test_consensus_restores_whatever_happens_inside(world):
    model, opt = apart(world, hpctk.LocalSGD(5))
    before = contents(model)

    def spoil():
        with torch.no_grad():
            for x in (*model.net.parameters(), *model.buffers()):
                x.zero_()
        model.norm.train()
        model.norm(torch.ones(4, 3, dtype=torch.float64))

    with pytest.raises(KeyError), opt.averaged_model():
        spoil()
        # On one rank alone, too: leaving is not collective.
        if world.rank == 0:
            raise KeyError("of the user's")
        raise KeyError("of the others")
    assert_equal(contents(model), before)
    with opt.averaged_model(), torch.inference_mode():
        loss_of(model.net, 0, 0)
    with torch.inference_mode(), opt.averaged_model():
        loss_of(model.net, 0, 0)
    assert_equal(contents(model), before)


def test_training_goes_on_after_consensus_as_if_there_had_been_none(world):
    model, twin = net(), net()
    opt, other = wrapped(model, hpctk.LocalSGD(3)), wrapped(twin, hpctk.LocalSGD(3))
    for t in range(5):
        train(world, model, opt, 1, first=t)
        with opt.averaged_model():
            pass
        train(world, twin, other, 1, first=t)
    assert_alike(model, twin, 0)


def test_buffers_that_a_module_replaces(world):
    """Many modules assign to a buffer instead of writing into it: the tensor of the start is stale then."""

    class Average(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

        def forward(self, x):
            self.mean = 0.5 * self.mean + 0.5 * x
            return (self.weight * self.mean).sum()

    model = Average()
    opt = wrapped(model)
    model(torch.full((2,), 2.0 * world.rank, dtype=torch.float64)).backward()
    opt.step()
    held = model.mean.clone()
    with opt.averaged_model():
        np.testing.assert_allclose(model.mean, (world.size - 1) / 2)
        model(torch.zeros(2, dtype=torch.float64))
    assert torch.equal(model.mean, held)


def test_the_method_and_the_base_are_not_touched_by_a_refused_handshake(world):
    if world.size == 1:
        pytest.skip("nobody to disagree with")
    model = net(seed=world.rank)
    base = sgd(model.parameters())
    state = copy.deepcopy(base.state_dict())
    with pytest.raises(MismatchError):
        wrapped(model, hpctk.LocalSGD(period=3 + world.rank), base=base)
    assert_alike(model, net(seed=world.rank), 0)
    assert base.state_dict() == state
    opt = wrapped(model, hpctk.LocalSGD(period=3), base=base)
    train(world, model, opt, 3)
    assert_same_bits(world, values(model))


def test_a_parameter_in_another_group_is_noticed(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    model = torch.nn.Linear(3, 2)
    order = [model.weight, model.bias] if world.rank == 0 else [model.bias, model.weight]
    base = torch.optim.SGD([{"params": [order[0]], "lr": 0.1}, {"params": [order[1]], "lr": 1.0}])
    with pytest.raises(MismatchError, match="group"):
        hpctk.DistributedOptimizer(base, hpctk.Mean(), model=model)


def test_consensus_inside_join_is_refused(world):
    model = torch.nn.Linear(3, 2)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.LocalSGD(), model=model)
    with pytest.raises(HpctkError, match="after the block"), opt.join(), opt.averaged_model():
        pass
    with opt.averaged_model():
        pass


def test_a_model_in_ddp_is_refused(world, process_group):
    model = torch.nn.parallel.DistributedDataParallel(net(), process_group=process_group)
    said = same_error(world, SettingError, lambda: wrapped(model))
    assert "every byte that the method saves would be sent before" in said
    assert "hpctk.ddp.attach" in said


def test_one_rank_alone_says_so_once(world, comm, caplog, monkeypatch):
    participant = importlib.import_module("hpctk.ways_in.participant")
    participant._say_alone.cache_clear()
    for _ in range(2):
        wrapped(net())
    notes = [record.getMessage() for record in caplog.records if record.name == "hpctk"]
    assert len(notes) == (1 if world.size == 1 else 0)
    assert all("mpirun -n 4" in note and "torchrun" in note for note in notes)
