"""MGRAWA and LGRAWA, synchronous, on real ranks: the spec's examples, traps and invariants, and the simulation."""

import random
import time

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_follows, assert_same_bits, drive
from mpi4py import MPI
from simulation import SIMULATIONS, grawa
from simulation.problem import Problem

import hpctk
from hpctk.errors import HpctkError, PeerError, SettingError
from hpctk.methods.grawa import LGRAWA, MGRAWA, NONE_YET, weights

METHODS = {"MGRAWA": MGRAWA, "LGRAWA": LGRAWA}
SETTINGS = {"period": 3, "pull": 0.4, "prox": 0.2}
SHAPES = ((), (5,), (3, 4), (0, 3), (2, 2, 2), (1, 1))
both = pytest.mark.parametrize("name", METHODS)


def falling(t):
    return 0.1 / (1 + 0.3 * t)


class Hands:
    """Tensors A of 2 and B of 1 element, whose gradients the test writes; lr = 0: only rounds move them."""

    def __init__(self, method, lr=0.0, comm=None, **settings):
        self.tensors = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 1)]
        base = torch.optim.SGD(self.tensors, lr=lr)
        named = list(zip("AB", self.tensors, strict=True))
        self.opt = hpctk.DistributedOptimizer(base, method, named_parameters=named, comm=comm, **settings)
        self.run = self.opt._run

    def put(self, x):
        with torch.no_grad():
            self.tensors[0].copy_(torch.tensor(x[:2]))
            self.tensors[1].copy_(torch.tensor(x[2:]))

    def step(self, gradient):
        for tensor, part in zip(self.tensors, (gradient[:2], gradient[2:]), strict=True):
            tensor.grad = None if None in part else torch.tensor(part, dtype=torch.float64)
        self.opt.step()

    @property
    def x(self):
        return torch.cat([tensor.detach() for tensor in self.tensors]).numpy()

    @property
    def centre(self):
        return torch.cat(self.run.centre).numpy()


def close(got, wanted, atol=1e-12):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


X = [(1.0, 2.0, 3.0), (0.0, 1.0, -1.0), (2.0, -1.0, 1.0), (4.0, 0.5, -2.0)]
G = [(3.0, 4.0, 1.0), (0.0, 1.0, 4.0), (2.0, 0.0, 5.0), (1.0, 1.0, 1.0)]
ONCE = {"period": 1, "prox": 0.0}


@pytest.mark.parametrize(
    ("name", "betas", "centre", "after"),
    [
        (
            "MGRAWA",
            [[35 / 107], [42 / 107], [30 / 107]],
            (0.88785047, 0.76635514, 0.86915888),
            [
                (0.94392523, 1.38317757, 1.93457944),
                (0.44392523, 0.88317757, -0.06542056),
                (1.44392523, -0.11682243, 0.93457944),
            ],
        ),
        (
            "LGRAWA",
            [[2 / 17, 20 / 29], [10 / 17, 5 / 29], [5 / 17, 4 / 29]],
            (0.70588235, 0.52941176, 2.03448276),
            [
                (0.85294118, 1.26470588, 2.51724138),
                (0.35294118, 0.76470588, 0.51724138),
                (1.35294118, -0.23529412, 1.51724138),
            ],
        ),
    ],
)
def test_worked_example(world, name, betas, centre, after):
    if world.size != 3:
        pytest.skip("the example has three workers")
    hands = Hands(METHODS[name](**ONCE))
    hands.put(X[world.rank])
    hands.step(G[world.rank])
    close(hands.run.weights, betas)
    close(hands.centre, centre, 1e-8)
    close(hands.x, after[world.rank], 1e-8)


@both
@pytest.mark.parametrize("base", BASES)
def test_follows_the_simulation(world, name, base):
    problem = Problem(world.size, seed=10, shapes=SHAPES)
    ours, simulated = BASES[base]
    seen = drive(world, problem, METHODS[name](**SETTINGS), 10, ours, lr=falling)
    wanted = SIMULATIONS[name](problem, 10, simulated, lr=falling, **SETTINGS)
    assert_follows(world, seen, wanted)
    run = seen.optimizer._run
    for got, centre in zip(run.centre, wanted.log["centre"][-1], strict=True):
        close(got.numpy(), centre, 1e-10)
    close(run.weights, wanted.log["betas"][8], 1e-10)
    assert_same_bits(world, [tensor.numpy() for tensor in run.centre], "x_C")
    assert seen.optimizer.stats.counts == {"rounds": 3}


@both
def test_other_settings_follow_the_simulation(world, name):
    problem = Problem(world.size, seed=11)
    ours, simulated = BASES["nesterov"]
    for settings in ({}, {"period": 1, "pull": 1.0, "prox": 1.0, "ema": 0.0}, {"period": 2, "pull": 0.0}):
        seen = drive(world, problem, METHODS[name](**settings), 5, ours)
        assert_follows(world, seen, SIMULATIONS[name](problem, 5, simulated, **settings))


@both
def test_float32_follows_roughly(world, name):
    problem = Problem(world.size, seed=10)
    ours, simulated = BASES["momentum"]
    seen = drive(world, problem, METHODS[name](**SETTINGS), 10, ours, dtype=torch.float32)
    assert seen.held[-1][1].dtype == np.float32
    assert_follows(world, seen, SIMULATIONS[name](problem, 10, simulated, **SETTINGS), atol=1e-5)


@both
def test_runs_repeat_bit_for_bit_and_centres_are_shared(world, name):
    problem = Problem(world.size, seed=5)
    ours, _ = BASES["adam"]
    seen = [drive(world, problem, METHODS[name](**SETTINGS), 9, ours, consensus=False) for _ in range(2)]
    for a, b in zip(*(one.held for one in seen), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    hands = Hands(METHODS[name](period=1), lr=0.1)
    for t in range(4):
        hands.step(tuple(np.sin(np.arange(3) + world.rank + t)))
        assert_same_bits(world, [hands.centre, hands.run.weights], "x_C and beta")


def test_weights():
    nhat = np.array([[2.0, 0.0, 1e-9], [4.0, 0.0, 3.0]])
    found = weights(nhat)
    floor = 1e-3 * (3.0 + 1e-9) / 2
    close(found[:, 0], [2 / 3, 1 / 3])
    close(found[:, 1], [0.5, 0.5])
    close(found[:, 2], np.array([1 / floor, 1 / 3]) / (1 / floor + 1 / 3))
    close(weights(7 * nhat), found)
    close(weights(np.full((3, 2), 5.0)), np.full((3, 2), 1 / 3))
    close(weights(np.vstack([nhat, np.full(3, np.nan)])), np.vstack([found, np.zeros(3)]))
    close(weights(np.vstack([np.full(3, NONE_YET), nhat])), np.vstack([np.zeros(3), found]))
    close(weights(np.full((4, 1), NONE_YET)), np.full((4, 1), 0.25))
    for tiny in (1e-320, 1e308):
        close(weights(np.array([[tiny], [tiny]])), [[0.5], [0.5]])
    for nothing in (np.full((2, 1), np.nan), np.array([[np.nan], [NONE_YET]])):
        with pytest.raises(HpctkError, match="no rank has a gradient that is finite"):
            weights(nothing)
    rng = np.random.default_rng(1)
    norms = rng.exponential(size=(5, 3))
    found = weights(norms)
    close(found.sum(0), 1)
    close(found, grawa.betas(norms))
    assert np.array_equal(np.argsort(found, 0), np.argsort(norms, 0)[::-1])


@both
def test_a_round_keeps_its_invariants(world, name):
    hands = Hands(METHODS[name](**ONCE, pull=0.3))
    hands.put(X[world.rank])
    hands.step(G[world.rank])
    close(hands.x - hands.centre, 0.7 * (np.array(X[world.rank]) - hands.centre))
    betas = np.broadcast_to(hands.run.weights, (world.size, 2))[:, [0, 0, 1]]
    close(betas.sum(0), 1)
    close((betas * X[: world.size]).sum(0), hands.centre)
    moved = hands.centre + 0.7 * (np.array(X[: world.size]) - hands.centre)
    close((betas * moved).sum(0), hands.centre)
    scaled = Hands(METHODS[name](**ONCE, pull=0.3))
    scaled.put(X[world.rank])
    scaled.step(tuple(1e-6 * g for g in map(float, G[world.rank])))
    close(scaled.x, hands.x)
    with hands.opt.averaged_model():
        close(hands.x, moved.mean(0))


def test_one_tensor_makes_them_equal(world):
    problem = Problem(world.size, seed=10, shapes=((3, 4),))
    ours, _ = BASES["momentum"]
    seen = [drive(world, problem, method(**SETTINGS), 9, ours, consensus=False) for method in METHODS.values()]
    assert np.array_equal(seen[0].held[-1], seen[1].held[-1])


@both
def test_full_pull_with_equal_norms_is_local_sgd(world, name):
    hands, local = (Hands(METHODS[name](period=2, pull=1.0, prox=0.0), lr=0.1), Hands(hpctk.LocalSGD(2), lr=0.1))
    for t in range(4):
        angle = 1.0 + t + world.rank
        for one in (hands, local):
            one.step((np.cos(angle), np.sin(angle), (-1.0) ** world.rank))
        close(hands.x, local.x)
    close(hands.run.weights, np.full_like(hands.run.weights, 1 / world.size))


@both
def test_alone_the_pull_does_nothing_and_the_prox_does(name):
    problem = Problem(1, seed=10)
    ours, simulated = BASES["momentum"]
    one = type("World", (), {"rank": 0, "size": 1})
    alone = {"comm": MPI.COMM_SELF, "consensus": False}
    pulled = drive(one, problem, METHODS[name](period=3, pull=0.7, prox=0.0), 8, ours, **alone)
    plain = drive(one, problem, hpctk.LocalSGD(100), 8, ours, **alone)
    assert all(np.array_equal(a, b) for a, b in zip(pulled.held[-1], plain.held[-1], strict=True))
    with_prox = drive(one, problem, METHODS[name](**SETTINGS), 8, ours, comm=MPI.COMM_SELF)
    assert_follows(one, with_prox, SIMULATIONS[name](problem, 8, simulated, **SETTINGS))
    assert not np.allclose(with_prox.held[-1][1], plain.held[-1][1])


@both
def test_zero_norms(world, name):
    """A worker without any slope is floored; where nobody has one, weights are uniform."""
    hands = Hands(METHODS[name](**ONCE))
    hands.put(X[world.rank])
    hands.step((0.0, 0.0, 0.0) if world.rank == 0 else (3.0, 4.0, 0.0))
    n = world.size
    raw = np.array([1 / (5e-3 * (n - 1) / n) if n > 1 else 1.0, *[1 / 5] * (n - 1)])
    close(hands.run.weights[:, 0], raw / raw.sum())
    if name == "LGRAWA":
        close(hands.run.weights[:, 1], 1 / n)
    assert np.isfinite(hands.x).all()


@both
def test_parameters_without_a_gradient_have_norm_zero(world, name):
    hands = Hands(METHODS[name](**ONCE))
    hands.put(X[world.rank])
    hands.step((3.0, 4.0, None))
    close(hands.run.weights, np.full_like(hands.run.weights, 1 / world.size))
    close(hands.centre, np.mean(X[: world.size], 0))


class Failing(Problem):
    """The last worker's gradient is NaN in steps 1 and 5."""

    def shift(self, k, t):
        usual = super().shift(k, t)
        return [np.full_like(x, np.nan) for x in usual] if k == self.workers - 1 and t in (1, 5) else usual


@both
def test_bad_gradients_have_no_weight(world, name):
    if world.size == 1:
        pytest.skip("the only worker must not be bad")
    problem = Failing(world.size, seed=4)
    ours, simulated = BASES["adam"]
    settings = {"period": 2, "prox": 0.1}
    seen = drive(world, problem, METHODS[name](**settings), 8, ours, on_bad_gradient="skip")
    wanted = SIMULATIONS[name](problem, 8, simulated, **settings)
    assert [bool(wanted.log["betas"][t][-1].any()) for t in (1, 3, 5, 7)] == [False, True, False, True]
    assert_follows(world, seen, wanted)
    counts = seen.optimizer.stats.counts
    assert counts["skipped_steps"] == 2
    assert counts.get("rounds_without_weight", 0) == (2 if world.rank == world.size - 1 else 0)


@both
def test_only_the_closing_step_decides(world, name):
    problem = Failing(world.size, seed=4)
    ours, simulated = BASES["momentum"]
    settings = {"period": 3, "prox": 0.1}
    seen = drive(world, problem, METHODS[name](**settings), 3, ours, on_bad_gradient="skip")
    wanted = SIMULATIONS[name](problem, 3, simulated, **settings)
    assert wanted.log["betas"][2].all()
    assert_follows(world, seen, wanted)


@both
def test_a_worker_without_weight_contributes_nothing_of_its_nans(world, name):
    if world.size == 1:
        pytest.skip("the only worker must not be bad")
    hands = Hands(METHODS[name](**ONCE), on_bad_gradient="skip")
    hands.put((np.nan,) * 3 if world.rank == 0 else X[world.rank])
    hands.step((np.inf, 0.0, 0.0) if world.rank == 0 else (3.0, 4.0, 1.0))
    close(hands.centre, np.mean(X[1 : world.size], 0))


@both
def test_raise_is_the_same_on_all_ranks_at_the_next_round(world, name):
    hands = Hands(METHODS[name](period=3))
    bad = (1.0, np.nan, 1.0) if world.rank == world.size - 1 else (1.0, 1.0, 1.0)
    hands.step(bad)
    hands.step((1.0, 1.0, 1.0))
    with pytest.raises(HpctkError, match=f"rank {world.size - 1}: the gradient of 'A'") as caught:
        hands.step((1.0, 1.0, 1.0))
    world.agree("the error", [("text", str(caught.value))])


@both
def test_all_bad_raises_on_all_ranks_even_with_skip(world, name):
    hands = Hands(METHODS[name](**ONCE), on_bad_gradient="skip")
    hands.put(X[world.rank])
    with pytest.raises(HpctkError, match="no rank has a gradient that is finite"):
        hands.step((np.nan, 0.0, 0.0))
    close(hands.x, X[world.rank])
    hands.step(G[world.rank])
    assert hands.run.weights.all()


def simulated_probe(problem):
    """Gradients at steps that training never sees."""
    return lambda k, x, number: problem.gradient(k, x, 1000 + number)


@both
def test_probe_follows_the_simulation(world, name):
    problem = Problem(world.size, seed=6)
    ours, simulated = BASES["momentum"]
    number, held = [], []

    def probe():
        number.append(1)
        held[0](1000 + len(number)).backward()

    class Seen(Quadratic):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            held[:] = [self]

    import methods_driver

    kept, methods_driver.Quadratic = methods_driver.Quadratic, Seen
    try:
        seen = drive(world, problem, METHODS[name](**SETTINGS, norms="probe", probe=probe), 10, ours)
    finally:
        methods_driver.Quadratic = kept
    wanted = SIMULATIONS[name](problem, 10, simulated, **SETTINGS, norms="probe", probe=simulated_probe(problem))
    assert_follows(world, seen, wanted)
    assert len(number) == 3


class Noisy(torch.nn.Module):
    """Batch norm and dropout: forward changes buffers and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 1)
        )

    def forward(self, x):
        return self.layers(x).square().mean()


def randomness():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    )


@both
def test_probe_leaves_no_trace(world, name):
    torch.manual_seed(7)
    model = Noisy()
    batches, inside = [], []

    def probe():
        inside.append([parameter.grad is None for parameter in model.parameters()])
        batch = torch.randn(8, 4) + random.random() + float(np.random.rand())
        batches.append(batch.sum().item())
        model(batch).backward()

    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), METHODS[name](period=2, norms="probe", probe=probe), model=model
    )
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(world.rank))
    for _ in range(6):
        opt.zero_grad()
        model(data).backward()
        before = randomness()
        gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
        buffers = [buffer.clone() for buffer in model.buffers()]
        opt.step()
        assert randomness() == before
        for parameter, (gradient, value) in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, value)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert len(set(batches)) == 3
    assert all(all(empty) for empty in inside)
    every = world.gather_texts(repr(batches), "comparing batches")
    assert len(set(every)) == world.size


@pytest.mark.parametrize("broken", ["raises", "no backward", "nan"])
def test_broken_probes(world, broken):
    bad = world.rank == world.size - 1

    def probe():
        if bad and broken == "raises":
            raise RuntimeError("no more data")
        if bad and broken == "no backward":
            return
        for tensor in hands.tensors:
            tensor.grad = torch.full_like(tensor, np.nan if bad else 1.0)

    hands = Hands(MGRAWA(period=1, norms="probe", probe=probe), on_bad_gradient="skip")
    hands.put(X[world.rank])
    if broken == "nan" and world.size > 1:
        hands.step(G[world.rank])
        assert hands.run.weights[-1] == 0
        assert float(hands.tensors[1].grad) == G[world.rank][2]
        return
    message = {"raises": "no more data", "no backward": "left no gradients", "nan": "that is finite"}
    kind = {"raises": PeerError, "no backward": SettingError, "nan": HpctkError}
    with pytest.raises(kind[broken], match=message[broken]):
        hands.step(G[world.rank])
    assert float(hands.tensors[1].grad) == G[world.rank][2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 0}, "period=0: need a whole number"),
        ({"period": 2.0}, "period=2.0"),
        ({"pull": 1.5}, "pull=1.5: need a number from 0 to 1"),
        ({"prox": -0.1}, "prox=-0.1: need a number from 0 to 1"),
        ({"ema": 1.0}, "ema=1.0: need a number from 0 to below 1"),
        ({"ema": float("nan")}, "ema=nan"),
        ({"norms": "all"}, "norms='all': allowed are step, probe"),
        ({"norms": "probe"}, "probe=None: norms='probe' needs a function"),
        ({"probe": print}, "only called with norms='probe'"),
        ({"asynchronous": 1}, "asynchronous=1: need true or false"),
        ({"time_budget_s": 0}, "time_budget_s=0: need a finite number above 0, or none"),
        ({"time_budget_s": float("inf")}, "time_budget_s=inf"),
    ],
)
@both
def test_settings_are_checked(name, settings, message):
    with pytest.raises(SettingError, match=message):
        METHODS[name](**settings)


def test_settings_are_comparable_between_ranks():
    class Probe:
        def __call__(self):
            pass

    ours = [MGRAWA(norms="probe", probe=Probe()).settings() for _ in range(2)]
    assert ours[0] == ours[1]
    assert ours[0]["method"] == "MGRAWA"
    assert MGRAWA() != LGRAWA()


@both
def test_uneven_data(world, name):
    """Rank r has 3 + 2r batches, period 2: whoever is through brings its last norms and is pulled on."""
    hands = Hands(METHODS[name](period=2, pull=0.5, prox=0.1), lr=0.1)
    start, rng = np.array(X[3]), np.random.default_rng(3)
    hands.put(tuple(start))
    gradients = rng.normal(size=(world.size, 20, 3))
    steps = [3 + 2 * rank for rank in range(world.size)]
    with hands.opt.join():
        for t in range(steps[world.rank]):
            hands.step(tuple(gradients[world.rank, t]))
    x, centre = np.tile(start, (world.size, 1)), np.zeros(3)
    width = 1 if name == "MGRAWA" else 2
    v, norms, ema = np.zeros((world.size, width)), np.zeros((world.size, width)), 0.9**8
    # The last worker's last step stands alone before the final round.
    for t in range(steps[-1]):
        for k in range(world.size):
            if t < steps[k]:
                g = gradients[k, t]
                x[k] = 0.95 * (x[k] - 0.1 * g) + 0.05 * centre
                by_tensor = np.array([np.linalg.norm(g[:2]), abs(g[2])])
                norms[k] = by_tensor.sum() if width == 1 else by_tensor
        if t % 2 == 1 or t == steps[-1] - 1:
            number = t // 2 + 1
            v = ema * v + (1 - ema) * norms
            betas = np.broadcast_to(weights(v / (1 - ema**number)), (world.size, 2))[:, [0, 0, 1]]
            centre = (betas * x).sum(0)
            x = 0.5 * (x + centre)
    close(hands.centre, centre)
    close(hands.x, x[world.rank])


def test_nobody_has_data(world):
    hands = Hands(MGRAWA())
    hands.put(X[world.rank])
    with hands.opt.join():
        pass
    close(hands.centre, np.mean(X[: world.size], 0))


@both
def test_resumes_bit_for_bit(world, name):
    problem, method = Problem(world.size, seed=8), METHODS[name](**SETTINGS)
    ours, _ = BASES["momentum"]
    whole = drive(world, problem, method, 11, ours, consensus=False)
    half = drive(world, problem, method, 5, ours, consensus=False)
    model = Quadratic(problem, world.rank)
    opt = hpctk.DistributedOptimizer(ours(model.parameters()), method, model=model)
    with torch.no_grad():
        for x, value in zip(model.tensors, half.held[-1], strict=True):
            x.copy_(torch.from_numpy(value))
    opt.load_state_dict(half.optimizer.state_dict())
    opt.load_local_state_dict(half.optimizer.local_state_dict())
    for t in range(5, 11):
        opt.zero_grad()
        model(t).backward()
        opt.step()
    assert all(np.array_equal(a, b) for a, b in zip(model.arrays(), whole.held[-1], strict=True))


@both
def test_what_travels(world, name):
    """Nothing between rounds; in a round the norms and one all-reduce of the model."""
    n = 30_000
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for _ in range(2)]
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        METHODS[name](period=4),
        named_parameters=list(zip("AB", parameters, strict=True)),
        schedule="ring",
    )
    begun = opt.stats.sent_bytes
    for step in range(4):
        assert opt.stats.sent_bytes == begun
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * (1 + step)
        opt.step()
    p = world.size
    numbers = (2 if name == "LGRAWA" else 1) + 1  # and rank 0's word on the time budget
    wanted = 2 * (p - 1) * (2 * n * 8) / p + (p - 1) * numbers * 8
    assert opt.stats.sent_bytes - begun == pytest.approx(wanted, rel=1e-3)


@both
def test_time_budget(world, name):
    hands = Hands(METHODS[name](period=2, time_budget_s=0.2))
    if world.rank > 0:
        # The others' clocks do not count.
        hands.run._began -= 1000
    steps, began = 0, time.monotonic()
    while not hands.opt.finished:
        hands.step((1.0, 1.0, 1.0))
        time.sleep(0.01)
        steps += 1
    lasted = time.monotonic() - began
    world.agree("the end", [("steps", steps), ("rounds", hands.opt.stats.counts["rounds"])])
    assert steps == 2 * hands.opt.stats.counts["rounds"]
    assert world.rank or lasted > 0.1
