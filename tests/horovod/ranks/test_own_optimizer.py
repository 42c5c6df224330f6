"""hpctk.horovod.DistributedOptimizer: what Horovod's users do with an optimizer works with it."""

import pytest
import torch
from horovod_ways import bits, own, trajectory
from methods_driver import assert_same_bits
from training import alone, assert_alike, loss_of, net, sgd, values

import hpctk

METHODS = [hpctk.Mean(hpctk.TopK(0.3)), hpctk.AdaCons(), hpctk.SAEF(hpctk.TopK(0.3)), hpctk.LocalSGD(period=2)]


def test_clipping_between_synchronize_and_step(world, hvd):
    def clip(model, base, t):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    model, opt = own(world, hpctk.Mean())
    for t in range(3):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.synchronize()
        clip(model, opt, t)
        with opt.skip_synchronize():
            opt.step()
    assert_alike(model, alone(world.size, 3, before=clip))
    assert opt.stats.counts["rounds"] == 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", [sgd, lambda p: torch.optim.AdamW(p, lr=0.01)], ids=["sgd", "adamw"])
def test_rank_0_has_a_state_and_the_others_have_none(world, hvd, method, base):
    # As after a restart: rank 0 has read a checkpoint. The others make a state, and nothing else happens.
    model = net()
    opt = hpctk.horovod.DistributedOptimizer(base(model.parameters()), method, model=model)
    if world.rank == 0:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        opt._base.step()
        model.load_state_dict(net().state_dict())
        opt.zero_grad()
    before, local = bits(model), str(opt.local_state_dict())
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    assert bits(model) == before
    assert str(opt.local_state_dict()) == local
    assert opt.stats.steps == 0
    state = [tensor for one in opt.state_dict()["state"].values() for tensor in one.values()]
    assert len(state) >= 4
    assert_same_bits(world, [tensor.numpy() for tensor in state], "the base optimizer's state")
    trajectory(world, model, opt, 2)


@pytest.mark.parametrize("method", METHODS[:2])
def test_broadcasts_in_the_midst_of_training_change_nothing(world, hvd, method):
    # Gradient methods hold the same everywhere; residuals differ, and are not given away.
    model, opt = own(world, method)
    wanted = trajectory(world, model, opt, 4)
    model, opt = own(world, method)
    seen = trajectory(world, model, opt, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    seen += trajectory(world, model, opt, 2, first=2)
    assert seen == wanted


def test_the_learning_rate_of_rank_0_is_taken_over(world, hvd):
    model, opt = own(world, hpctk.Mean())
    trajectory(world, model, opt, 1)
    for group in opt.param_groups:
        group["lr"] = 0.1 + world.rank
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    assert [group["lr"] for group in opt.param_groups] == [0.1]


def test_ranks_may_run_out_of_data(world, hvd):
    model, opt = own(world, hpctk.Mean())
    with opt.join():
        trajectory(world, model, opt, 2 + world.rank)
    assert opt.stats.steps == 1 + world.size
    assert_same_bits(world, values(model))


def test_it_is_the_same_optimizer(world, hvd):
    _, opt = own(world, hpctk.Mean())
    assert isinstance(opt, hpctk.DistributedOptimizer)
    assert type(opt).__module__ == "hpctk.horovod.optimizer"
