"""One method object, the same parameters over MPI and by both ways under Horovod: bit for bit, same schedule."""

import pytest
from horovod_ways import over_mpi, own, stock, trajectory
from training import loss_of

import hpctk

STEPS = 5

METHODS = {
    "Mean": lambda: hpctk.Mean(),
    "Mean Identity": lambda: hpctk.Mean(hpctk.Identity()),
    "Mean Half": lambda: hpctk.Mean(hpctk.Half()),
    "Mean TopK": lambda: hpctk.Mean(hpctk.TopK(0.3)),
    "Mean TopK keep": lambda: hpctk.Mean(hpctk.TopK(0.3, keep=True)),
    "Mean RandomK": lambda: hpctk.Mean(hpctk.RandomK(0.3)),
    "Mean Sign": lambda: hpctk.Mean(hpctk.Sign()),
    "Mean QSGD": lambda: hpctk.Mean(hpctk.QSGD(4)),
    "Mean PowerSGD": lambda: hpctk.Mean(hpctk.PowerSGD(1)),
    "Mean without feedback": lambda: hpctk.Mean(hpctk.TopK(0.3), error_feedback=False),
    "Mean clip": lambda: hpctk.Mean(clip=0.02),
    "Mean unit norm": lambda: hpctk.Mean(unit_norm=True),
    "AdaCons": lambda: hpctk.AdaCons(),
    "AdaCons layerwise": lambda: hpctk.AdaCons(momentum=0.9, layerwise=True),
    "SAEF": lambda: hpctk.SAEF(hpctk.TopK(0.3), average_every=3),
    "SAEF Sign both ways": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    "MGRAWA": lambda: hpctk.MGRAWA(period=3),
    "LGRAWA": lambda: hpctk.LGRAWA(period=2),
    "CELGC": lambda: hpctk.CELGC(clip=0.02, period=2),
    "EPISODE": lambda: hpctk.EPISODE(clip=0.02, period=2),
    "EF21": lambda: hpctk.EF21(hpctk.TopK(0.1)),
    "DiLoCo": lambda: hpctk.DiLoCo(period=2),
    "DiLoCo streaming": lambda: hpctk.DiLoCo(period=4, fragments=2, delay=1, compressor=hpctk.TopK(0.3)),
    "SparseLoCo": lambda: hpctk.SparseLoCo(period=2, k=2, chunk=8),
    "SA-PEF": lambda: hpctk.SAEF(hpctk.TopK(0.3), step_ahead=0.85, period=2),
    "Mean ChunkTopK": lambda: hpctk.Mean(hpctk.ChunkTopK(2, 8)),
    "LocalSGD TopK": lambda: hpctk.LocalSGD(period=2, compressor=hpctk.TopK(0.3)),
    "CELGC Sign": lambda: hpctk.CELGC(clip=0.02, period=2, compressor=hpctk.Sign()),
    "LGRAWA TopK": lambda: hpctk.LGRAWA(period=2, compressor=hpctk.TopK(0.3)),
    "LocalSGD": lambda: hpctk.LocalSGD(period=3),
    "EASGD": lambda: hpctk.EASGD(period=2),
}

#: What the stock optimizer cannot do.
OWN_ONLY = {"SASG": lambda: hpctk.SASG(density=0.3, warmup=2, max_delay=3), "LSGD": lambda: hpctk.LSGD(period=2)}


@pytest.mark.parametrize("name", METHODS)
def test_three_ways_give_the_same_bits(world, hvd, name):
    method = METHODS[name]()
    wanted = trajectory(world, *over_mpi(world, method), STEPS)
    assert trajectory(world, *own(world, method), STEPS) == wanted
    model, opt, compression = stock(hvd, method)
    assert trajectory(world, model, opt, STEPS) == wanted
    assert len(set(wanted)) == STEPS
    assert compression.stats.steps == STEPS


@pytest.mark.parametrize("name", OWN_ONLY)
def test_closures_with_the_own_optimizer(world, hvd, name):
    def train(model, opt):
        def step(t):
            def closure():
                opt.zero_grad()
                loss = loss_of(model, world.rank, t)
                loss.backward()
                return loss

            opt.step(closure)

        return trajectory(world, model, opt, STEPS, step=step)

    method = OWN_ONLY[name]()
    assert train(*own(world, method)) == train(*over_mpi(world, method))


def test_the_counts_are_those_of_the_own_optimizer(world, hvd):
    method = hpctk.Mean(hpctk.TopK(0.3))
    model, wanted = over_mpi(world, method)
    trajectory(world, model, wanted, 3)
    model, opt, compression = stock(hvd, method)
    trajectory(world, model, opt, 3)
    for item in ("sent_bytes", "received_bytes", "messages", "counts"):
        assert getattr(compression.stats, item) == getattr(wanted.stats, item), item


#: After three steps; a fragment of "DiLoCo streaming" is under way then.
RESUMED = (
    "Mean TopK", "Mean PowerSGD", "AdaCons", "SAEF", "MGRAWA", "CELGC", "EPISODE", "EF21", "DiLoCo", "DiLoCo streaming",
    "SparseLoCo", "SA-PEF", "LocalSGD TopK",
)  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_from_its_local_state(world, hvd, name):
    method = METHODS[name]()
    model, opt, _ = stock(hvd, method)
    wanted = trajectory(world, model, opt, STEPS)
    model, opt, compression = stock(hvd, method)
    assert compression.local_state_dict() == {}
    assert trajectory(world, model, opt, 3) == wanted[:3]
    other, resumed, its = stock(hvd, method)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict())
    its.load_local_state_dict(compression.local_state_dict())
    assert trajectory(world, other, resumed, STEPS - 3, first=3) == wanted[3:]
