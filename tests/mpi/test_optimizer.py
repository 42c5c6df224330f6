"""DistributedOptimizer is a torch optimizer: schedulers, groups, closures, hooks, odd gradients."""

import copy
import warnings

import numpy as np
import pytest
import torch
from methods_driver import assert_same_bits
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from training import alone, assert_alike, loss_of, mean_gradients, net, sgd, train, values, wrapped

import hpctk
from hpctk.collectives.engine.engine import engine_of
from hpctk.errors import HpctkError, SettingError

BASES = {
    "sgd": sgd,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("base", BASES)
def test_it_follows_the_base_optimizer_on_mean_gradients(world, base):
    model = net(seed=world.rank)
    opt = wrapped(model, base=BASES[base](model.parameters()))
    assert isinstance(opt, torch.optim.Optimizer)
    train(world, model, opt, 4)
    assert_alike(model, alone(world.size, 4, make_base=BASES[base]))
    assert_same_bits(world, values(model))
    assert opt.stats.steps == 4
    assert not opt.finished


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_both_dtypes(world, dtype):
    model = net(dtype=dtype)
    train(world, model, wrapped(model), 3)
    assert_alike(model, alone(world.size, 3), 1e-6 if dtype == torch.float32 else 1e-12)
    assert all(value.dtype == torch.empty(0, dtype=dtype).numpy().dtype for value in values(model))


SCHEDULERS = {
    "StepLR": lambda opt: StepLR(opt, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda opt: CosineAnnealingLR(opt, T_max=5),
    "ReduceLROnPlateau": lambda opt: ReduceLROnPlateau(opt, factor=0.5, patience=0),
    "OneCycleLR": lambda opt: OneCycleLR(opt, max_lr=0.2, total_steps=6),
}


def advance(scheduler):
    scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()


@pytest.mark.parametrize("made_on", ["the wrapper", "the base before", "the base after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_take_effect_and_warn_nothing(world, name, made_on):
    model, twin = net(), net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base, twin_base = sgd(model.parameters()), sgd(twin.parameters())
        early = SCHEDULERS[name](base) if made_on == "the base before" else None
        opt = wrapped(model, base=base)
        scheduler = early or SCHEDULERS[name](opt if made_on == "the wrapper" else base)
        twin_scheduler = SCHEDULERS[name](twin_base)
        for t in range(5):
            train(world, model, opt, 1, first=t)
            advance(scheduler)
            mean_gradients(twin, world.size, t)
            twin_base.step()
            advance(twin_scheduler)
            assert opt.param_groups[0]["lr"] == base.param_groups[0]["lr"] == twin_base.param_groups[0]["lr"]
    assert base.param_groups[0]["lr"] != 0.1
    assert_alike(model, twin)


def test_groups_have_rates_of_their_own(world):
    def make(parameters):
        first, *rest = parameters
        groups = [{"params": [first], "lr": 0.3}, {"params": rest, "weight_decay": 0.2}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.5)

    model = net()
    opt = wrapped(model, base=make(model.parameters()))
    assert [group["lr"] for group in opt.param_groups] == [0.3, 0.05]
    train(world, model, opt, 3)
    assert_alike(model, alone(world.size, 3, make_base=make))


def test_groups_and_state_are_those_of_the_base(world):
    model = net()
    base = sgd(model.parameters())
    opt = wrapped(model, base=base)
    train(world, model, opt, 1)
    assert opt.param_groups is base.param_groups
    assert opt.state is base.state
    assert opt.defaults == base.defaults
    groups = [dict(base.param_groups[0], lr=0.7)]
    opt.param_groups = groups
    assert base.param_groups is groups


@pytest.mark.parametrize("through", ["wrapper", "base"])
@pytest.mark.parametrize("base", ["sgd", "adam"])
def test_state_dict_round_trip(world, through, base):
    model = net()
    opt = wrapped(model, base=BASES[base](model.parameters()))
    train(world, model, opt, 3)
    state, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    train(world, model, opt, 2, first=3)

    again = net(seed=5)
    again_base = BASES[base](again.parameters())
    other = wrapped(again, base=again_base)
    again.load_state_dict(weights)
    (other if through == "wrapper" else again_base).load_state_dict(state)
    train(world, again, other, 2, first=3)
    assert_alike(again, model, 0)

    plain = BASES[base](net().parameters())
    plain.load_state_dict(state)
    assert plain.state_dict()["param_groups"] == state["param_groups"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(world, set_to_none):
    model = net()
    opt = wrapped(model)
    train(world, model, opt, 1)
    opt.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()
    for t in (1, 2):
        loss_of(model, world.rank, t).backward()
        opt.step()
        opt.zero_grad(set_to_none=set_to_none)
    assert_alike(model, alone(world.size, 3))


@pytest.mark.parametrize("kind", ["float", "tensor", "none"])
def test_closure(world, kind):
    model = net()
    opt = wrapped(model)
    for t in range(3):

        def closure(t=t):
            opt.zero_grad()
            loss = loss_of(model, world.rank, t)
            loss.backward()
            return {"float": float(loss.detach()), "tensor": loss, "none": None}[kind]

        with torch.no_grad():
            loss = opt.step(closure)
        assert {"float": type(loss) is float, "tensor": torch.is_tensor(loss), "none": loss is None}[kind]
    assert_alike(model, alone(world.size, 3))


def test_accumulation_needs_nothing_special(world):
    model = net()
    opt = wrapped(model)
    for t in range(3):
        opt.zero_grad()
        for part in (2 * t, 2 * t + 1):
            (loss_of(model, world.rank, part) / 2).backward()
        opt.step()

    def halves(one, rank, t):
        return (loss_of(one, rank, 2 * t) + loss_of(one, rank, 2 * t + 1)) / 2

    assert_alike(model, alone(world.size, 3, loss=halves))


class Branches(torch.nn.Module):
    """A trunk, a branch that only odd ranks run, and one that nobody runs."""

    def __init__(self):
        super().__init__()
        self.trunk, self.branch, self.idle = net(1), net(2), net(3)


def branched_loss(model, rank, t):
    loss = loss_of(model.trunk, rank, t)
    # In step 1 nobody runs the branch: its momentum must not move then.
    return loss + loss_of(model.branch, rank, t) if rank % 2 and t != 1 else loss


@pytest.mark.parametrize("base", ["sgd", "adam", "adamw"])
def test_gradients_that_some_ranks_or_all_lack(world, base):
    model = Branches()
    opt = wrapped(model, base=BASES[base](model.parameters()))
    for t in range(4):
        opt.zero_grad()
        branched_loss(model, world.rank, t).backward()
        opt.step()
        assert all(parameter.grad is None for parameter in model.idle.parameters())
    assert_alike(model, alone(world.size, 4, model=Branches(), make_base=BASES[base], loss=branched_loss))
    assert_alike(model.idle, net(3), 0)
    assert_same_bits(world, values(model))
    idle = {id(parameter) for parameter in model.idle.parameters()}
    assert not any(id(parameter) in idle for parameter in opt.state)


@pytest.mark.parametrize("make", [hpctk.Mean, lambda: hpctk.LocalSGD(period=1)], ids=["Mean", "LocalSGD"])
def test_step_without_any_gradient_changes_nothing(world, make):
    model = net()
    opt = wrapped(model, make())
    opt.step()
    assert_alike(model, net(), 0)
    train(world, model, opt, 1)
    assert opt.stats.steps == 2


def test_frozen_parameters_stay(world):
    model = net()
    model[0].weight.requires_grad_(False)
    opt = wrapped(model)
    train(world, model, opt, 2)
    twin = net()
    twin[0].weight.requires_grad_(False)
    assert_alike(model, alone(world.size, 2, model=twin))
    np.testing.assert_array_equal(model[0].weight.detach(), net()[0].weight.detach())


def test_a_parameter_thawed_later_is_not_trained_in_silence(world):
    model = net()
    model[0].weight.requires_grad_(False)
    opt = wrapped(model)
    train(world, model, opt, 1)
    model[0].weight.requires_grad_(True)
    with pytest.raises(HpctkError, match=r"0\.weight.*frozen"):
        train(world, model, opt, 1)


def test_a_parameter_frozen_later_stays(world):
    model = net()
    opt = wrapped(model)
    train(world, model, opt, 1)
    model[0].weight.requires_grad_(False)
    held = model[0].weight.detach().clone()
    train(world, model, opt, 2)
    assert torch.equal(model[0].weight, held)


def test_tied_parameters_are_one(world):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(torch.tanh(self.inner(x)))[:, :2]

    torch.manual_seed(3)
    model = Tied().double()
    twin = copy.deepcopy(model)
    opt = wrapped(model)
    train(world, model, opt, 3)
    assert model.outer.weight is model.inner.weight
    assert_alike(model, alone(world.size, 3, model=twin))


class Pictures(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(3, 2, 2))
        self.double()


def picture_loss(model, rank, t):
    generator = torch.Generator().manual_seed(1000 * rank + t)
    x = torch.randn(2, 2, 4, 4, generator=generator, dtype=torch.float64)
    return (model.layers(x.to(memory_format=torch.channels_last)) ** 2).mean()


@pytest.mark.parametrize(
    "make",
    [hpctk.Mean, hpctk.AdaCons, lambda: hpctk.Mean(hpctk.TopK(1.0)), lambda: hpctk.LocalSGD(period=1)],
    ids=["Mean", "AdaCons", "TopK", "LocalSGD"],
)
def test_gradients_in_any_order_of_memory(world, make):
    model, plain = Pictures(), Pictures()
    model.to(memory_format=torch.channels_last)
    opts = wrapped(model, make()), wrapped(plain, make())
    for t in range(2):
        for one, opt in zip((model, plain), opts, strict=True):
            opt.zero_grad()
            picture_loss(one, world.rank, t).backward()
            # The same numbers, whatever the order: some lie in columns.
            weight = one.layers[0].weight
            if one is model:
                assert not weight.grad.is_contiguous()
            opt.step()
    assert not model.layers[0].weight.is_contiguous()
    assert_alike(model, plain)


def test_a_gradient_that_shares_memory_is_left_as_it_lies(world):
    """An expanded gradient (of a sum) has one number in memory for all its elements."""
    parameter = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), hpctk.Mean(), named_parameters=[("x", parameter)]
    )
    parameter.grad = torch.full((1,), float(world.rank), dtype=torch.float64).expand(6)
    opt.step()
    np.testing.assert_allclose(parameter.detach(), -(world.size - 1) / 2)


def clip(model, norm=0.3):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


def test_clipped_before_step(world):
    """What counts is .grad: every rank's own gradient is clipped."""
    model, twin = net(), net()
    opt, twin_base = wrapped(model), sgd(twin.parameters())
    for t in range(3):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        clip(model)
        opt.step()
        rows = []
        for rank in range(world.size):
            one = copy.deepcopy(twin)
            one.zero_grad()
            loss_of(one, rank, t).backward()
            clip(one)
            rows.append([parameter.grad for parameter in one.parameters()])
        for parameter, *grads in zip(twin.parameters(), *rows, strict=True):
            parameter.grad = sum(grads) / world.size
        twin_base.step()
    assert_alike(model, twin)


def test_clipped_after_synchronize(world):
    """After synchronize() the mean gradient is in .grad, and step() sends nothing more."""
    model = net()
    opt = wrapped(model)
    norms = []
    for t in range(3):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.synchronize()
        opt.synchronize()
        norms.append(float(clip(model)))
        opt.step()
    assert_alike(model, alone(world.size, 3, before=lambda one, base, t: clip(one)))
    assert_same_bits(world, [np.array(norms)])
    assert opt.stats.counts["rounds"] == opt.stats.steps == 3


@pytest.mark.parametrize("by", ["the optimizer", "the model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_synchronized_step_may_be_dropped(world, by, set_to_none):
    """As a gradient scaler does: no step after synchronize(), the next batch is exchanged all the same."""
    model = net()
    opt = wrapped(model)
    for t in range(3):
        (opt if by == "the optimizer" else model).zero_grad(set_to_none=set_to_none)
        loss_of(model, world.rank, t).backward()
        opt.synchronize()
        if t != 1:
            opt.step()
    twin = net()
    base = sgd(twin.parameters())
    for t in (0, 2):
        mean_gradients(twin, world.size, t)
        base.step()
    assert_alike(model, twin)


def test_backward_after_synchronize_is_exchanged_too(world):
    model = net()
    opt = wrapped(model)
    loss_of(model, world.rank, 0).backward()
    opt.synchronize()
    loss_of(model, world.rank, 1).backward()
    opt.step()

    def both(one, rank, t):
        return loss_of(one, rank, 0) + loss_of(one, rank, 1)

    assert_alike(model, alone(world.size, 1, loss=both))


def test_closure_after_synchronize_is_exchanged_too(world):
    model = net()
    opt = wrapped(model)
    loss_of(model, world.rank, 0).backward()
    opt.synchronize()

    def closure():
        opt.zero_grad()
        loss_of(model, world.rank, 1).backward()

    opt.step(closure)
    assert_alike(model, alone(world.size, 1, first=1))


def test_synchronize_is_for_gradient_methods(world):
    opt = wrapped(net(), hpctk.LocalSGD())
    with pytest.raises(SettingError, match="LocalSGD does not exchange gradients"):
        opt.synchronize()


def test_step_hooks_fire_once(world):
    model = net()
    base = sgd(model.parameters())
    opt = wrapped(model, base=base)
    fired = []
    for one, name in ((opt, "wrapper"), (base, "base")):
        one.register_step_pre_hook(lambda o, args, kwargs, name=name: fired.append(f"before {name}"))
        one.register_step_post_hook(lambda o, args, kwargs, name=name: fired.append(f"after {name}"))
    train(world, model, opt, 1)
    assert fired == ["before wrapper", "before base", "after base", "after wrapper"]


def test_add_param_group_is_refused(world):
    model = net()
    base = sgd(model.parameters())
    opt = wrapped(model, base=base)
    extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(SettingError, match="base optimizer"):
        opt.add_param_group({"params": [extra]})
    assert len(base.param_groups) == 1
    # What the message says to do:
    base.add_param_group({"params": [extra]})
    named = [*model.named_parameters(), ("extra", extra)]
    again = wrapped(model, base=base, named_parameters=named)
    extra.grad = torch.full_like(extra, world.rank)
    again.step()
    np.testing.assert_allclose(extra.detach(), -0.1 * (world.size - 1) / 2)


def test_stats_are_of_this_optimizer_only(world):
    """Two side by side, and collectives of the user's between their steps."""
    recorders = engine_of(world).recorders
    engine_counter, before = recorders[0], list(recorders)
    models = net(), net(1)
    small, large = (wrapped(model, schedule="ring") for model in models)
    for t in range(3):
        train(world, models[0], small, 1, first=t)
        for i in range(2):
            train(world, models[1], large, 1, first=2 * t + i)
        hpctk.allreduce(torch.ones(1000), schedule="ring")
    assert small.stats.steps == 3
    assert large.stats.steps == 6
    assert large.stats.sent_bytes == 2 * small.stats.sent_bytes
    assert large.stats.messages == 2 * small.stats.messages
    if world.size > 1:
        n = sum(parameter.numel() for parameter in models[0].parameters())
        assert 0 < small.stats.sent_bytes <= 3 * (2 * 8 * n * (world.size - 1) / world.size + 64)
        assert small.stats.seconds > 0
    assert len(recorders) == len(before)
    assert recorders[0] is engine_counter


def test_no_recorder_is_left_behind(world):
    """Also where nothing was ever counted, or a step fails."""
    engine = engine_of(world)
    before = list(engine.recorders)
    model = net()
    opt = wrapped(model)
    opt.step()
    for _ in range(2):
        next(model.parameters()).grad = torch.full((4, 3), float("nan"), dtype=torch.float64)
        with pytest.raises(HpctkError):
            opt.step()
        with opt.averaged_model():
            pass
    assert len(engine.recorders) == len(before)
    assert all(a is b for a, b in zip(engine.recorders, before, strict=True))


def test_no_recorder_is_left_behind_by_equal_counters(comm):
    """On a fresh communicator the engine's counter and the optimizer's hold the same numbers."""
    from hpctk.comm.world import world as world_of

    alone_here = comm.Split(comm.rank)
    here = world_of(alone_here)
    model = net()
    opt = wrapped(model, comm=alone_here)
    recorder = engine_of(here).recorders[0]
    train(here, model, opt, 2)
    assert len(engine_of(here).recorders) == 1
    assert engine_of(here).recorders[0] is recorder
    alone_here.Free()


def test_sub_communicators(comm):
    from hpctk.comm.world import world as world_of

    half = comm.Split(comm.rank % 2, comm.rank)
    here = world_of(half)
    # Halves of different size train different models, at their own pace.
    seed, steps = comm.rank % 2, 2 + comm.rank % 2
    model = net(seed)
    opt = wrapped(model, comm=half)
    train(here, model, opt, steps)
    assert_alike(model, alone(half.size, steps, model=net(seed)))
    half.Free()


@pytest.mark.parametrize("with_model", [True, False])
def test_two_optimizers_on_halves_of_a_model(world, with_model):
    model, twin = net(), net()

    def make(one):
        return sgd(one[0].parameters()), torch.optim.Adam(one[2].parameters(), lr=0.02)

    named = {} if with_model else {"named_parameters": list(model.named_parameters())}
    opts = [
        wrapped(model, method, base, **named)
        for method, base in zip((hpctk.Mean(), hpctk.Mean(hpctk.TopK(1.0))), make(model), strict=True)
    ]
    bases = make(twin)
    for t in range(3):
        for opt in opts:
            opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        mean_gradients(twin, world.size, t)
        for opt, base in zip(opts, bases, strict=True):
            opt.step()
            base.step()
    assert_alike(model, twin)


@pytest.mark.parametrize("text", ["randomk:0.5", "qsgd:4"])
def test_one_method_object_may_serve_two_optimizers(world, text):
    from hpctk.compressors import by_name

    def run(methods):
        models = net(), net()
        opts = [wrapped(model, method) for model, method in zip(models, methods, strict=True)]
        for t in range(2):
            for model, opt in zip(models, opts, strict=True):
                train(world, model, opt, 1, first=t)
        return models

    shared = hpctk.Mean(by_name(text))
    for got, wanted in zip(
        run([shared, shared]), run([hpctk.Mean(by_name(text)), hpctk.Mean(by_name(text))]), strict=True
    ):
        assert_alike(got, wanted, 0)
