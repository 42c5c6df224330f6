"""What a Compression cannot do is an error that says what to use, on every rank and without a hang."""

import pytest
import torch
from horovod_ways import stock, trajectory
from training import loss_of, net, sgd

import hpctk
from hpctk.errors import HpctkError, MismatchError, PeerError, SettingError, TensorError
from hpctk.horovod import tokens


def test_adasum(world, hvd):
    model = net()
    compression = hpctk.horovod.Compression(hpctk.Mean(), model)
    opt = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), compression=compression, op=hvd.Adasum
    )
    with pytest.raises(SettingError, match="op=Adasum"):
        compression.attach(opt)
    if world.size > 1:
        with pytest.raises(SettingError, match="op=Adasum"):
            loss_of(model, world.rank, 0).backward()


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("attach", [False, True])
def test_a_rank_that_has_joined(world, hvd, op, attach):
    if world.size == 1:
        pytest.skip("needs another rank")
    model, opt, _ = stock(hvd, hpctk.Mean(), attach=attach, op=getattr(hvd, op))
    trajectory(world, model, opt, 1)
    # All but the first have joined: the sum over one rank must not pass for an average.
    try:
        if world.rank == 0:
            loss_of(model, world.rank, 1).backward()
            with pytest.raises(PeerError, match=r"a rank has called hvd.join\(\)"):
                opt.step()
    finally:
        hvd.join()


@pytest.mark.parametrize("size", [2, 3, 4, 7, 64, 65536])
def test_every_number_of_joined_ranks_is_noticed(size):
    mine = torch.stack([tokens.token(0), tokens.token(1)])
    present = torch.tensor([1.0, size - 1.0], dtype=torch.float64)
    whole = (mine * present[:, None]).sum(0)
    assert tokens.factor(whole / size, size) == 1
    assert tokens.factor(whole, size) == size
    assert tokens.factor(whole * (1 / 3) * (3 / size), size) == 1
    for first_is_there in (0.0, 1.0):
        for others in {0, 1, size // 2, size - 2, size - 1} - ({size - 1} if first_is_there else set()):
            left = mine[0] * first_is_there + mine[1] * others
            for came_back in (left, left / size):
                with pytest.raises(PeerError, match="joined"):
                    tokens.factor(came_back, size)


REFUSED = {
    "SASG takes a second gradient.*hpctk.horovod.DistributedOptimizer": lambda: hpctk.SASG(),
    "LSGD asks for the loss.*hpctk.horovod.DistributedOptimizer": lambda: hpctk.LSGD(),
    "asynchronous=True.*hpctk.horovod.DistributedOptimizer": lambda: hpctk.MGRAWA(asynchronous=True),
    "need a method or a compressor": lambda: "topk",
}


@pytest.mark.parametrize("text", REFUSED)
def test_methods_that_need_another_optimizer(world, hvd, text):
    with pytest.raises(HpctkError, match=text):
        hpctk.horovod.Compression(REFUSED[text](), net())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"on_bad_gradient": "ignore"}, "on_bad_gradient='ignore': allowed are raise, skip"),
        ({"schedule": "rings"}, "rings"),
    ],
)
def test_settings_are_checked(world, hvd, settings, text):
    with pytest.raises(HpctkError, match=text):
        hpctk.horovod.Compression(hpctk.Mean(), net(), **settings)


def test_float64_beside_half_precision(world, hvd):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 2).half())
    with pytest.raises(TensorError, match="need all float64, or float32"):
        hpctk.horovod.Compression(hpctk.Mean(), model)


def test_ranks_must_agree(world, hvd):
    if world.size == 1:
        pytest.skip("needs another rank")
    with pytest.raises(MismatchError, match="0.3.*0.5"):
        hpctk.horovod.Compression(hpctk.TopK(0.3 if world.rank == 0 else 0.5), net())


def test_a_tensor_that_is_no_gradient(world, hvd):
    compression = hpctk.horovod.Compression(hpctk.Mean(), net())
    with pytest.raises(HpctkError, match=r"a tensor of shape \(3,\) is no gradient"):
        compression.compress(torch.ones(3))


def test_sums_of_updates(world, hvd):
    if world.size == 1:
        pytest.skip("the sum over one rank is its average")
    model, opt, _ = stock(hvd, hpctk.SAEF(hpctk.TopK(0.3)), op=hvd.Sum)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(SettingError, match="SAEF averages"):
        opt.step()
