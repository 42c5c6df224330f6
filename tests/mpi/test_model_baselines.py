"""CELGC, LocalSGD, EASGD and LSGD on real ranks: the spec's examples, traps and invariants, and the simulation."""

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_follows, assert_same_bits, drive
from mpi4py import MPI
from simulation import SIMULATIONS
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.errors import HpctkError, SettingError
from hpctk.methods.easgd import EASGD
from hpctk.methods.lsgd import LSGD

METHODS = {"CELGC": hpctk.CELGC, "LocalSGD": hpctk.LocalSGD, "EASGD": EASGD, "LSGD": LSGD}
SETTINGS = {
    "CELGC": {"clip": 0.05, "period": 3},
    "LocalSGD": {"period": 3},
    "EASGD": {"period": 3, "pull": 0.4},
    "LSGD": {"period": 3, "pull": 0.3, "prox": 0.2},
}
SHAPES = ((), (5,), (3, 4), (0, 3), (2, 2, 2), (1, 1))
every = pytest.mark.parametrize("name", METHODS)
STEPS = 11


def falling(t):
    return 0.1 / (1 + 0.3 * t)


def close(got, wanted, atol=1e-12):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@every
@pytest.mark.parametrize("base", BASES)
def test_follows_the_simulation(world, name, base):
    problem = Problem(world.size, seed=12, shapes=SHAPES)
    ours, simulated = BASES[base]
    seen = drive(world, problem, METHODS[name](**SETTINGS[name]), STEPS, ours, lr=falling)
    wanted = SIMULATIONS[name](problem, STEPS, simulated, lr=falling, **SETTINGS[name])
    assert_follows(world, seen, wanted)
    assert_same_bits(world, seen.consensus[-1], "consensus")
    if name in ("CELGC", "LocalSGD"):
        assert_same_bits(world, seen.held[8], "parameters after a round")
    else:
        run = seen.optimizer._run
        assert_same_bits(world, [x.numpy() for x in run.centre], "centre")
        for got, x in zip(run.centre, wanted.log["centre"][-1], strict=True):
            close(got.numpy(), x, 1e-10)
    if name == "LSGD":
        assert run.leader == wanted.log["leader"][8]
    assert seen.optimizer.stats.counts["rounds"] == 3


@every
def test_defaults_follow_the_simulation(world, name):
    problem = Problem(world.size, seed=13)
    ours, simulated = BASES["momentum"]
    settings = {"clip": 0.1} if name == "CELGC" else {}
    seen = drive(world, problem, METHODS[name](**settings), 9, ours, closure=True)
    assert_follows(world, seen, SIMULATIONS[name](problem, 9, simulated, **settings))


@every
def test_runs_repeat_bit_for_bit(world, name):
    problem, method = Problem(world.size, seed=5), METHODS[name](**SETTINGS[name])
    seen = [drive(world, problem, method, 7, BASES["adam"][0], consensus=False) for _ in range(2)]
    assert all(same(a, b) for a, b in zip(*(one.held for one in seen), strict=True))


@every
def test_resumes_bit_for_bit(world, name):
    problem, method = Problem(world.size, seed=8), METHODS[name](**SETTINGS[name])
    ours, _ = BASES["momentum"]
    whole = drive(world, problem, method, STEPS, ours, consensus=False)
    half = drive(world, problem, method, 5, ours, consensus=False)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(ours(model.parameters()), method, model=model)
    with torch.no_grad():
        for x, value in zip(model.tensors, half.held[-1], strict=True):
            x.copy_(torch.from_numpy(value))
    opt.load_state_dict(half.optimizer.state_dict())
    opt.load_local_state_dict(half.optimizer.local_state_dict())
    for t in range(5, STEPS):
        opt.zero_grad()
        loss = model(t)
        loss.backward()
        opt.step(loss=loss)
    assert same(model.arrays(), whole.held[-1])


class Failing(Problem):
    """The last worker's gradient is NaN in step 1."""

    def shift(self, k, t):
        usual = super().shift(k, t)
        return [np.full_like(x, np.nan) for x in usual] if (k, t) == (self.workers - 1, 1) else usual


@every
def test_bad_gradients_are_not_applied(world, name):
    problem = Failing(world.size, seed=4)
    ours, simulated = BASES["momentum"]
    # A NaN loss cannot lead while it is among the last four; alone there is nobody else to.
    if name == "LSGD" and world.size == 1:
        pytest.skip("nobody leads")
    seen = drive(world, problem, METHODS[name](**SETTINGS[name]), 6, ours, on_bad_gradient="skip")
    wanted = SIMULATIONS[name](problem, 6, simulated, **SETTINGS[name])
    assert_follows(world, seen, wanted)
    assert seen.optimizer.stats.counts["skipped_steps"] == 1
    if name == "LSGD":
        assert seen.optimizer._run.leader != world.size - 1


@every
def test_bad_gradients_raise_everywhere_at_the_next_round(world, name):
    problem = Failing(world.size, seed=4)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), METHODS[name](**SETTINGS[name]), model=model
    )
    for t in range(3):
        opt.zero_grad()
        model(t).backward()
        if t < 2:
            opt.step(loss=1.0)
    with pytest.raises(HpctkError, match=f"rank {world.size - 1}: the gradient of 'tensors.0'") as caught:
        opt.step(loss=1.0)
    world.agree("the error", [("text", str(caught.value))])
    assert all(np.isfinite(x).all() for x in model.arrays())


@every
def test_uneven_data(world, name):
    """Rank r has 2 + 2r batches, period 3: nobody hangs, and who is through is still in every round."""
    problem = Problem(world.size, seed=2)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), METHODS[name](**SETTINGS[name]), model=model
    )
    for epoch in range(2):
        with opt.join():
            for t in range(2 + 2 * world.rank):
                opt.zero_grad()
                loss = model(20 * epoch + t)
                loss.backward()
                opt.step(loss=loss)
        world.agree("rounds", [("rounds", opt.stats.counts["rounds"])])
        if name in ("CELGC", "LocalSGD"):
            assert_same_bits(world, model.arrays(), "parameters after join")
    assert opt.stats.counts["rounds"] >= 2 * -(-(2 * world.size) // 3)


@every
def test_between_rounds_nothing_travels(world, name):
    n = 30_000
    parameter = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), METHODS[name](**SETTINGS[name]),
        named_parameters=[("x", parameter)], schedule="ring",
    )  # fmt: skip
    begun = opt.stats
    for step in range(3):
        assert opt.stats.sent_bytes == begun.sent_bytes
        parameter.grad = torch.ones_like(parameter) * (1 + step)
        opt.step(loss=1.0 + world.rank)
    sent = [int(text) for text in world.gather_texts(str(opt.stats.sent_bytes - begun.sent_bytes), "counting")]
    p = world.size
    if name == "LSGD":
        # A broadcast of the model, and a number from each to each.
        assert sum(sent) == (p - 1) * n * 8 + p * (p - 1) * 8
    else:
        assert sum(sent) == pytest.approx(2 * (p - 1) * n * 8, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EASGD(period=0), "period=0: need a whole number"),
        (lambda: EASGD(pull=1.1), "pull=1.1: need a number from 0 to 1"),
        (lambda: LSGD(pull=-1), "pull=-1: need a number from 0 to 1"),
        (lambda: LSGD(prox=2), "prox=2: need a number from 0 to 1"),
        (lambda: LSGD(period=True), "period=True"),
        (lambda: hpctk.LocalSGD(period=0.5), "period=0.5"),
        (lambda: hpctk.CELGC(clip=-1), "clip=-1: need a number, 0 or more"),
        (lambda: hpctk.CELGC(clip=float("nan")), "clip=nan"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(SettingError, match=message):
        make()


# EASGD


def test_easgd_round_conserves_the_sum(world):
    problem = Problem(world.size, seed=3)
    start = [x + world.rank for x in problem.start()]
    method = EASGD(period=1, pull=0.3)
    seen = drive(world, problem, method, 1, lambda p: torch.optim.SGD(p, lr=0.0), start=start)
    mean = [x + (world.size - 1) / 2 for x in problem.start()]
    for i, x in enumerate(problem.start()):
        close(seen.held[0][i], start[i] + 0.3 / world.size * (x - start[i]))
        close(seen.consensus[0][i], 0.7 * x + 0.3 * mean[i])


# LSGD


def test_lsgd_takes_its_loss_from_closures_and_from_step(world):
    problem, ours = Problem(world.size, seed=9), BASES["momentum"][0]
    seen = [drive(world, problem, LSGD(), 8, ours, closure=closure, consensus=False) for closure in (True, False)]
    assert all(same(a, b) for a, b in zip(*(one.held for one in seen), strict=True))


@pytest.mark.parametrize("loss", [None, "low", torch.zeros(2)], ids=["none", "text", "two"])
def test_lsgd_without_a_loss_says_so(loss):
    parameter = torch.nn.Parameter(torch.zeros(2))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.1), LSGD(), named_parameters=[("x", parameter)], comm=MPI.COMM_SELF
    )
    parameter.grad = torch.ones(2)
    with pytest.raises(SettingError, match=r"opt\.step\(loss=\.\.\.\)"):
        opt.step(loss=loss)
    assert not parameter.detach().any()


class Led:
    """One number per rank, its rank; losses are told."""

    def __init__(self, world, **settings):
        self.x = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        base = torch.optim.SGD([self.x], lr=0.0)
        self.opt = hpctk.DistributedOptimizer(base, LSGD(**settings), named_parameters=[("x", self.x)])
        with torch.no_grad():
            self.x.fill_(world.rank)

    def step(self, loss):
        self.x.grad = torch.ones_like(self.x)
        self.opt.step(loss=loss)
        return self.opt._run.leader


def test_lsgd_leader(world):
    last = world.size - 1
    led = Led(world, period=1, pull=0.5, prox=0.0)
    # Equal losses: the lowest rank.
    assert led.step(1.0) == 0
    assert float(led.x.detach()) == world.rank / 2
    # The last rank's mean of (1, 0) is lowest; tensors do as well as numbers.
    assert led.step(torch.tensor(0.0 if world.rank == last else 1.0)) == last
    # A NaN never leads, and is forgotten after four losses.
    for step in range(5):
        loss = {0: float("nan") if step == 0 else -1.0, last: 4.0}.get(world.rank, 5.0)
        leader = led.step(loss)
        if world.size > 1:
            assert leader == (0 if step == 4 else last)


def test_lsgd_without_any_finite_loss_pulls_nobody(world):
    led = Led(world, period=1, pull=0.5, prox=0.0)
    assert led.step(float("inf")) is None
    assert float(led.x.detach()) == world.rank


def test_lsgd_pull_is_nothing_to_the_leader(world):
    led = Led(world, period=1, pull=0.3, prox=0.0)
    with torch.no_grad():
        led.x.fill_(0.1 + world.rank / 3)
    before = float(led.x.detach())
    assert led.step(-float(world.rank)) == world.size - 1
    if world.rank == world.size - 1:
        assert float(led.x.detach()) == before


# CELGC and LocalSGD


def test_celgc_worked_example(world):
    if world.size != 2:
        pytest.skip("the example has two workers")
    problem = FixedProblem([[1.0, 1.0]] * 2, [[0.0, 0.0], [2.7, 3.6]], [3.0, 4.0])
    sgd = BASES["sgd"][0]
    seen = drive(world, problem, hpctk.CELGC(clip=0.2, period=2), 4, sgd)
    table = [
        ([2.88, 3.84], [2.97, 3.96]),
        ([2.8515, 3.802], [2.8515, 3.802]),
        ([2.7315, 3.642], [2.83635, 3.7818]),
        ([2.7171075, 3.62281], [2.7171075, 3.62281]),
    ]
    for t, row in enumerate(table):
        close(seen.held[t][0], row[world.rank], 1e-9)
    close(seen.consensus[2][0], np.mean(table[2], 0), 1e-9)
    assert seen.optimizer.stats.counts["clipped_steps"] == (4 if world.rank == 0 else 0)


def test_celgc_steps_are_at_most_clip_long(world):
    problem = Problem(world.size, seed=6)
    clip, lr = 0.05, 0.1
    seen = drive(world, problem, hpctk.CELGC(clip=clip, period=4), 12, BASES["sgd"][0])
    x = problem.start()
    for t in range(12):
        gradient = np.concatenate([g.ravel() for g in problem.gradient(world.rank, x, t)])
        moved = np.concatenate([(a - b).ravel() for a, b in zip(seen.held[t], x, strict=True)])
        if t % 4 != 3:
            close(np.linalg.norm(moved), min(lr * np.linalg.norm(gradient), clip), 1e-9)
        away = [(a - b).ravel() for a, b in zip(seen.held[t], seen.consensus[t], strict=True)]
        assert np.linalg.norm(np.concatenate(away)) <= 2 * clip * 4
        x = seen.held[t]


def test_celgc_limits(world):
    problem = Problem(world.size, seed=6)
    for base in ("momentum", "adamw"):
        ours = BASES[base][0]
        unclipped = drive(world, problem, hpctk.CELGC(clip=np.inf, period=3), 7, ours)
        local = drive(world, problem, hpctk.LocalSGD(period=3), 7, ours)
        assert all(same(a, b) for a, b in zip(unclipped.held, local.held, strict=True))
    still = drive(world, problem, hpctk.CELGC(clip=0, period=2), 4, BASES["momentum"][0])
    for got, start in zip(still.held[-1], problem.start(), strict=True):
        close(got, start, 1e-15)


def test_period_one_is_training_on_the_mean_gradient_where_nothing_clips(world):
    problem, sgd = Problem(world.size, seed=6), BASES["sgd"][0]
    mean = drive(world, problem, hpctk.Mean(), 6, sgd)
    for method in (hpctk.LocalSGD(period=1), hpctk.CELGC(clip=np.inf, period=1), hpctk.CELGC(100.0, 1)):
        seen = drive(world, problem, method, 6, sgd)
        close(np.concatenate([x.ravel() for x in seen.held[-1]]),
              np.concatenate([x.ravel() for x in mean.held[-1]]))  # fmt: skip
    if world.size > 1:
        # Clip-then-average is not average-then-clip.
        ours = drive(world, problem, hpctk.CELGC(clip=0.05, period=1), 6, sgd)
        naive = drive(world, problem, hpctk.Mean(clip=0.05), 6, sgd)
        assert not np.allclose(ours.held[-1][1], naive.held[-1][1])


def test_celgc_on_the_same_data_depends_on_neither_period_nor_ranks(world):
    problem, ours = Problem(world.size, seed=6, same=True), BASES["momentum"][0]
    runs = [drive(world, problem, hpctk.CELGC(clip=0.05, period=p), 6, ours, lr=falling) for p in (1, 2, 100)]
    alone = type("World", (), {"rank": 0, "size": 1})
    runs.append(drive(alone, problem, hpctk.CELGC(0.05), 6, ours, lr=falling, comm=MPI.COMM_SELF))
    for run in runs[1:]:
        for a, b in zip(run.held[-1], runs[0].held[-1], strict=True):
            close(a, b)


def test_celgc_norm_is_taken_in_float64_over_all_groups(world):
    """float32 sums of squares overflow at 1.8e19, and silently make no step."""
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    base = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.5}], weight_decay=0.0)
    opt = hpctk.DistributedOptimizer(base, hpctk.CELGC(clip=5.0, period=1), named_parameters=[("a", a), ("b", b)])
    a.grad, b.grad = torch.tensor([3e25]), torch.tensor([4e25])
    opt.step()
    close(float(a.detach()), -3.0, 1e-5)
    close(float(b.detach()), -2.0, 1e-5)


def test_averages_preserve_the_mean_and_come_once_more_before_evaluating(world):
    problem, sgd = Problem(world.size, seed=6), BASES["sgd"][0]
    for method in (hpctk.LocalSGD(period=4), hpctk.CELGC(clip=0.05, period=4)):
        often = drive(world, problem, method, 7, sgd)
        # Step 7 is no multiple of the period: the mean is taken for evaluation, the workers stay apart.
        assert_same_bits(world, often.consensus[-1], "consensus")
        if world.size > 1:
            assert not same(often.held[-1], often.consensus[-1])
        assert same(often.held[3], often.consensus[3])


@every
def test_local_steps_do_not_wait_for_others(world, name, monkeypatch):
    model = Quadratic(Problem(world.size, seed=6), world.rank)
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), METHODS[name](**SETTINGS[name]), model=model
    )
    meetings = []
    monkeypatch.setattr(opt._run, "round", lambda: meetings.append(1))
    monkeypatch.setattr(world, "minimum", lambda *_: pytest.fail("a local step asked other ranks"))
    for t in range(3):
        opt.zero_grad()
        model(t).backward()
        opt.step(loss=1.0)
        assert len(meetings) == (t == 2)
