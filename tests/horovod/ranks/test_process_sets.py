"""Process sets: the exchange runs on the communicator of the set, and leaves the other ranks alone."""

import pytest
from horovod_ways import bits, stock, trajectory
from training import alone, assert_alike, loss_of, net, sgd

import hpctk
from hpctk.errors import HpctkError, SettingError


@pytest.fixture(scope="module")
def few(hvd):
    """All ranks but number 1, as a process set."""
    if hvd.size() == 1:
        pytest.skip("needs another rank")
    return hvd.add_process_set([rank for rank in range(hvd.size()) if rank != 1])


@pytest.fixture(autouse=True)
def _enough_ranks(world):
    if world.size == 1:
        pytest.skip("needs another rank")


@pytest.mark.parametrize("method", [hpctk.Mean(), hpctk.CELGC(clip=0.02, period=1)])
def test_the_set_trains_by_itself(world, hvd, few, method):
    settings = {"process_set": few}
    model, opt, compression = stock(hvd, method, of_compression=settings, **settings)
    # Horovod's own optimizer on the rank outside steps by itself, as always.
    for t in range(3):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()
    twin = net()
    if world.rank == 1:
        base = sgd(twin.parameters())
        for t in range(3):
            base.zero_grad()
            loss_of(twin, world.rank, t).backward()
            base.step()
        assert bits(model) == bits(twin)
        assert compression.stats.steps == 0
        with compression.averaged_model():
            assert bits(model) == bits(twin)
        return
    if isinstance(method, hpctk.Mean):
        ranks = few.ranks
        expected = alone(len(ranks), 3, loss=lambda one, place, t: loss_of(one, ranks[place], t))
        assert_alike(model, expected)
    assert compression.stats.steps == 3
    assert compression._replica.world.size == world.size - 1


def test_the_sum_over_a_set(world, hvd, few):
    if world.rank == 1:
        return
    ranks = few.ranks
    model, opt, _ = stock(hvd, hpctk.Mean(), of_compression={"process_set": few}, process_set=few, op=hvd.Sum)
    trajectory(world, model, opt, 2)

    def total(one, place, t):
        return len(ranks) * loss_of(one, ranks[place], t)

    assert_alike(model, alone(len(ranks), 2, loss=total))


def test_the_own_optimizer_on_a_set(world, hvd, few):
    model = net(seed=world.rank)
    make = hpctk.horovod.DistributedOptimizer
    if world.rank == 1:
        with pytest.raises(SettingError, match="this rank is not in it"):
            make(sgd(model.parameters()), hpctk.Mean(), model=model, process_set=few)
        return
    opt = make(sgd(model.parameters()), hpctk.Mean(), model=model, process_set=few)
    trajectory(world, model, opt, 3)
    ranks = few.ranks
    assert_alike(model, alone(len(ranks), 3, loss=lambda one, place, t: loss_of(one, ranks[place], t)))


def test_a_set_that_horovod_does_not_know(world, hvd):
    with pytest.raises(SettingError, match="Horovod does not know it"):
        hpctk.horovod.Compression(hpctk.Mean(), net(), process_set=hvd.ProcessSet([0]))


def test_two_sets_that_do_not_fit(world, hvd, few):
    model = net()
    compression = hpctk.horovod.Compression(hpctk.Mean(), model)
    opt = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), compression=compression, process_set=few
    )
    with pytest.raises(HpctkError, match="give both the same process_set"):
        compression.attach(opt)
