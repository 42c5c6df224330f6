"""The oracle itself: the specs' worked examples to the printed digits, and every invariant they list."""

from functools import partial

import numpy as np
import pytest
import torch
from simulation import SIMULATIONS, adacons, baselines, celgc, grawa, saef, sasg, tensors
from simulation.compress import Identity, Sign, TopK, as_saef, kept, per_tensor
from simulation.optimizers import SGD, Adam, AdamW, Groups, LearningRate, set_rates
from simulation.problem import FixedProblem, Problem

SIZES = [1, 2, 3, 4]
STEPS = 16
sgd = partial(SGD, 0.1)
heavy = partial(SGD, 0.05, momentum=0.9, weight_decay=1e-2)
BASES = {
    "sgd": sgd,
    "momentum": heavy,
    "nesterov": partial(SGD, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": partial(Adam, 0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=1e-2),
    "adamw": partial(AdamW, 0.02, weight_decay=1e-1),
}
NAMES = ["sgd", "nesterov", "adamw"]
any_base = pytest.mark.parametrize("base", [BASES[name] for name in NAMES], ids=NAMES)
any_size = pytest.mark.parametrize("size", SIZES)
DECAY = LearningRate(0.1, milestones=(4, 10), factor=0.5)


def numbers(a):
    """All numbers of nested lists of arrays, in order."""
    return [x for y in a for x in numbers(y)] if isinstance(a, list | tuple) else [np.ravel(a)]


def shapes(a):
    return [shapes(x) for x in a] if isinstance(a, list | tuple) else np.shape(a)


def close(a, b, atol=1e-12):
    """Compare nested lists of arrays, or anything numpy can compare."""
    a, b = (np.concatenate(numbers(x)) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def same_bits(a, b):
    """Compare two lists of arrays, shapes and all."""
    assert shapes(a) == shapes(b)
    assert flat(a).tobytes() == flat(b).tobytes()


def flat(a):
    return tensors.flatten(a)


# The problem and the optimizers


@any_size
def test_gradient_is_the_derivative_of_the_loss(size):
    problem = Problem(size, seed=3)
    for k in range(size):
        x = problem.start()
        direction = Problem(1, seed=9).start()
        ahead, behind = (tensors.add(x, tensors.scale(direction, h)) for h in (1e-4, -1e-4))
        slope = (problem.loss(k, ahead, 7) - problem.loss(k, behind, 7)) / 2e-4
        assert slope == pytest.approx(tensors.dot(problem.gradient(k, x, 7), direction), rel=1e-8)


def test_minibatches_differ_by_worker_and_step_and_repeat():
    problem = Problem(3, seed=1)
    x = problem.start()
    first = problem.gradient(1, x, 4)
    problem.gradient(2, x, 8)
    same_bits(first, Problem(3, seed=1).gradient(1, x, 4))
    shifts = [flat(problem.shift(k, t)) for k in range(3) for t in range(5)]
    assert len({s.tobytes() for s in shifts}) == 15
    assert not np.array_equal(flat(Problem(3, seed=2).start()), flat(x))
    assert [g.shape for g in first] == [(), (5,), (3, 4), (2, 2, 2)]
    assert all(isinstance(g, np.ndarray) for g in first)
    twins = Problem(3, seed=1, same=True)
    same_bits(twins.gradient(0, x, 4), twins.gradient(2, x, 4))


TORCH = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "nesterov": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("schedule", [None, LearningRate(0.03, milestones=(4, 11))])
def test_optimizers_agree_with_torch(name, schedule):
    base = BASES[name]
    ours = base()
    problem = Problem(1, seed=5)
    x = problem.start()
    theirs = [torch.tensor(p, requires_grad=True) for p in x]
    optimizer = TORCH[name](theirs, lr=base.args[0], **base.keywords)
    for t in range(20):
        if schedule is not None:
            set_rates(ours, schedule(t))
            optimizer.param_groups[0]["lr"] = schedule(t)
        gradient = problem.gradient(0, x, t)
        for p, g in zip(theirs, problem.gradient(0, [p.detach().numpy() for p in theirs], t), strict=True):
            p.grad = torch.tensor(g)
        x = ours.step(x, gradient)
        optimizer.step()
        close(x, [p.detach().numpy() for p in theirs], 1e-12)


def test_optimizers_leave_their_input_alone():
    problem = Problem(1)
    x, before = problem.start(), problem.start()
    for base in BASES.values():
        optimizer = base()
        for t in range(3):
            optimizer.step(x, problem.gradient(0, x, t))
        same_bits(x, before)


def test_groups_step_with_their_own_rates():
    problem = Problem(1)
    x = problem.start()
    g = problem.gradient(0, x, 0)
    new = Groups(((0, 3), SGD(0.1)), ((2, 1), SGD(0.01))).step(x, g)
    rates = [0.1, 0.01, 0.01, 0.1]
    same_bits(new, [np.asarray(p - r * d) for p, r, d in zip(x, rates, g, strict=True)])


def test_learning_rate_agrees_with_torch():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], 0.5)
    schedule = LearningRate(0.4, (3, 7), 0.5)
    for t in range(10):
        assert schedule(t) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


# Compressors


def test_top_k():
    np.testing.assert_array_equal(TopK(0.5)(np.array([1.0, -3, 3, 2])), [0, -3, 3, 0])
    np.testing.assert_array_equal(TopK(0.25)(np.array([2.0, -3, 3, 3])), [0, -3, 0, 0])
    np.testing.assert_array_equal(TopK(0.01)(np.array(7.0)), 7.0)
    assert (kept(0.01, 10), kept(0.1, 30), kept(0.29, 100), kept(1.0, 5)) == (1, 3, 29, 5)


def test_sign():
    np.testing.assert_array_equal(Sign()(np.array([1.0, -2, 0, -0.0])), [0.75, -0.75, 0.75, 0.75])
    halves = as_saef(Sign(), [np.array(3.0), np.array([-1.0, 2])])
    close(halves, [np.array(2.0), np.array([-2.0, 2])])
    close(per_tensor(Sign(), [np.array(3.0), np.array([-1.0, 2])]), [np.array(3.0), np.array([-1.5, 1.5])])


# Worked examples


ADACONS = {
    "unit": [0.48372093, 0.68372093],
    "mean_norm": [1.28992248, 1.82325581],
    "coefficients": [0.98578199, 1.39336493],
}


@pytest.mark.parametrize("scale", ADACONS)
@pytest.mark.parametrize(("momentum", "layerwise"), [(0.99, False), (0.0, True)])
@pytest.mark.parametrize(
    # The spec printed its digits without the eps = 1e-8 of its formulas, which moves them by up to 2e-8.
    ("eps", "atol"),
    [(0.0, 5e-9), (1e-8, 2e-8)],
)
def test_adacons_example(scale, momentum, layerwise, eps, atol, monkeypatch):
    monkeypatch.setattr(adacons, "EPS", eps)
    g = np.array([[3.0, 4], [1, 0], [0, 2]])
    problem = FixedProblem(np.ones((3, 2)), -g, [0.0, 0.0])
    run = adacons.simulate(problem, 1, partial(SGD, 1.0), momentum=momentum, scale=scale, layerwise=layerwise)
    close(run.log["out"][0], [ADACONS[scale]], atol)
    close(run.held[0][2][0], np.negative(ADACONS[scale]), atol)
    close(run.log["alpha"][0], [[2.4, 4 / 3, 2]], atol)
    close(run.log["weights"][0], [np.array([18, 10, 15]) / 43], atol)
    assert run.log["fallback"] == [[False]]
    if scale == "coefficients":
        close(run.log["coefficients"][0], [[0.17061611, 0.47393365, 0.35545024]], atol)


def test_sasg_example():
    problem = FixedProblem([[1, 2, 1, 0.5], [1, 0.5, 2, 1]], [[1, 0, -1, 1.6], [0, 1, 0.9, -1]], [2.0, 2, 0, 0])
    run = sasg.simulate(problem, 4, sgd, density=0.25, max_delay=2, terms=2, alpha=4, warmup=1)
    log = run.log
    close(log["theta"][1:], [0.2, 0.3424, 0.2724])
    assert log["left"][0] == [None, None]
    close(log["left"][1:], [[0.68, 0.08], [0.4496, 0.2896], [0.13, 0.8496]])
    assert log["uploads"] == [[True, True], [True, False], [True, False], [False, True]]
    after = [run.consensus[t][0] for t in range(4)]
    close(after, [[1.8, 1.6, 0, 0], [1.6, 1.28, 0, 0], [1.4, 1.28, -0.3, 0], [1.4, 1.28, -0.18, 0]])
    first = [[0, 0.4, 0, 0], [0, 0.32, 0, 0], [0, 0, 0.3, 0], [0, 0, 0.3, 0]]
    second = [[0.2, 0, 0, 0]] * 3 + [[0, 0, -0.42, 0]]
    close([log["q"][t][0][0] for t in range(4)], first)
    close([log["q"][t][1][0] for t in range(4)], second)
    close([log["residuals"][2][k][0] for k in (0, 1)], [[0.24, 0.256, 0, -0.24], [0, 0.05, -0.18, 0.1]])
    close(log["residuals"][3][1][0], [0.14, 0.064, 0, 0.2])
    assert sum(map(sum, log["uploads"])) == 5


def saef_example(**settings):
    problem = FixedProblem([[1, 2, 1], [2, 1, 0.5]], [[1, 0, -1], [-1, 1, 2]], [2.0, 1, 0])
    return saef.simulate(problem, 3, sgd, compressor=TopK(1 / 3), **settings)


def test_saef_example():
    run = saef_example()
    rows = [[[d[0] for d in run.log[name][t]] for t in range(3)] for name in ("deltas", "residuals")]
    close(
        rows[0],
        [
            [[0.1, 0.2, 0.1], [0.6, 0, -0.1]],
            [[0.16, 0.18, 0.19], [0.54, -0.01, -0.195]],
            [[0.187, 0.324, 0.0905], [0.486, -0.019, -0.29]],
        ],
    )
    close(
        rows[1],
        [
            [[0.1, 0, 0.1], [0, 0, -0.1]],
            [[0.16, 0.18, 0], [0, -0.01, -0.195]],
            [[0.187, 0, 0.0905], [0, -0.019, -0.29]],
        ],
    )
    close([x[0] for x in run.consensus], [[1.7, 0.9, 0], [1.43, 0.9, -0.095], [1.187, 0.738, -0.095]])


def test_classic_error_feedback_example():
    run = saef_example(step_ahead=False)
    close([x[0] for x in run.consensus], [[1.7, 0.9, 0], [1.43, 0.9, -0.1], [1.187, 0.72, -0.1]])


def grawa_example(simulate):
    x = [[[1, 2], [3]], [[0, 1], [-1]], [[2, -1], [1]]]
    g = [[[3, 4], [1]], [[0, 1], [4]], [[2, 0], [5]]]
    starts = [[np.array(a, float) for a in worker] for worker in x]
    gradients = [[np.array(a, float) for a in worker] for worker in g]
    problem = FixedProblem(
        [[np.ones(2), np.ones(1)]] * 3,
        [tensors.subtract(a, b) for a, b in zip(starts, gradients, strict=True)],
        [np.zeros(2), np.zeros(1)],
    )
    return simulate(problem, 1, partial(SGD, 0.0), period=1, pull=0.5, prox=0, starts=starts)


def test_mgrawa_example():
    run = grawa_example(grawa.mgrawa)
    close(run.log["norms"][0][:, 0], [6, 5, 7])
    close(run.log["betas"][0][:, 0], np.array([35, 42, 30]) / 107)
    close(flat(run.log["centre"][0]), [0.88785047, 0.76635514, 0.86915888], 5e-9)
    expected = [
        [0.94392523, 1.38317757, 1.93457944],
        [0.44392523, 0.88317757, -0.06542056],
        [1.44392523, -0.11682243, 0.93457944],
    ]
    close([flat(x) for x in run.held[0]], expected, 5e-9)
    close(flat(run.consensus[0]), np.mean(expected, axis=0), 5e-9)


def test_lgrawa_example():
    run = grawa_example(grawa.lgrawa)
    close(run.log["norms"][0], [[5, 1], [1, 4], [2, 5]])
    close(run.log["betas"][0][:, 0], np.array([2, 10, 5]) / 17)
    close(run.log["betas"][0][:, 1], np.array([20, 5, 4]) / 29)
    close(flat(run.log["centre"][0]), [0.70588235, 0.52941176, 2.03448276], 5e-9)
    expected = [
        [0.85294118, 1.26470588, 2.51724138],
        [0.35294118, 0.76470588, 0.51724138],
        [1.35294118, -0.23529412, 1.51724138],
    ]
    close([flat(x) for x in run.held[0]], expected, 5e-9)


def test_celgc_example():
    problem = FixedProblem(np.ones((2, 2)), [[0, 0], [2.7, 3.6]], [3.0, 4.0])
    run = celgc.simulate(problem, 4, sgd, clip=0.2, period=2)
    close(run.log["norms"], [[5, 0.5], [4.8, 0.45], [4.7525, 0.2525], [4.5525, 0.22725]], 1e-9)
    close(run.log["rates"], [[0.04, 0.1], [0.0416667, 0.1], [0.0420831, 0.1], [0.0439319, 0.1]], 5e-8)
    expected = [
        [[2.88, 3.84], [2.97, 3.96]],
        [[2.76, 3.68], [2.943, 3.924]],
        [[2.7315, 3.642], [2.83635, 3.7818]],
        [[2.6115, 3.482], [2.822715, 3.76362]],
    ]
    close([[x[0] for x in row] for row in run.log["local"]], expected, 1e-9)
    close([x[0] for x in run.held[1]], [[2.8515, 3.802]] * 2, 1e-9)
    close(run.consensus[3][0], [2.7171075, 3.62281], 1e-9)


# What holds for all


SETTINGS = {
    "AdaCons": {},
    "SASG": {"density": 0.3, "warmup": 2, "reduce": "mean"},
    "SAEF": {"compressor": Sign(), "server": Sign(), "average_every": 5},
    "MGRAWA": {"period": 4},
    "LGRAWA": {"period": 4},
    "CELGC": {"clip": 0.1, "period": 4},
    "Mean": {"compressor": TopK(0.3)},
    "LocalSGD": {"period": 4},
    "EASGD": {},
    "LSGD": {},
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_method_trains_and_repeats(name, size):
    problem = Problem(size, seed=11)
    first, second = (SIMULATIONS[name](problem, 24, sgd, lr=DECAY, **SETTINGS[name]) for _ in range(2))
    same_bits(first.consensus[-1], second.consensus[-1])
    assert (len(first.held), len(first.held[0]), len(first.consensus)) == (24, size, 24)
    assert all(len(entries) == 24 for entries in first.log.values())

    def loss(x):
        return sum(problem.loss(k, x, 99) for k in range(size))

    assert loss(first.consensus[-1]) < loss(problem.start())


@any_size
@pytest.mark.parametrize("name", [*(n for n in SETTINGS if n in ("AdaCons", "SASG", "Mean")), "CELGC", "LocalSGD"])
def test_shared_parameters_are_identical(name, size):
    run = SIMULATIONS[name](Problem(size, seed=2), 12, heavy, **SETTINGS[name])
    period = SETTINGS[name].get("period", 1)
    for t in range(period - 1, 12, period):
        for x in run.held[t]:
            same_bits(x, run.held[t][0])
            close(x, run.consensus[t], 1e-15)


def local_average(problem, steps, base, lr=None):
    """Average the updates of local optimizers: uncompressed training with local state."""
    optimizers, x, path = [base() for _ in range(problem.workers)], problem.start(), []
    for t in range(steps):
        news = []
        for k, optimizer in enumerate(optimizers):
            if lr is not None:
                set_rates(optimizer, lr(t))
            news.append(optimizer.step(x, problem.gradient(k, x, t)))
        x = tensors.mean(news)
        path.append(x)
    return path


# AdaCons


def gradients(size, seed, common=0.7):
    """Random gradients that mostly agree."""
    generator = np.random.default_rng([seed, size])
    shapes = [(), (5,), (3, 4)]
    shared = [generator.normal(size=s) for s in shapes]
    return [
        [np.asarray(common * c + 0.5 * generator.normal(size=s)) for c, s in zip(shared, shapes, strict=True)]
        for _ in range(size)
    ]


@any_size
def test_adacons_weights_sum_to_one(size):
    for layerwise in (False, True):
        run = adacons.simulate(Problem(size, seed=4), STEPS, heavy, momentum=0.9, layerwise=layerwise)
        for weights, fallback in zip(run.log["weights"], run.log["fallback"], strict=True):
            assert len(weights) == len(fallback) == (4 if layerwise else 1)
            close([w.sum() for w in weights], [1.0] * len(weights))


@any_size
@pytest.mark.parametrize("scale", adacons.SCALES)
def test_adacons_ignores_the_order_of_workers(size, scale):
    plain, permuted = adacons.Aggregator(0.9, scale), adacons.Aggregator(0.9, scale)
    for seed in range(6):
        g = gradients(size, seed)
        order = np.random.default_rng(seed).permutation(size)
        a, b = plain(g), permuted([g[i] for i in order])
        close(a.out, b.out)
        close(a.coefficients[order], b.coefficients)


@any_size
def test_adacons_scale_of_gradients_and_consensus_identity(size):
    g = gradients(size, 1)
    a = adacons.Aggregator(0.0, "unit")
    first = a(g)
    scaled = a([tensors.scale(x, 37.0) for x in g])
    close(first.out, scaled.out, 1e-7)
    alpha = first.alpha
    agreement = tensors.dot(first.out, tensors.mean(g))
    assert agreement == pytest.approx(np.sum(alpha**2) / np.sum(alpha), rel=1e-12)


@any_size
def test_adacons_identical_workers(size):
    g = [gradients(1, 2)[0]] * size
    size_of = tensors.norm(g[0])
    for scale, expected in (("unit", tensors.scale(g[0], 1 / size_of)), ("mean_norm", g[0]), ("coefficients", g[0])):
        a = adacons.Aggregator(0.99, scale)
        for _ in range(3):
            outcome = a(g)
            close(outcome.weights, np.full(size, 1 / size), 1e-12)
            close(outcome.out, expected, 1e-7 if scale != "coefficients" else 1e-14)


def one_pass(g, scale, shards):
    """The spec's one-pass way: partial scalars by shard, weights, then each shard's sum."""
    vectors = np.array([flat(x) for x in g])
    parts = np.array_split(np.arange(vectors.shape[1]), shards)
    inner = sum(vectors[:, s] @ vectors[:, s].sum(axis=0) for s in parts) / len(g)
    norms = np.sqrt(sum((vectors[:, s] ** 2).sum(axis=1) for s in parts))
    alpha = inner / (norms + adacons.EPS)
    w = alpha / alpha.sum() / (norms + adacons.EPS)
    w = {"unit": w, "mean_norm": w * norms.mean(), "coefficients": w / w.sum()}[scale]
    return np.concatenate([w @ vectors[:, s] for s in parts])


@any_size
@pytest.mark.parametrize("scale", adacons.SCALES)
def test_adacons_one_pass_is_two_pass(size, scale):
    g = gradients(size, 5)
    # One worker's aggregate is its gradient itself, without eps.
    atol = 1e-7 if size == 1 else 1e-12
    out = flat(adacons.Aggregator(0.99, scale)(g).out)
    np.testing.assert_allclose(one_pass(g, scale, size), out, rtol=0, atol=atol)


@any_size
@pytest.mark.parametrize("scale", adacons.SCALES)
def test_adacons_layerwise_with_one_tensor_is_model_wise(size, scale):
    problem = Problem(size, seed=8, shapes=((3, 4),))
    runs = [
        adacons.simulate(problem, STEPS, heavy, momentum=0.9, scale=scale, layerwise=flag) for flag in (False, True)
    ]
    same_bits(runs[0].consensus[-1], runs[1].consensus[-1])


def test_adacons_layerwise_is_each_tensor_by_itself():
    g = gradients(3, 1)
    separate = [adacons.Aggregator()([[x[i]] for x in g]).out[0] for i in range(3)]
    out, _ = adacons.aggregate([adacons.Aggregator() for _ in range(3)], g)
    close(out, separate)


def test_adacons_momentum_follows_the_sorted_places():
    a = adacons.Aggregator(0.5, "unit")
    units = [np.array([1.0, 0.2]), np.array([0.5, 1.0]), np.array([2.0, 0.1])]
    first = a([[u] for u in units])
    m = np.sort(first.alpha)
    again = a([[u] for u in (units[1], units[2], units[0])])
    order = np.argsort(again.alpha)
    expected = np.empty(3)
    expected[order] = 0.5 * m + 0.5 * np.sort(again.alpha)
    close(again.weights, expected / expected.sum())


@pytest.mark.parametrize("scale", adacons.SCALES)
def test_adacons_opposed_gradients_fall_back(scale):
    a = adacons.Aggregator(0.9, scale)
    good = [[np.array([1.0, 2.0])], [np.array([2.0, 1.0])]]
    a(good)
    m = a.m
    opposed = [[np.array([9.0, 0.0])], [np.array([-8.9, 0.0])]]
    b = adacons.Aggregator(0.9, scale)
    outcome = b(opposed)
    assert outcome.fallback
    close(outcome.out, [np.array([0.05, 0.0])], 1e-12)
    assert b.m is None
    b(good)
    close(b.m, m)


@pytest.mark.parametrize("scale", adacons.SCALES)
def test_adacons_zero_gradients(scale):
    zero, g = np.zeros(2), np.array([3.0, 4.0])
    a = adacons.Aggregator(0.9, scale)
    close(a([[zero], [zero]]).out, [zero])
    outcome = a([[g], [zero]])
    close(outcome.alpha, [2.5, 0.0], 1e-7)
    close(outcome.weights, [1.0, 0.0])
    factor = {"unit": 0.2, "mean_norm": 0.5, "coefficients": 1.0}[scale]
    close(outcome.out, [factor * g], 1e-7)
    a([[g], [g]])
    later = a([[g], [zero]])
    if scale == "coefficients":
        close(later.coefficients, [1.0, 0.0])
    assert np.isfinite(later.out[0]).all()


def test_adacons_coefficients_has_its_own_guard():
    a = adacons.Aggregator(0.0, "coefficients")
    g = [[np.array([-1.0])], [np.array([9.0])], [np.array([9.0])]]
    outcome = a(g)
    # alpha is in proportion -1, 1, 1: their sum is fine, but -1/1 + 1/9 + 1/9 is not.
    assert outcome.fallback
    close(outcome.out[0], [17 / 3])
    assert not adacons.Aggregator(0.0, "unit")(g).fallback


# SASG


def top_k_with_memory(problem, steps, base, density, lr=None):
    optimizers, w = [base() for _ in range(problem.workers)], problem.start()
    residuals = [tensors.zeros(w) for _ in optimizers]
    path = []
    for t in range(steps):
        sent = []
        for k, optimizer in enumerate(optimizers):
            if lr is not None:
                set_rates(optimizer, lr(t))
            p = tensors.add(tensors.subtract(w, optimizer.step(w, problem.gradient(k, w, t))), residuals[k])
            q = [TopK(density)(x) for x in p]
            residuals[k] = [np.where(s != 0, 0.0, x) for x, s in zip(p, q, strict=True)]
            sent.append(q)
        w = tensors.subtract(w, tensors.total(sent))
        path.append(w)
    return path


@any_size
@any_base
def test_sasg_with_negative_alpha_is_top_k_with_memory(size, base):
    problem = Problem(size, seed=6)
    run = sasg.simulate(problem, STEPS, base, lr=DECAY, density=0.3, alpha=-1, warmup=0)
    assert all(map(all, run.log["uploads"]))
    moved = top_k_with_memory(problem, STEPS, base, 0.3, DECAY)
    # The first step's h is empty, so that theta is -0 there and later negative: never a skip.
    for a, b in zip(run.consensus, moved, strict=True):
        same_bits(a, b)


SASG = {"density": 0.3, "max_delay": 3, "warmup": 2, "alpha": 20.0}


@any_size
@any_base
def test_sasg_bookkeeping(size, base):
    problem = Problem(size, seed=7)
    run = sasg.simulate(problem, STEPS, base, lr=DECAY, **SASG)
    log = run.log
    assert sum(map(sum, log["uploads"])) + sum(len(u) - sum(u) for u in log["uploads"]) == size * STEPS
    for t in range(1, STEPS):
        assert (t >= 2) == (log["left"][t][0] is not None)
        for k in range(size):
            q, e = log["q"][t][k], log["residuals"][t][k]
            before = log["residuals"][t - 1][k]
            if log["uploads"][t][k]:
                same_bits(tensors.add(q, e), tensors.add(log["updates"][t][k], before))
                assert all(not np.any((x != 0) & (y != 0)) for x, y in zip(q, e, strict=True))
                assert log["delays"][t][k] == 1
            else:
                same_bits(q, log["q"][t - 1][k])
                same_bits(e, before)
                assert log["delays"][t][k] == log["delays"][t - 1][k] + 1 <= 4
                assert log["left"][t][k] <= log["theta"][t]


@any_size
def test_sasg_conserves_what_it_applies(size):
    run = sasg.simulate(Problem(size, seed=7), STEPS, sgd, **SASG)
    log = run.log
    skips = STEPS * size - sum(map(sum, log["uploads"]))
    assert skips > 0
    for t in range(1, STEPS):
        moves = [
            update if upload else q
            for update, upload, q in zip(log["updates"][t], log["uploads"][t], log["q"][t], strict=True)
        ]
        virtual = [tensors.subtract(run.consensus[s], tensors.total(log["residuals"][s])) for s in (t - 1, t)]
        close(virtual[1], tensors.subtract(virtual[0], tensors.total(moves)))


@any_size
def test_sasg_with_full_density_is_lasg(size):
    problem = Problem(size, seed=12)
    run = sasg.simulate(problem, STEPS, sgd, density=1.0, alpha=10.0, max_delay=4, warmup=1)
    w, lengths = problem.start(), []
    memory = [None] * size  # update, snapshot, delay
    skips = 0
    for t in range(STEPS):
        theta = 10.0 / size**2 * sum(lengths[-3:])
        for k in range(size):
            g = problem.gradient(k, w, t)
            if t >= 1:
                change = tensors.norm(tensors.subtract(g, problem.gradient(k, memory[k][1], t))) ** 2
                if change <= theta and memory[k][2] <= 4:
                    memory[k] = (*memory[k][:2], memory[k][2] + 1)
                    skips += 1
                    continue
            memory[k] = (tensors.scale(g, 0.1), w, 1)
        new = tensors.subtract(w, tensors.total([m[0] for m in memory]))
        lengths.append(tensors.norm(tensors.subtract(new, w)) ** 2)
        w = new
        close(run.consensus[t], w)
        close(run.log["residuals"][t], [tensors.zeros(w)] * size, 0)
    assert skips == size * STEPS - sum(map(sum, run.log["uploads"])) > 0


def test_sasg_defaults_of_alpha_and_terms():
    problem = Problem(3, seed=2)
    for reduce, numerator in (("sum", 1), ("mean", 3)):
        implied = sasg.simulate(problem, STEPS, sgd, lr=DECAY, density=0.3, warmup=2, max_delay=4, reduce=reduce)
        for t in range(STEPS):
            steps = [problem.start(), *implied.consensus]
            lengths = [tensors.norm(tensors.subtract(steps[s + 1], steps[s])) ** 2 for s in range(t)]
            expected = numerator / DECAY(t) / 9 * sum(lengths[-3:])
            assert implied.log["theta"][t] == pytest.approx(expected, rel=1e-12, abs=0)


def test_sasg_zero_alpha_skips_equal_gradients():
    problem = FixedProblem([[0.0, 0.0]], [[0.0, 0.0]], [1.0, 1.0])
    run = sasg.simulate(problem, 6, sgd, alpha=0.0, warmup=1, max_delay=2)
    assert [u[0] for u in run.log["uploads"]] == [True, False, False, True, False, False]


def test_sasg_without_warm_up_uploads_first():
    run = sasg.simulate(Problem(2), 2, sgd, warmup=0, alpha=1e9)
    assert run.log["uploads"] == [[True, True], [False, False]]


# SAEF


SAEF = {
    "topk": {"compressor": TopK(0.2)},
    "sign": {"compressor": Sign()},
    "two-way": {"compressor": Sign(), "server": Sign()},
    "topk-server": {"compressor": TopK(0.3), "server": TopK(0.5), "average_every": 4},
    "averaged": {"compressor": Sign(), "average_every": 3},
    "classic": {"compressor": TopK(0.2), "server": Sign(), "average_every": 2, "step_ahead": False},
}


@any_size
@pytest.mark.parametrize("base", [BASES["nesterov"], BASES["adamw"]], ids=["nesterov", "adamw"])
@pytest.mark.parametrize("settings", SAEF.values(), ids=SAEF)
def test_saef_virtual_sequence(size, base, settings):
    run = saef.simulate(Problem(size, seed=9), 12, base, lr=DECAY, **settings)
    log = run.log
    virtual = Problem(size, seed=9).start()
    for t in range(12):
        virtual = tensors.subtract(virtual, tensors.mean(log["updates"][t]))
        now = tensors.subtract(tensors.subtract(log["x"][t], log["server"][t]), tensors.mean(log["carried"][t]))
        close(now, virtual)
        for delta, c, e in zip(log["deltas"][t], log["sent"][t], log["residuals"][t], strict=True):
            close(tensors.add(c, e), delta, 1e-14)
        for y, e in zip(run.held[t], log["carried"][t], strict=True):
            ahead = settings.get("step_ahead", True)
            same_bits(y, tensors.subtract(log["x"][t], e) if ahead else log["x"][t])


def test_saef_averages_when_it_is_due():
    run = saef.simulate(Problem(3, seed=1), 9, sgd, compressor=TopK(0.2), average_every=4)
    equal = [
        all(np.array_equal(flat(e), flat(row[0])) for e in row) and np.any(flat(row[0])) for row in run.log["carried"]
    ]
    # Iterations 3 and 7 average before stepping ahead, so steps 2 and 6 end with it.
    assert [t for t in range(9) if equal[t]] == [2, 6]


@any_size
@any_base
def test_saef_identity_is_averaged_local_steps(size, base):
    problem = Problem(size, seed=3)
    run = saef.simulate(problem, STEPS, base, lr=DECAY, compressor=Identity())
    close(run.consensus, local_average(problem, STEPS, base, DECAY))


@any_base
@pytest.mark.parametrize("compressor", [TopK(0.1), Sign()])
@pytest.mark.parametrize("average_every", [0, 1])
def test_saef_alone_is_uncompressed_training(base, compressor, average_every):
    problem = Problem(1, seed=3)
    run = saef.simulate(problem, STEPS, base, lr=DECAY, compressor=compressor, average_every=average_every)
    # Adam divides by gradients that may be small, which magnifies rounding.
    close([held[0] for held in run.held], local_average(problem, STEPS, base, DECAY), 1e-10)


@any_size
@any_base
def test_saef_averaging_every_step_is_uncompressed_training(size, base):
    problem = Problem(size, seed=3)
    run = saef.simulate(problem, STEPS, base, lr=DECAY, compressor=TopK(0.1), average_every=1)
    expected = local_average(problem, STEPS, base, DECAY)
    for k in range(size):
        close([held[k] for held in run.held], expected, 1e-10)


@any_size
def test_saef_without_stepping_ahead_is_error_feedback(size):
    problem = Problem(size, seed=3)
    run = saef.simulate(problem, STEPS, sgd, compressor=TopK(0.2), step_ahead=False)
    # With a constant rate the residual in units of gradients is the same, divided by lr.
    other = baselines.mean(problem, STEPS, sgd, compressor=TopK(0.2))
    close(run.consensus, other.consensus)


# GRAWA


GRAWA = {"period": 3, "pull": 0.4, "prox": 0.2}
both = pytest.mark.parametrize("simulate", [grawa.mgrawa, grawa.lgrawa], ids=["MGRAWA", "LGRAWA"])


@any_size
@both
def test_grawa_rounds(size, simulate):
    problem = Problem(size, seed=10)
    pulled = simulate(problem, 3, heavy, **GRAWA)
    loose = simulate(problem, 3, heavy, **{**GRAWA, "pull": 0.0})
    log = pulled.log
    assert [n is None for n in log["norms"]] == [True, True, False]
    betas, norms, centre = log["betas"][2], log["nhat"][2], log["centre"][2]
    close(betas.sum(axis=0), np.ones(betas.shape[1]))
    same_bits([np.argsort(betas, axis=0)], [np.argsort(norms, axis=0)[::-1]])
    wide = np.broadcast_to(betas, (size, 4))
    for i in range(size):
        for j in range(size):
            before = tensors.subtract(loose.held[2][i], loose.held[2][j])
            close(tensors.subtract(pulled.held[2][i], pulled.held[2][j]), tensors.scale(before, 0.6))
        away = tensors.subtract(loose.held[2][i], centre)
        close(tensors.subtract(pulled.held[2][i], centre), tensors.scale(away, 0.6))
    for held in (loose.held[2], pulled.held[2]):
        kept_mean = [np.asarray(sum(wide[m, i] * held[m][i] for m in range(size))) for i in range(4)]
        close(kept_mean, centre)
    close(pulled.consensus[2], tensors.mean(pulled.held[2]))


@both
def test_grawa_by_hand(simulate):
    """One scalar, two workers: the order is local step, prox, round with the step's own gradients."""
    problem = FixedProblem([[1.0], [1.0]], [[0.0], [3.0]], [1.0])
    run = simulate(problem, 4, sgd, period=2, pull=0.5, prox=0.2, ema=0.25)
    x, centre, v = np.array([1.0, 1.0]), 1.0, np.zeros(2)
    for t in range(4):
        g = x - np.array([0.0, 3.0])
        x = x - 0.1 * g
        x = 0.9 * x + 0.1 * centre
        if t % 2 == 1:
            v = 0.25 * v + 0.75 * np.abs(g)
            nhat = v / (1 - 0.25 ** ((t + 1) // 2))
            close(run.log["nhat"][t][:, 0], nhat)
            inverse = 1 / nhat
            centre = (inverse / inverse.sum()) @ x
            x = (x + centre) / 2
        close([h[0] for h in run.held[t]], list(x[:, None]))
        close(run.log["centre"][t][0], [centre])


def test_grawa_weights():
    nhat = np.array([[2.0, 0.0, 1e-9], [4.0, 0.0, 3.0]])
    betas = grawa.betas(nhat)
    close(betas[:, 0], [2 / 3, 1 / 3])
    close(betas[:, 1], [0.5, 0.5])
    floor = 1e-3 * (3.0 + 1e-9) / 2
    close(betas[:, 2], np.array([1 / floor, 1 / 3.0]) / (1 / floor + 1 / 3.0))
    close(grawa.betas(7 * nhat), betas)
    close(grawa.betas(np.full((3, 2), 5.0)), np.full((3, 2), 1 / 3))
    with_bad = np.vstack([nhat, np.full(3, np.nan)])
    close(grawa.betas(with_bad), np.vstack([betas, np.zeros(3)]))
    with pytest.raises(FloatingPointError):
        grawa.betas(np.full((2, 1), np.nan))


@any_size
def test_grawa_with_one_tensor(size):
    problem = Problem(size, seed=10, shapes=((3, 4),))
    runs = [simulate(problem, STEPS, heavy, **GRAWA) for simulate in (grawa.mgrawa, grawa.lgrawa)]
    for a, b in zip(*(run.held for run in runs), strict=True):
        close(a, b)


@any_size
@both
def test_grawa_full_pull_with_equal_norms_is_local_sgd(size, simulate):
    def probe(k, x, number):
        return tensors.each(np.ones_like, x)

    problem = Problem(size, seed=10)
    run = simulate(problem, STEPS, heavy, period=4, pull=1.0, prox=0.0, norms="probe", probe=probe)
    close(run.held, baselines.local_sgd(problem, STEPS, heavy, period=4).held)


@both
def test_grawa_alone(simulate):
    problem = Problem(1, seed=10)
    plain = local_average(problem, STEPS, heavy)
    close(simulate(problem, STEPS, heavy, period=3, pull=0.7, prox=0.0).consensus, plain)
    with_prox = simulate(problem, STEPS, heavy, **GRAWA)
    assert not np.allclose(flat(with_prox.consensus[-1]), flat(plain[-1]))


class Failing(Problem):
    """Worker 1's gradient is NaN in step 3."""

    def gradient(self, k, x, t):
        g = super().gradient(k, x, t)
        return [np.asarray(y * np.nan) for y in g] if (k, t) == (1, 3) else g


@both
def test_grawa_bad_gradient_has_no_weight(simulate):
    run = simulate(Failing(3, seed=4), 8, heavy, period=2, pull=0.5, prox=0.0)
    betas = run.log["betas"]
    assert not betas[3][1].any()
    close(betas[3].sum(axis=0), np.ones(betas[3].shape[1]))
    assert betas[5][1].all()
    # Round 3 is only the second that worker 1's norms took part in, and its bias correction knows.
    ema, norms = 0.9**8, run.log["norms"]
    close(run.log["nhat"][5][1], (ema * norms[1][1] + norms[5][1]) * (1 - ema) / (1 - ema**2))
    expected = tensors.mix(run.held[2][1], run.log["centre"][3], 0.5)
    close(run.held[3][1], expected)
    assert all(tensors.finite(x) for x in run.held[-1])


@pytest.mark.parametrize("name", ["CELGC", "LocalSGD", "EASGD", "LSGD"])
def test_model_methods_do_not_apply_a_bad_gradient(name):
    settings = {**SETTINGS[name], "period": 8, **({"prox": 0.0} if name == "LSGD" else {})}
    run = SIMULATIONS[name](Failing(2, seed=4), 5, heavy, **settings)
    same_bits(run.held[3][1], run.held[2][1])
    assert tensors.finite(run.held[4][1])


@pytest.mark.parametrize("name", ["AdaCons", "SASG", "SAEF", "Mean"])
def test_other_methods_raise_on_a_bad_gradient(name):
    with pytest.raises(FloatingPointError, match="worker 1, step 3"):
        SIMULATIONS[name](Failing(2, seed=4), 5, heavy, **SETTINGS[name])


def random_order(size, period, cycles, seed):
    """Tickets as workers of random speed would take them; who waits in a round takes none."""
    generator, order = np.random.default_rng(seed), []
    for _ in range(cycles):
        order += generator.integers(0, size, size * period).tolist()
        order += generator.permutation(size).tolist()
    return order


@any_size
def test_tickets(size):
    period = 3
    order = random_order(size, period, 5, size)
    meanings = grawa.tickets(order, size, period)
    assert meanings == (["local"] * (size * period) + ["round"] * size) * 5
    rounds = [k for k, kind in zip(order, meanings, strict=True) if kind == "round"]
    assert all(sorted(rounds[i : i + size]) == list(range(size)) for i in range(0, len(rounds), size))
    if size > 1:
        with pytest.raises(ValueError, match="waiting"):
            grawa.tickets([0] * (size * period + 2), size, period)


@any_size
@pytest.mark.parametrize("layerwise", [False, True])
def test_asynchronous_grawa_in_lockstep_is_synchronous(size, layerwise):
    problem = Problem(size, seed=10)
    run = grawa.simulate_asynchronous(problem, list(range(size)) * 12, heavy, layerwise=layerwise, lr=DECAY, **GRAWA)
    together = grawa.simulate(problem, 9, heavy, layerwise=layerwise, lr=DECAY, **GRAWA)
    # Every fourth turn of all workers is a round.
    ends = [size * (t + t // 3 + (2 if t % 3 == 2 else 1)) - 1 for t in range(9)]
    for t, end in enumerate(ends):
        for a, b in zip(run.held[end], together.held[t], strict=True):
            same_bits(a, b)


def test_asynchronous_grawa_counts_own_steps():
    order = [0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0]
    run = grawa.simulate_asynchronous(Problem(2), order, sgd, layerwise=False, period=2)
    assert run.log["kind"] == (["local"] * 4 + ["round"] * 2) * 2
    assert run.log["own_steps"][-1] == (4, 4)
    assert run.log["own_steps"][5] == (3, 1)
    assert [b is not None for b in run.log["betas"]] == ([False] * 5 + [True]) * 2


# CELGC


CELGC = {"clip": 0.05, "period": 4}


@any_size
def test_celgc_displacement_and_deviation(size):
    problem = Problem(size, seed=13)
    run = celgc.simulate(problem, STEPS, sgd, **CELGC)
    log = run.log
    before = [problem.start()] * size
    for t in range(STEPS):
        for k in range(size):
            moved = tensors.norm(tensors.subtract(log["local"][t][k], before[k]))
            assert moved == pytest.approx(min(0.1 * log["norms"][t][k], 0.05), rel=1e-8)
            apart = tensors.norm(tensors.subtract(log["local"][t][k], tensors.mean(log["local"][t])))
            assert apart <= 2 * 0.05 * 4
        close(tensors.mean(run.held[t]), tensors.mean(log["local"][t]))
        before = run.held[t]


@any_size
def test_celgc_without_clipping(size):
    problem = Problem(size, seed=13)
    for base in (sgd, heavy):
        close(
            celgc.simulate(problem, STEPS, base, lr=DECAY, clip=np.inf, period=1).consensus,
            baselines.mean(problem, STEPS, base, lr=DECAY).consensus,
        )
    close(
        celgc.simulate(problem, STEPS, sgd, clip=100.0, period=1).consensus,
        baselines.mean(problem, STEPS, sgd, clip=100.0).consensus,
    )
    close(
        celgc.simulate(problem, STEPS, heavy, clip=np.inf, period=5).held,
        baselines.local_sgd(problem, STEPS, heavy, period=5).held,
    )
    same_bits(celgc.simulate(problem, 5, heavy, clip=0.0).held[-1][0], problem.start())


def clipped(problem, steps, lr, ratio):
    """clip_grad_norm_ followed by SGD, one worker."""
    x, path = problem.start(), []
    for t in range(steps):
        g = problem.gradient(0, x, t)
        factor = min(1.0, ratio / (tensors.norm(g) + 1e-10))
        x = tensors.subtract(x, tensors.scale(g, lr(t) * factor))
        path.append(x)
    return path


@pytest.mark.parametrize("period", [1, 3, 16])
@any_size
def test_celgc_with_the_same_data_is_clipped_sgd(size, period):
    problem = Problem(size, seed=14, same=True)
    run = celgc.simulate(problem, STEPS, sgd, lr=DECAY, clip=0.05, period=period)
    close(run.consensus, clipped(problem, STEPS, DECAY, 0.5))
    naive = baselines.mean(problem, STEPS, sgd, lr=DECAY, clip=0.05)
    close(naive.consensus, clipped(problem, STEPS, DECAY, 0.5))


def test_celgc_is_not_the_naive_baseline():
    problem = Problem(3, seed=14)
    ours = celgc.simulate(problem, STEPS, sgd, clip=0.05, period=1).consensus[-1]
    naive = baselines.mean(problem, STEPS, sgd, clip=0.05).consensus[-1]
    assert np.max(np.abs(flat(ours) - flat(naive))) > 1e-3


def test_celgc_clipped_rate_scales_groups_and_weight_decay():
    problem = Problem(1, seed=14)

    def base():
        first, second = SGD(0.1, weight_decay=0.5), SGD(0.01)
        first.initial_lr = 0.2
        return Groups(((0, 2), first), ((1, 3), second))

    run = celgc.simulate(problem, 1, base, clip=0.05)
    x = problem.start()
    g = problem.gradient(0, x, 0)
    factor = min(1.0, 0.05 / 0.2 / (1e-10 + tensors.norm(g)))
    assert factor < 1
    expected = [
        y - factor * (0.1 * (d + 0.5 * y) if i in (0, 2) else 0.01 * d)
        for i, (y, d) in enumerate(zip(x, g, strict=True))
    ]
    close(run.consensus[0], expected)
    assert run.log["rates"][0][0] == pytest.approx(0.1 * factor)


# Baselines


@any_size
@any_base
def test_mean_is_training_on_the_mean_gradient(size, base):
    problem = Problem(size, seed=15)
    run = baselines.mean(problem, STEPS, base, lr=DECAY)
    optimizer, x = base(), problem.start()
    for t in range(STEPS):
        set_rates(optimizer, DECAY(t))
        g = tensors.mean([problem.gradient(k, x, t) for k in range(size)])
        x = optimizer.step(x, g)
        same_bits(run.consensus[t], x)


@any_size
@pytest.mark.parametrize("compressor", [TopK(0.2), Sign()])
def test_mean_feedback_keeps_what_was_not_sent(size, compressor):
    problem = Problem(size, seed=15)
    run = baselines.mean(problem, STEPS, sgd, compressor=compressor)
    at = [problem.start(), *run.consensus]
    before = [tensors.zeros(at[0])] * size
    for t in range(STEPS):
        for k in range(size):
            arrived = tensors.add(run.log["sent"][t][k], run.log["residuals"][t][k])
            close(arrived, tensors.add(problem.gradient(k, at[t], t), before[k]), 1e-13)
        before = run.log["residuals"][t]
    without = baselines.mean(problem, 2, sgd, compressor=compressor, feedback=False)
    g = problem.gradient(0, without.consensus[0], 1)
    same_bits(without.log["sent"][1][0], per_tensor(compressor, g))
    close(without.log["residuals"][1][0], tensors.zeros(g), 0)


@any_size
def test_mean_of_unit_gradients(size):
    problem = Problem(size, seed=15)
    g = [problem.gradient(k, problem.start(), 0) for k in range(size)]
    norms = np.array([tensors.norm(x) for x in g])
    run = baselines.mean(problem, 1, sgd, unit_norm=True)
    close(run.log["out"][0], tensors.weighted(g, norms.mean() / norms / size))
    if size == 1:
        close(run.log["out"][0], g[0])
    zero = FixedProblem([[0.0], [1.0]], [[0.0], [4.0]], [2.0])
    close(baselines.mean(zero, 1, sgd, unit_norm=True).log["out"][0], [[-0.5]])


def test_mean_clips_by_the_norm_of_the_mean():
    problem = FixedProblem(np.ones((2, 2)), [[-3.0, 0], [-3.0, -8.0]], [0.0, 0.0])
    run = baselines.mean(problem, 1, sgd, clip=0.1)
    assert run.log["norm"][0] == pytest.approx(5.0)
    close(run.consensus[0], [[-0.06, -0.08]], 1e-10)


@any_size
def test_local_sgd_averages_every_period(size):
    problem = Problem(size, seed=16)
    run = baselines.local_sgd(problem, 7, heavy, period=3)
    for t in range(7):
        averaged = t in (2, 5)
        expected = [tensors.mean(run.log["local"][t])] * size if averaged else run.log["local"][t]
        close(run.held[t], expected, 0)
    # Every step of plain SGD averaged is SGD on the mean gradient.
    close(baselines.local_sgd(problem, STEPS, sgd, period=1).consensus, baselines.mean(problem, STEPS, sgd).consensus)


def test_easgd_by_hand():
    problem = FixedProblem([[1.0], [1.0]], [[0.0], [3.0]], [1.0])
    run = baselines.easgd(problem, 4, sgd, period=2, pull=0.2)
    x, centre = np.array([1.0, 1.0]), 1.0
    for t in range(4):
        x = x - 0.1 * (x - np.array([0.0, 3.0]))
        if t % 2 == 1:
            x, centre = 0.9 * x + 0.1 * centre, 0.8 * centre + 0.2 * x.mean()
        close([h[0] for h in run.held[t]], list(x[:, None]))
        close(run.consensus[t][0], [centre])


@any_size
def test_easgd_round_conserves_the_sum(size):
    problem = Problem(size, seed=17)
    starts = [Problem(1, seed=100 + k).start() for k in range(size)]
    run = baselines.easgd(problem, 1, partial(SGD, 0.0), period=1, pull=0.3, starts=starts)
    before = tensors.total([*starts, problem.start()])
    close(tensors.total([*run.held[0], run.consensus[0]]), before)


def test_lsgd_by_hand():
    problem = FixedProblem([[1.0], [1.0]], [[0.0], [3.0]], [1.0])
    run = baselines.lsgd(problem, 12, sgd, period=3, pull=0.2, prox=0.3)
    targets = np.array([0.0, 3.0])
    x, centre, losses = np.array([1.0, 1.0]), 1.0, []
    for t in range(12):
        losses.append(0.5 * (x - targets) ** 2)
        x = x - 0.1 * (x - targets)
        x = 0.9 * x + 0.1 * centre
        if t % 3 == 2:
            means = np.mean(losses[-4:], axis=0)
            leader = int(np.argmin(means))
            assert run.log["leader"][t] == leader
            close(run.log["means"][t], means)
            centre = x[leader]
            x = 0.8 * x + 0.2 * centre
        else:
            assert run.log["leader"][t] is None
        close([h[0] for h in run.held[t]], list(x[:, None]))
        close(run.consensus[t][0], [x.mean()])
