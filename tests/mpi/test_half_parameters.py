"""float16 and bfloat16 parameters: all that is kept or travels is float32, parameters are rounded once in a step."""

import copy

import pytest
import torch
from half_training import DTYPES, EVERY, GRADIENT, Mixed, bits, by_hand, loss_of, sgd, step

import hpctk

STEPS = 9


@pytest.fixture(autouse=True)
def few_ranks(world):
    if world.size > 3:
        pytest.skip("nothing here depends on a fourth rank")


def trained(world, name, dtype, steps=STEPS, **settings):
    model = Mixed(DTYPES[dtype])
    opt = hpctk.DistributedOptimizer(sgd(model.parameters()), EVERY[name], model=model, **settings)
    for t in range(steps):
        step(opt, model, world.rank, t)
    return model, opt


@pytest.mark.parametrize("name", EVERY)
def test_a_step_is_one_of_float32_and_one_rounding(world, name):
    dtype = "float16" if name in ("Mean", "SAEF", "LocalSGD") else "bfloat16"
    model, opt = trained(world, name, dtype)
    wide = by_hand(
        lambda m: hpctk.DistributedOptimizer(sgd(m.parameters()), EVERY[name], model=m),
        DTYPES[dtype],
        world.rank,
        STEPS,
    )
    rounded = [q.detach().to(p.dtype) for p, q in zip(model.parameters(), wide.parameters(), strict=True)]
    assert bits(model.parameters()) == bits(rounded)
    masters = [kept["float32"] for kept in opt.state_dict()["state"].values() if "float32" in kept]
    assert len(masters) == 4
    if name in GRADIENT:
        world.agree("the model", [("bits", bits(model.parameters()))])


@pytest.mark.parametrize("name", EVERY)
def test_resume_bit_for_bit(world, shared_folder, name):
    """Masters are in the optimizer's state, residuals and the like in the method's, all in float32."""
    half_way, steps = STEPS // 2, STEPS
    model, opt = trained(world, name, "bfloat16", half_way)
    hpctk.save_checkpoint(shared_folder, opt, model)
    for t in range(half_way, steps):
        step(opt, model, world.rank, t)
    other = Mixed(torch.bfloat16, seed=1)
    again = hpctk.DistributedOptimizer(sgd(other.parameters()), EVERY[name], model=other)
    hpctk.load_checkpoint(shared_folder, again, other)
    for t in range(half_way, steps):
        step(again, other, world.rank, t)
    assert bits(other.parameters()) == bits(model.parameters())
    for kept, loaded in zip(opt.state_dict()["state"].values(), again.state_dict()["state"].values(), strict=True):
        assert bits(kept.values()) == bits(loaded.values())


def test_state_dict_alone_resumes_where_nothing_else_is_kept(world):
    model, opt = trained(world, "Mean", "bfloat16", 4)
    other = Mixed(torch.bfloat16, seed=1)
    again = hpctk.DistributedOptimizer(sgd(other.parameters()), hpctk.Mean(), model=other)
    # Torch loads the very tensors that it is given.
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    other.load_state_dict(model.state_dict())
    for one, half in ((opt, model), (again, other)):
        for t in range(4, 7):
            step(one, half, world.rank, t)
    assert bits(other.parameters()) == bits(model.parameters())
    assert {x.dtype for kept in again.state_dict()["state"].values() for x in kept.values()} == {torch.float32}


def test_nothing_of_a_gradient_is_lost(world):
    """What was applied and what is left in float32 residuals add up to all gradients."""
    model = Mixed(torch.bfloat16)
    base = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    opt = hpctk.DistributedOptimizer(base, hpctk.Mean(hpctk.TopK(0.3)), model=model)
    given = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    start = [p.detach().double() for p in model.parameters()]
    for t in range(STEPS):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        for total, p in zip(given, model.parameters(), strict=True):
            total += p.grad.double()
        opt.step()
    left = opt.local_state_dict()["residuals"]
    assert {x.dtype for x in left.values()} == {torch.float32}
    masters = iter(kept["float32"] for kept in opt.state_dict()["state"].values())
    for (name, p), total, began in zip(model.named_parameters(), given, start, strict=True):
        now = p.detach() if p.dtype == torch.float32 else next(masters)
        mine = (total - left[name].double() if name in left else total).numpy()
        mean = hpctk.allreduce(torch.from_numpy(mine))
        torch.testing.assert_close((began - now.double()) * 2.0**6, mean, rtol=0, atol=2e-5)


def test_steps_below_the_resolution_add_up(world):
    """A bfloat16 parameter of 1 has neighbours at 1 - 2^-8 and 1 + 2^-7: a hundred steps of 2^-12 get there."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0**-12), hpctk.Mean(), model=model)
    for _ in range(128):
        model.weight.grad = torch.ones_like(model.weight)
        opt.step()
    assert model.weight.item() == 1 - 128 * 2.0**-12


def test_what_others_write_into_parameters_counts(world):
    """Clamping, loading weights: elements that were written are taken over, the others keep their float32 value."""
    model, opt = trained(world, "Mean", "bfloat16", 3)
    before = [kept["float32"].clone() for kept in opt.state_dict()["state"].values() if "float32" in kept]
    with torch.no_grad():
        model.first.weight.data[0] = 0.25
    after = [kept["float32"] for kept in opt.state_dict()["state"].values() if "float32" in kept]
    assert (after[0][0] == 0.25).all()
    assert bits([after[0][1:], *after[1:]]) == bits([before[0][1:], *before[1:]])


@pytest.mark.parametrize("overlap", [False, True])
def test_synchronize_keeps_the_mean_in_float32_until_somebody_changes_it(world, overlap):
    models = []
    for early in (False, True):
        model = Mixed(torch.bfloat16)
        opt = hpctk.DistributedOptimizer(sgd(model.parameters()), hpctk.Mean(), model=model, overlap=overlap)
        for t in range(4):
            opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            if early:
                opt.synchronize()
                assert model.first.weight.grad.dtype == torch.bfloat16
            if early and t == 3:
                model.zero_grad(set_to_none=False)
            opt.step()
            if t == 2:
                models.append(bits(model.parameters()))
    assert models[0] == models[1]


def test_evaluated_and_put_back(world):
    """Inside averaged_model() the mean of all ranks, rounded; afterwards the same masters as before."""
    model, opt = trained(world, "LocalSGD", "bfloat16", 3)
    model.seen.fill_(float(world.rank))
    before = opt.state_dict()["state"][0]["float32"].clone()
    mean = hpctk.allreduce(before)
    with opt.averaged_model():
        assert bits([model.first.weight]) == bits([mean.bfloat16()])
        assert model.seen[0].item() == torch.tensor((world.size - 1) / 2).bfloat16().item()
    assert bits([opt.state_dict()["state"][0]["float32"]]) == bits([before])
    assert bits([model.first.weight]) == bits([before.bfloat16()])


@pytest.mark.parametrize("name", GRADIENT)
def test_attached_to_ddp(process_group, world, name):
    """The hook rounds what comes of the exchange, once; the step is the user's own optimizer's."""
    from torch.nn.parallel import DistributedDataParallel

    model, wide = Mixed(torch.bfloat16), Mixed(torch.bfloat16).float()
    ddp = DistributedDataParallel(model, process_group=process_group)
    hpctk.ddp.attach(ddp, EVERY[name])
    base = sgd(model.parameters())
    opt = hpctk.ddp.DistributedOptimizer(sgd(wide.parameters()), EVERY[name], model=wide, group=process_group)
    for t in range(4):
        base.zero_grad()
        loss_of(ddp, world.rank, t).backward()
        local = Mixed(torch.bfloat16)
        local.load_state_dict(model.state_dict())
        loss_of(local, world.rank, t).backward()
        for p, q in zip(local.parameters(), wide.parameters(), strict=True):
            q.grad = p.grad.float()
        opt.synchronize()
        for p, q in zip(model.parameters(), wide.parameters(), strict=True):
            if world.size <= 2:
                assert bits([p.grad]) == bits([q.grad.to(p.dtype)])
            else:
                # In which order three are summed depends on an element's place, and DDP's buckets have others.
                torch.testing.assert_close(p.grad, q.grad.to(p.dtype))
        base.step()
        opt.zero_grad()
    world.agree("the model", [("bits", bits(model.parameters()))])


def test_float64_beside_half_precision_is_refused(world):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, dtype=torch.bfloat16), torch.nn.Linear(2, 2).double()])
    with pytest.raises(hpctk.HpctkError, match="need all float64, or float32, float16 and bfloat16"):
        hpctk.DistributedOptimizer(sgd(model.parameters()), hpctk.Mean(), model=model)
