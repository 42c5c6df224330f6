"""The same seeds, data and method give the same parameters over MPI, over torch.distributed and under DDP.

Bitwise where the schedule is the same. Under DDP, Mean without a compressor and AdaCons add the same numbers in the
order that DDP's buckets give them: there the parameters differ by rounding, which is bounded below.
"""

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hpctk

STEPS = 6
#: Half of a rounding for each addition and each of these steps, and some room for what the steps make of it.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-15}

GRADIENT_METHODS = {
    "Mean": hpctk.Mean,
    "Mean unit_norm": lambda: hpctk.Mean(unit_norm=True),
    "Mean Identity": lambda: hpctk.Mean(hpctk.Identity()),
    "Mean Half": lambda: hpctk.Mean(hpctk.Half()),
    "Mean TopK": lambda: hpctk.Mean(hpctk.TopK(0.1)),
    "Mean TopK keep": lambda: hpctk.Mean(hpctk.TopK(0.1, keep=True)),
    "Mean RandomK": lambda: hpctk.Mean(hpctk.RandomK(0.2)),
    "Mean Sign": lambda: hpctk.Mean(hpctk.Sign()),
    "Mean QSGD": lambda: hpctk.Mean(hpctk.QSGD(4)),
    "Mean PowerSGD": lambda: hpctk.Mean(hpctk.PowerSGD(2)),
    "Mean TopK without feedback": lambda: hpctk.Mean(hpctk.TopK(0.1), error_feedback=False),
    "AdaCons": lambda: hpctk.AdaCons(momentum=0.6),
    "AdaCons layerwise": lambda: hpctk.AdaCons(momentum=0.6, layerwise=True),
}
#: Exchanged bucket by bucket during backward.
BY_BUCKETS = ("Mean", "AdaCons", "AdaCons layerwise")
OTHER_METHODS = {
    "Mean clip": lambda: hpctk.Mean(clip=0.02),
    "SASG": lambda: hpctk.SASG(density=0.1, warmup=2),
    "SAEF TopK": lambda: hpctk.SAEF(hpctk.TopK(0.1), average_every=3),
    "SAEF Sign both ways": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    "SAEF Sign, TopK server": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.TopK(0.2)),
    "MGRAWA": lambda: hpctk.MGRAWA(period=2),
    "LGRAWA": lambda: hpctk.LGRAWA(period=2),
    "CELGC": lambda: hpctk.CELGC(0.02, period=2),
    "LocalSGD": lambda: hpctk.LocalSGD(period=2),
    "EASGD": lambda: hpctk.EASGD(period=2),
    "LSGD": lambda: hpctk.LSGD(period=2),
}
METHODS = GRADIENT_METHODS | OTHER_METHODS


@pytest.fixture(autouse=True)
def several_ranks(world):
    if world.size not in (2, 3):
        pytest.skip("parity is shown at 2 and 3 ranks")


def network(dtype=torch.float32):
    """Convolutions, biases, a matrix: several buckets, and blocks that cut through tensors."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.nn.Sequential(
            torch.nn.Conv2d(2, 5, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(5 * 16, 17), torch.nn.Tanh(),
            torch.nn.Linear(17, 3),
        ).to(dtype)  # fmt: skip


def loss_of(model, rank, t):
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1000 * rank + t)
    x, y = torch.randn(4, 2, 6, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return ((model(x.to(dtype)) - y.to(dtype)) ** 2).mean()


def base_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def seen(model):
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def trained(world, method, comm=None, *, schedule="ring", dtype=torch.float32, overlap=False):
    """Return what this rank holds after every step, and what the method wants evaluated at the end."""
    model = network(dtype)
    opt = hpctk.DistributedOptimizer(base_of(model), method, model=model, comm=comm, schedule=schedule, overlap=overlap)
    held = []
    for t in range(STEPS):

        def closure(t=t):
            opt.zero_grad()
            loss = loss_of(model, world.rank, t)
            loss.backward()
            return loss

        opt.step(closure)
        held.append(seen(model))
    with opt.averaged_model():
        held.append(seen(model))
    return held, opt.stats


def trained_under_ddp(world, group, method, *, schedule="ring", dtype=torch.float32, **settings):
    """Return what this rank holds after every step of a DDP model with the method attached."""
    model = network(dtype)
    # Torch's smallest: several buckets, from the second step on.
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-3, **settings)
    attached = hpctk.ddp.attach(wrapped, method, schedule=schedule)
    base, held = base_of(model), []
    for t in range(STEPS):
        base.zero_grad()
        loss_of(wrapped, world.rank, t).backward()
        base.step()
        held.append(seen(model))
    return held, attached.stats


def assert_same_bits(one, other, what):
    for t, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            assert x.tobytes() == y.tobytes(), f"{what}: step {t}, tensor {i}, by {np.abs(x - y).max()}"


def assert_within(one, other, atol, what):
    for t, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=f"{what}: step {t}, tensor {i}")


@pytest.mark.parametrize("name", METHODS)
def test_the_same_bits_over_torch_distributed(world, process_group, name):
    over_mpi, one = trained(world, METHODS[name]())
    over_gloo, other = trained(world, METHODS[name](), process_group)
    assert_same_bits(over_mpi, over_gloo, name)
    assert (one.sent_bytes, one.messages, one.counts) == (other.sent_bytes, other.messages, other.counts)
    assert one.sent_bytes > 0


@pytest.mark.parametrize("name", [name for name in GRADIENT_METHODS if name not in BY_BUCKETS])
def test_the_same_bits_under_ddp(world, process_group, name):
    # Packets that are summed leave in buckets, too: the ring's order of ranks depends on where an element lies.
    schedule = "recursive_doubling" if name in ("Mean Identity", "Mean Half", "Mean RandomK") else "ring"
    over_mpi, one = trained(world, METHODS[name](), schedule=schedule)
    under_ddp, other = trained_under_ddp(world, process_group, METHODS[name](), schedule=schedule)
    assert_same_bits(over_mpi[:-1], under_ddp, name)
    assert other.counts["rounds"] == one.counts["rounds"] == STEPS


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", BY_BUCKETS)
def test_the_same_but_for_rounding_under_ddp(world, process_group, name, dtype):
    over_mpi, _ = trained(world, METHODS[name](), dtype=dtype)
    under_ddp, stats = trained_under_ddp(world, process_group, METHODS[name](), dtype=dtype)
    assert_within(over_mpi[:-1], under_ddp, ROUNDING[dtype], name)
    if name == "Mean" and world.size == 2:
        # The sum of two numbers is the same in any order.
        assert_same_bits(over_mpi[:-1], under_ddp, name)
    assert stats.counts["rounds"] == STEPS


def test_torchs_own_all_reduce_under_ddp(world, process_group):
    over_mpi, _ = trained(world, hpctk.Mean())
    under_ddp, stats = trained_under_ddp(world, process_group, hpctk.Mean(), schedule="torch")
    assert_within(over_mpi[:-1], under_ddp, ROUNDING[torch.float32], "torch")
    assert stats.uncounted_calls > STEPS
    assert stats.sent_bytes == 0


@pytest.mark.parametrize("name", BY_BUCKETS)
def test_the_same_bits_with_overlap(world, process_group, name):
    over_mpi, _ = trained(world, METHODS[name](), overlap=True)
    over_gloo, _ = trained(world, METHODS[name](), process_group, overlap=True)
    assert_same_bits(over_mpi, over_gloo, name)


@pytest.mark.parametrize("schedule", ["auto", "own"])
def test_schedules_that_differ_agree_but_for_rounding(world, process_group, schedule):
    mpi, torch_ = ("mpi", "torch") if schedule == "own" else (schedule, schedule)
    over_mpi, _ = trained(world, hpctk.Mean(), schedule=mpi)
    over_gloo, stats = trained(world, hpctk.Mean(), process_group, schedule=torch_)
    assert_within(over_mpi, over_gloo, ROUNDING[torch.float32], schedule)
    # So few bytes go by the library's own all-reduce, which does not tell how many it sent.
    assert stats.uncounted_calls > 0
    assert stats.sent_bytes == 0
