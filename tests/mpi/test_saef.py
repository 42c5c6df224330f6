"""SAEF on real ranks: against the simulation, the spec's example, traps and invariants."""

import copy

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_same_bits
from simulation import SIMULATIONS, compress, tensors
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.collectives.onebit import shard_bounds
from hpctk.errors import HpctkError, SettingError, TensorError
from hpctk.methods.saef import SAEF

FALLING = lambda t: 0.1 / (1 + 0.3 * t)  # noqa: E731
EXAMPLE = FixedProblem([[1, 2, 1], [2, 1, 0.5]], [[1, 0, -1], [-1, 1, 2]], [2.0, 1, 0])
SGD = BASES["sgd"][0]


class Job:
    """A model, its optimizer, and steps on a simulated problem."""

    def __init__(self, world, problem, method, base=SGD, dtype=torch.float64, **settings):
        self.world = world
        self.model = Quadratic(problem, world.rank, dtype)
        self.base = base(self.model.parameters())
        self.opt = hpctk.DistributedOptimizer(self.base, method, model=self.model, **settings)
        self.updates = None
        self.base.register_step_pre_hook(lambda *_: setattr(self, "before", self.y()))
        self.base.register_step_post_hook(self._note)

    def _note(self, *_):
        self.stepped = self.y()
        self.updates = tensors.subtract(self.before, self.stepped)

    def step(self, t, lr=None, spoil=None):
        if lr is not None:
            for group in self.opt.param_groups:
                group["lr"] = lr(t)
        self.opt.zero_grad()
        loss = self.model(t)
        loss.backward()
        if spoil is not None:
            spoil(self)
        self.opt.step()

    @property
    def counts(self):
        return self.opt.stats.counts

    def y(self):
        return self.model.arrays()

    def x(self):
        """x, without a collective: what `consensus` gives is tested once."""
        return self.in_order(self.opt.local_state_dict()["x"])

    def in_order(self, named):
        return [named[name].numpy().copy() for name, _ in self.model.named_parameters()]

    def residuals(self):
        """e_k: kept in classic error feedback; else how far the parameters are from x."""
        state = self.opt.local_state_dict()
        if "residuals" in state:
            return self.in_order(state["residuals"])
        return tensors.subtract(self.x(), self.in_order(state["parameters"]))

    def everything(self):
        """All that a skipped or refused step must leave as it is, as bytes."""
        return list(flat_bytes([self.y(), self.opt.local_state_dict(), self.base.state_dict()["state"]]))


def flat_bytes(thing):
    if isinstance(thing, dict):
        for key in sorted(thing, key=str):
            yield str(key)
            yield from flat_bytes(thing[key])
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from flat_bytes(one)
    elif isinstance(thing, torch.Tensor):
        yield thing.numpy().tobytes()
    else:
        yield thing.tobytes() if isinstance(thing, np.ndarray) else thing


def close(got, wanted, atol=1e-12):
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=f"tensor {i}")


def same(got, wanted):
    assert len(got) == len(wanted)
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


def mean(world, rows):
    return [np.asarray(world.control.allreduce(row)) / world.size for row in rows]


# The spec's example, and the simulation


@pytest.mark.parametrize("ahead", [True, False], ids=["step-ahead", "classic"])
def test_worked_example(world, ahead):
    if world.size != 2:
        pytest.skip("an example of two workers")
    job = Job(world, EXAMPLE, SAEF(hpctk.TopK(1 / 3), step_ahead=ahead))
    deltas = [
        [[0.1, 0.2, 0.1], [0.6, 0, -0.1]],
        [[0.16, 0.18, 0.19], [0.54, -0.01, -0.195]],
        [[0.187, 0.324, 0.0905], [0.486, -0.019, -0.29]],
    ]
    errors = [
        [[0.1, 0, 0.1], [0, 0, -0.1]],
        [[0.16, 0.18, 0], [0, -0.01, -0.195]],
        [[0.187, 0, 0.0905], [0, -0.019, -0.29]],
    ]
    after = [[1.7, 0.9, 0], [1.43, 0.9, -0.095], [1.187, 0.738, -0.095]]
    classic = [[1.7, 0.9, 0], [1.43, 0.9, -0.1], [1.187, 0.72, -0.1]]
    for t in range(3):
        before = job.residuals()
        job.step(t)
        close(job.x(), [(after if ahead else classic)[t]])
        if ahead:
            close(tensors.add(before, job.updates), [deltas[t][world.rank]])
            close(job.residuals(), [errors[t][world.rank]])
        else:
            same(job.y(), job.x())


PAIRS = {
    "topk": ({"compressor": hpctk.TopK(0.2)}, {"compressor": compress.TopK(0.2)}),
    "sign": ({"compressor": hpctk.Sign()}, {"compressor": compress.Sign()}),
    "two-way": (
        {"compressor": hpctk.Sign(), "server": hpctk.Sign(), "average_every": 5},
        {"compressor": compress.Sign(), "server": compress.Sign(), "average_every": 5},
    ),
    "topk-topk": (
        {"compressor": hpctk.TopK(0.3), "server": hpctk.TopK(0.5), "average_every": 4},
        {"compressor": compress.TopK(0.3), "server": compress.TopK(0.5), "average_every": 4},
    ),
    "sign-topk": (
        {"compressor": hpctk.Sign(), "server": hpctk.TopK(0.4), "average_every": 1},
        {"compressor": compress.Sign(), "server": compress.TopK(0.4), "average_every": 1},
    ),
    "topk-sign-classic": (
        {"compressor": hpctk.TopK(0.2), "server": hpctk.Sign(), "average_every": 2, "step_ahead": False},
        {"compressor": compress.TopK(0.2), "server": compress.Sign(), "average_every": 2, "step_ahead": False},
    ),
}


@pytest.mark.parametrize(
    ("case", "base"),
    [
        *((case, "nesterov") for case in PAIRS),
        ("topk", "momentum"),
        ("two-way", "momentum"),
        ("sign", "adam"),
        ("topk-topk", "adam"),
        ("two-way", "adamw"),
        ("topk", "adamw"),
    ],
)
def test_follows_the_simulation(world, case, base):
    problem, steps = Problem(world.size, seed=9), 7
    ours, simulated = BASES[base]
    settings, of_simulation = PAIRS[case]
    wanted = SIMULATIONS["SAEF"](problem, steps, simulated, lr=FALLING, **of_simulation)
    log, rank = wanted.log, world.rank
    job = Job(world, problem, SAEF(**settings), ours)
    for t in range(steps):
        job.step(t, FALLING)
        close(job.y(), wanted.held[t][rank], 1e-10)
        close(job.x(), wanted.consensus[t], 1e-10)
        close(job.residuals(), log["carried"][t][rank], 1e-10)
    close([server_residual(world, job)], [tensors.flatten(log["server"][-1])], 1e-10)
    assert_same_bits(world, job.x(), "x")
    every = settings.get("average_every", 0)
    averages = sum((t + 2) % every == 0 for t in range(steps)) if every else 0
    assert job.counts == {"rounds": steps} | ({"averages": averages} if averages else {})


@pytest.mark.parametrize("every", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", ["topk", "sign", "identity"])
def test_residuals_in_the_parameters_are_those_of_the_paper(world, case, dtype, every):
    """Nothing but x is kept beside the parameters; the simulation keeps the residuals, in float64."""
    problem, steps, (ours, simulated) = Problem(world.size, seed=12), 10, BASES["momentum"]
    settings, of_simulation = ({"compressor": hpctk.Identity()}, {"compressor": compress.Identity()})
    if case in PAIRS:
        settings, of_simulation = PAIRS[case]
    wanted = SIMULATIONS["SAEF"](problem, steps, simulated, average_every=every, **of_simulation)
    job = Job(world, problem, SAEF(**settings, average_every=every), ours, dtype)
    atol = 2e-15 if dtype == torch.float64 else 4e-7
    for t in range(steps):
        job.step(t)
        # Of each step one rounding of parameters of about 1.
        allowed = atol * max(1, *(np.abs(a).max() for a in wanted.held[t][world.rank])) * (t + 1)
        close(job.y(), wanted.held[t][world.rank], allowed)
        close(job.x(), wanted.consensus[t], allowed)
    assert set(job.opt.local_state_dict()) == {
        "x", "parameters", "server_residuals", "server_shard", "compressor", "server", "t"
    }  # fmt: skip


def server_residual(world, job):
    """s as one vector, put together from the ranks' shards where it is cut."""
    state = job.opt.local_state_dict()
    n = sum(a.size for a in job.y())
    kept = state["server_residuals"]
    if "the whole model" in kept:
        return kept["the whole model"].numpy()
    if kept:
        return tensors.flatten(job.in_order(kept))
    whole = np.zeros(n)
    if state["server_shard"].numel():
        lo, hi = shard_bounds(world, n)
        whole[lo:hi] = state["server_shard"].numpy()
        whole = world.control.allreduce(whole)
    return whole


# A step ahead of any length, and several local steps


@pytest.mark.parametrize(
    ("ahead", "after"),
    [
        (0.85, [[1.7, 0.9, 0], [1.43, 0.9, -0.09575], [1.187, 0.7353, -0.09575], [0.87167158, 0.7353, -0.09575]]),
        (0.0, [[0.85245, 0.72, -0.1]]),
        (0.5, [[0.86406875, 0.729, -0.0975]]),
        (1.0, [[0.8748, 0.738, -0.095]]),
    ],
)
def test_worked_example_of_a_part_of_a_step_ahead(world, ahead, after):
    if world.size != 2:
        pytest.skip("an example of two workers")
    job = Job(world, EXAMPLE, SAEF(hpctk.TopK(1 / 3), step_ahead=ahead))
    seen = []
    for t in range(4):
        job.step(t)
        seen.append(job.x())
    for x, wanted in zip(seen[-len(after) :], after, strict=True):
        close(x, [wanted], 5.1e-9)
    if ahead == 0.85:
        errors = [[0, 0.14706, 0.17316387], [0, -0.04399225, -0.38458635]][world.rank]
        close(job.residuals(), [errors], 5.1e-9)
        close(job.y(), [job.x()[0] - 0.85 * job.residuals()[0]], 1e-15)


@pytest.mark.parametrize("ahead", [0.85, 1.0])
def test_worked_example_of_two_local_steps(world, ahead):
    if world.size != 2:
        pytest.skip("an example of two workers")
    method = SAEF(hpctk.TopK(1 / 3), step_ahead=ahead, period=2, average_every=2)
    job = Job(world, EXAMPLE, method, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    wanted = [[1.19, 0.73, 0], [-0.21947, 0.2728, 0], [-1.4604692, 0.2728, -0.60813962]]
    for t in range(6):
        job.step(t)
        if t % 2 and ahead == 0.85:
            close(job.x(), [wanted[t // 2]], 5.1e-9)
    assert job.counts == {"rounds": 3, "averages": 2}


PARTS = {
    "topk-3": {"step_ahead": 0.85, "period": 3},
    "topk-averaged": {"step_ahead": 0.5, "average_every": 2},
    "lean-2": {"step_ahead": True, "period": 2, "average_every": 3},
    "classic-2": {"step_ahead": 0, "period": 2},
    "sign": {"compressor": "Sign", "step_ahead": 0.3, "period": 2},
    "two-way": {"compressor": "Sign", "server": "Sign", "step_ahead": 0.7, "average_every": 2},
    "chunks": {"compressor": "ChunkTopK", "step_ahead": 0.85, "period": 2},
    "chunks-lean": {"compressor": "ChunkTopK"},
}


@pytest.mark.parametrize(
    ("case", "base"), [*((case, "momentum") for case in PARTS), ("topk-3", "adamw"), ("chunks", "nesterov")]
)
def test_parts_and_periods_follow_the_simulation(world, case, base):
    problem, steps, (ours, simulated) = Problem(world.size, seed=9), 6, BASES[base]
    values = {"ChunkTopK": (2, 8), "TopK": (0.2,), "Sign": ()}
    settings = {"compressor": "TopK"} | PARTS[case]

    def of(module):
        sides = {side: settings[side] for side in ("compressor", "server") if side in settings}
        return settings | {side: getattr(module, name)(*values[name]) for side, name in sides.items()}

    wanted = SIMULATIONS["SAEF"](problem, steps, simulated, lr=FALLING, **of(compress))
    job, period = Job(world, problem, SAEF(**of(hpctk)), ours), settings.get("period", 1)
    for t in range(steps):
        job.step(t, FALLING)
        if (t + 1) % period == 0:
            i = t // period
            close(job.y(), wanted.held[i][world.rank], 1e-10)
            close(job.x(), wanted.consensus[i], 1e-10)
            close(job.residuals(), wanted.log["carried"][i][world.rank], 1e-10)
    assert_same_bits(world, job.x(), "x")
    assert job.counts["rounds"] == steps // period


@pytest.mark.parametrize("ahead", [0.6, 1.0])
def test_a_state_between_exchanges_goes_on_bit_for_bit(world, ahead):
    problem, method = Problem(world.size, seed=4), SAEF(hpctk.TopK(0.2), step_ahead=ahead, period=3)
    one, other = (Job(world, problem, method) for _ in range(2))
    for t in range(8):
        if t in (1, 3, 5):
            other.opt.load_local_state_dict(copy.deepcopy(one.opt.local_state_dict()))
            same(other.y(), one.y())
        one.step(t)
        if t >= 1:
            other.step(t)
            same(other.x(), one.x())
            same(other.y(), one.y())


@pytest.mark.parametrize("ahead", [0.6, 1.0])
def test_a_bad_gradient_between_exchanges_is_not_applied_and_told_at_the_next(world, ahead):
    method = SAEF(hpctk.TopK(0.2), step_ahead=ahead, period=3)
    job = Job(world, Problem(world.size, seed=4), method, on_bad_gradient="skip")

    def spoil(job):
        if world.rank == 0:
            next(iter(job.model.parameters())).grad.fill_(float("nan"))

    before = job.y()
    job.step(0, spoil=spoil)
    if world.rank == 0:
        same(job.y(), before)
    assert job.counts.get("skipped_steps", 0) == 0
    job.step(1)
    job.step(2)
    assert job.counts == {"rounds": 1, "skipped_steps": 1}
    assert all(np.isfinite(a).all() for a in job.x())
    assert_same_bits(world, job.x(), "x")
    refusing = Job(world, Problem(world.size, seed=4), SAEF(hpctk.TopK(0.2), step_ahead=ahead, period=2))
    refusing.step(0, spoil=spoil)
    with pytest.raises(HpctkError, match="rank 0"):
        refusing.step(1)


def test_between_exchanges_nothing_travels(world):
    job = Job(world, Problem(world.size, seed=4), SAEF(hpctk.TopK(0.2), step_ahead=0.85, period=4))
    sent = []
    for t in range(8):
        job.step(t)
        sent.append(job.opt.stats.sent_bytes)
    assert sent[4] == sent[5] == sent[6] == sent[3]
    assert world.size == 1 or sent[7] > sent[6]


@pytest.mark.parametrize("ahead", [-0.1, 1.1, float("nan"), "half", None])
def test_a_part_outside_of_0_to_1_is_refused(ahead):
    with pytest.raises(SettingError, match="step_ahead"):
        SAEF(hpctk.TopK(0.1), step_ahead=ahead)


# Invariants

ANY = {
    "part": {"compressor": hpctk.TopK(0.2), "step_ahead": 0.4, "average_every": 2},
    "part-chunks": {"compressor": hpctk.ChunkTopK(1, 8), "server": hpctk.TopK(0.5), "step_ahead": 0.85},
    "chunks": {"compressor": hpctk.ChunkTopK(1, 8, codebook="signed"), "server": hpctk.ChunkTopK(2, 8)},
    "topk-keep": {"compressor": hpctk.TopK(0.2, keep=True)},
    "randomk-qsgd": {"compressor": hpctk.RandomK(0.3, seed=4), "server": hpctk.QSGD(6, bucket=8)},
    "qsgd-half": {"compressor": hpctk.QSGD(6, bucket=8), "server": hpctk.Half("bfloat16"), "average_every": 3},
    "powersgd": {"compressor": hpctk.PowerSGD(1), "server": hpctk.Sign()},
    "topk-randomk": {"compressor": hpctk.TopK(0.3), "server": hpctk.RandomK(0.5)},
    "spared": {
        "compressor": hpctk.Sign(exclude=["tensors.1"], min_elements=2),
        "server": hpctk.Sign(exclude=["tensors.1"], min_elements=2),
    },
    "spared-one-way": {"compressor": hpctk.Sign(min_elements=6), "server": hpctk.TopK(0.4, min_elements=9)},
    "all-spared": {"compressor": hpctk.Sign(min_elements=1000), "server": hpctk.Sign(min_elements=1000)},
    "identity": {"compressor": hpctk.Identity(), "server": hpctk.Identity()},
}


@pytest.mark.parametrize("settings", ANY.values(), ids=ANY)
def test_the_virtual_sequence_is_uncompressed(world, settings):
    """x - s - mean e moves by the mean of the updates, whatever the compressors are."""
    job = Job(world, Problem(world.size, seed=5), SAEF(**settings), BASES["momentum"][0])
    virtual = job.y()
    for t in range(5):
        job.step(t, FALLING)
        virtual = tensors.subtract(virtual, mean(world, job.updates))
        s = tensors.unflatten(server_of_any(world, job), [a.shape for a in virtual])
        close(tensors.subtract(tensors.subtract(job.x(), s), mean(world, job.residuals())), virtual)
    assert_same_bits(world, job.x(), "x")


def server_of_any(world, job):
    """s in the model's order, where Sign's vector is not all of it, or other order."""
    state = job.opt.local_state_dict()
    feedback = job.opt._run.feedback
    parts = {name: np.zeros(p.shape) for name, p in job.model.named_parameters()}
    whole = state["server_residuals"].get("the whole model")
    if state["server_shard"].numel() or feedback._two_way:
        lo, hi = shard_bounds(world, feedback._n)
        cut = np.zeros(feedback._n)
        cut[lo:hi] = state["server_shard"].numpy()
        whole = torch.from_numpy(world.control.allreduce(cut))
    if whole is not None:
        ends = np.cumsum([0, *(parts[name].size for name in feedback.names[: feedback._signed])])
        for name, lo, hi in zip(feedback.names, ends[:-1], ends[1:], strict=False):
            parts[name] = whole.numpy()[lo:hi].reshape(parts[name].shape)
    else:
        parts |= {name: kept.numpy() for name, kept in state["server_residuals"].items()}
    return tensors.flatten([parts[name] for name, _ in job.model.named_parameters()])


def test_top_k_and_its_residual_add_up_exactly(world):
    if world.size > 1:
        pytest.skip("at one rank x moves by exactly what was sent")
    job = Job(world, Problem(1, seed=2), SAEF(hpctk.TopK(0.3)), BASES["adam"][0])
    for t in range(6):
        x = job.x()
        job.step(t)
        delta, after = tensors.subtract(x, job.stepped), job.residuals()
        for d, left, was, now in zip(delta, after, x, job.x(), strict=True):
            kept = left != 0
            assert np.array_equal(d[kept], left[kept])
            assert np.array_equal(now, np.where(kept, was, was - d))


def uncompressed(problem, steps, base, lr):
    """Every worker's own base optimizer at one common point, which moves by the mean of what they subtract."""
    workers = [base() for _ in range(problem.workers)]
    x, path = problem.start(), []
    for t in range(steps):
        moves = []
        for k, optimizer in enumerate(workers):
            for group in optimizer.groups:
                group.lr = lr(t)
            moves.append(tensors.subtract(x, optimizer.step(x, problem.gradient(k, x, t))))
        x = tensors.subtract(x, tensors.mean(moves))
        path.append(x)
    return path


@pytest.mark.parametrize(
    ("compressor", "every", "base"),
    [(hpctk.Identity(), 0, "nesterov"), (hpctk.TopK(0.1), 1, "nesterov"), (hpctk.Sign(), 1, "adamw")],
    ids=["identity", "topk averaged", "sign averaged"],
)
def test_is_uncompressed_training_where_it_should_be(world, compressor, every, base):
    problem = Problem(world.size, seed=3)
    job = Job(world, problem, SAEF(compressor, average_every=every), BASES[base][0])
    for t, wanted in enumerate(uncompressed(problem, 10, BASES[base][1], FALLING)):
        job.step(t, FALLING)
        # The residuals are averaged for the next forward: y is x - mean e on every rank.
        close(job.y(), wanted, 1e-10)
    assert job.counts.get("averages", 0) == (10 if every else 0)


def test_one_rank_alone_is_uncompressed(world):
    if world.size > 1:
        pytest.skip("of one rank")
    problem = Problem(1, seed=3)
    for compressor in (hpctk.TopK(0.1), hpctk.Sign()):
        job = Job(world, problem, SAEF(compressor, average_every=3), BASES["momentum"][0])
        for t, wanted in enumerate(uncompressed(problem, 10, BASES["momentum"][1], FALLING)):
            job.step(t, FALLING)
            close(job.y(), wanted, 1e-10)


def test_without_stepping_ahead_it_is_error_feedback(world):
    problem = Problem(world.size, seed=3)
    job = Job(world, problem, SAEF(hpctk.TopK(0.2), step_ahead=False))
    other = Job(world, problem, hpctk.Mean(hpctk.TopK(0.2)))
    for t in range(8):
        job.step(t)
        other.step(t)
        # With a constant rate the residual in units of gradients is the same, divided by lr.
        close(job.y(), other.y())


def held_bytes(run):
    """The memory of all tensors and arrays that a run has made itself."""
    seen, found = {id(run.replica), id(run.base)}, {}

    def look(thing):
        if id(thing) in seen or isinstance(thing, torch.nn.Parameter):
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, np.ndarray):
            found[thing.__array_interface__["data"][0]] = thing.nbytes
        elif isinstance(thing, dict):
            for one in thing.values():
                look(one)
        elif isinstance(thing, list | tuple | set):
            for one in thing:
                look(one)
        elif hasattr(thing, "__dict__"):
            look(vars(thing))

    look(run)
    return sum(found.values())


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ({"compressor": hpctk.TopK(0.01)}, 1),
        ({"compressor": hpctk.TopK(0.01), "average_every": 2}, 1),
        ({"compressor": hpctk.Sign()}, 1),
        ({"compressor": hpctk.QSGD(4)}, 2),
        ({"compressor": hpctk.TopK(0.01), "step_ahead": False}, 3),
    ],
    ids=["topk", "averaging", "sign", "qsgd", "classic"],
)
def test_copies_of_the_model_that_are_held(world, settings, copies):
    job = Job(world, Problem(world.size, shapes=[(300, 200), (7,), (4000,)]), SAEF(**settings), dtype=torch.float32)
    for t in range(3):
        job.step(t)
    model = sum(4 * a.size for a in job.y())
    assert copies * model <= held_bytes(job.opt._run) <= (copies + 0.02) * model


@pytest.mark.parametrize("case", ["topk", "sign", "two-way"])
def test_float32_and_the_same_bits_in_every_run(world, case):
    settings, of_simulation = PAIRS[case]
    runs = []
    for _ in range(2):
        job = Job(world, Problem(world.size, seed=1), SAEF(**settings), dtype=torch.float32)
        for t in range(6):
            job.step(t)
            assert_same_bits(world, job.x(), "x")
        runs.append([*job.x(), *job.y()])
        assert runs[-1][1].dtype == np.float32
    same(*runs)
    wanted = SIMULATIONS["SAEF"](Problem(world.size, seed=1), 6, BASES["sgd"][1], **of_simulation)
    close(runs[0][:4], wanted.consensus[-1], 1e-4)


# Traps


def test_x_starts_as_what_the_model_holds_at_the_first_step(world):
    job = Job(world, Problem(world.size), SAEF(hpctk.TopK(0.2)))
    with torch.no_grad():
        for p in job.model.parameters():
            p.fill_(3.0)
    with job.opt.averaged_model():
        assert all((a == 3).all() for a in job.y())
    assert all((a == 3).all() for a in job.x())
    job.step(0)
    virtual = tensors.subtract(job.x(), mean(world, job.residuals()))
    close(virtual, [3.0 - u for u in mean(world, job.updates)])


def test_evaluation_is_at_x_and_training_at_y(world):
    job = Job(world, Problem(world.size), SAEF(hpctk.Sign(min_elements=6)))
    for t in range(2):
        job.step(t)
    y, x = job.y(), job.x()
    with job.opt.averaged_model():
        same(job.y(), x)
        assert_same_bits(world, job.y(), "x")
        # What is saved here is what training goes on from.
        same(job.in_order(job.opt.local_state_dict()["parameters"]), y)
    same(job.y(), y)
    same(y, job.in_order(job.opt.local_state_dict()["parameters"]))
    assert any(e.any() for e in job.residuals())


def test_the_average_is_dense_and_counted(world):
    n = 20_000
    flat = FixedProblem([np.ones(n)] * world.size, [np.linspace(1, 2, n)] * world.size, np.zeros(n))
    job = Job(world, flat, SAEF(hpctk.TopK(0.001), average_every=3), dtype=torch.float32, schedule="ring")
    sent = [0]
    for t in range(6):
        job.step(t)
        sent.append(job.opt.stats.sent_bytes)
    dense = 2 * (world.size - 1) / world.size * 4 * n
    # Iterations 2 and 5 begin with it, so steps 1 and 4 end with it.
    averaged = [more >= dense for more in np.diff(sent)]
    assert averaged == ([False, True, False] * 2 if world.size > 1 else [True] * 6)
    assert job.counts["averages"] == 2


def test_two_ways_of_signs_move_one_bit_each_way(world):
    shapes = [(1003,), (200, 251), (3, 5, 7, 11), (50_000,)]
    job = Job(world, Problem(world.size, shapes=shapes), SAEF(hpctk.Sign(), hpctk.Sign()), dtype=torch.float32)
    job.step(0)
    before = job.opt.stats.sent_bytes
    job.step(1)
    n = sum(a.size for a in job.y())
    each_way = 8 * (job.opt.stats.sent_bytes - before) / n / 2
    assert each_way <= 1.1
    if world.size > 1:
        assert each_way >= (world.size - 1) / world.size - 0.01
    assert_same_bits(world, job.x(), "x")


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("case", ["topk", "two-way"])
def test_a_bad_gradient_on_one_rank(world, case, policy):
    job = Job(world, Problem(world.size, seed=4), SAEF(**PAIRS[case][0]), BASES["adam"][0], on_bad_gradient=policy)
    job.step(0)
    job.step(1)
    bad, before, counts = world.size - 1, job.everything(), dict(job.counts)

    def spoil(job):
        if world.rank == bad:
            job.model.tensors[2].grad[1, 2] = float("nan")

    if policy == "raise":
        with pytest.raises(HpctkError, match=f"rank {bad}: the gradient of 'tensors.2' is NaN or infinite"):
            job.step(2, spoil=spoil)
    else:
        job.step(2, spoil=spoil)
    assert job.everything() == before
    assert job.counts == counts | {"skipped_steps": 1}
    job.step(3)
    assert job.everything() != before
    assert_same_bits(world, job.x(), "x")


@pytest.mark.parametrize("case", ["topk", "sign", "two-way", "topk-topk", "sign-topk", "topk-sign-classic"])
def test_an_update_beyond_range_is_everyones_error(world, case):
    """Gradients are finite, but the update of one rank is not: it is not sent, and the next step says so everywhere."""
    job = Job(world, Problem(world.size, seed=4), SAEF(**{**PAIRS[case][0], "average_every": 0}))
    job.step(0)
    bad = world.size - 1
    left = job.residuals()
    if world.rank == bad:
        job.opt.param_groups[0]["lr"] = float("inf")
    job.step(1)
    if world.rank == bad and case == "topk":
        # What was left of the first step's update cannot be told from the second's any more.
        assert any(e.any() for e in left)
        assert not any(e.any() for e in job.residuals())
    if world.rank == bad:
        job.opt.param_groups[0]["lr"] = job.opt.defaults["lr"]
    before = job.everything()
    assert_same_bits(world, job.x(), "x")
    assert all(np.isfinite(a).all() for a in [*job.x(), *job.y()])
    with pytest.raises(TensorError, match=f"failed on rank {bad}: .*is NaN or infinite.*was not sent"):
        job.step(2)
    assert job.everything() == before
    job.step(3)
    assert job.everything() != before
    assert_same_bits(world, job.x(), "x")


def test_what_is_done_to_the_parameters_between_steps_travels(world):
    job = Job(world, Problem(world.size, seed=4), SAEF(hpctk.Identity()))
    job.step(0)
    with torch.no_grad():
        for p in job.model.parameters():
            p.clamp_(-0.1, 0.1)
    y = job.y()
    job.step(1)
    close(job.x(), tensors.subtract(y, mean(world, job.updates)))


class Layers(torch.nn.Module):
    """Batch norm, and a channels-last convolution, whose elements do not lie in C order."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.norm(self.conv(x)).sigmoid().square().mean()


@pytest.mark.parametrize("server", [None, hpctk.Sign()], ids=["one way", "two ways"])
def test_layouts_accumulation_and_unused_parameters(world, server):
    torch.manual_seed(world.rank)
    model, plain = Layers(), Layers()
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), SAEF(hpctk.Sign(), server), model=model
    )
    plain.load_state_dict(model.state_dict())
    plain.conv = plain.conv.to(memory_format=torch.contiguous_format)
    # The same model in another layout: the same bits.
    other = hpctk.DistributedOptimizer(
        torch.optim.SGD(plain.parameters(), lr=0.1), SAEF(hpctk.Sign(), server), model=plain
    )
    unused = model.unused.weight.detach().clone()
    for _ in range(3):
        batches = [torch.randn(5, 3, 6, 6) for _ in range(2)]
        opt.zero_grad()
        for batch in batches:
            model(batch).backward()
        other.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.contiguous().clone()
        opt.step()
        other.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
        with opt.averaged_model():
            assert_same_bits(world, [p.detach().numpy() for p in model.parameters()], "x")
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    with opt.averaged_model():
        assert not torch.equal(model.unused.weight, unused), "sign(0) is +1, and the residual remembers it"


# Uneven data, and checkpoints


@pytest.mark.parametrize("case", ["topk", "two-way"])
def test_residuals_of_a_rank_without_data_still_flow(world, case):
    last = [3 + k for k in range(world.size)]
    job = Job(world, Problem(world.size, seed=8), SAEF(**PAIRS[case][0]), BASES["momentum"][0])
    virtual = job.y()
    total = [np.zeros_like(a) for a in virtual]
    with job.opt.join():
        for t in range(last[world.rank]):
            job.step(t)
            total = tensors.add(total, job.updates)
    assert job.opt.stats.steps == max(last) == job.counts["rounds"]
    s = tensors.unflatten(server_residual(world, job), [a.shape for a in virtual])
    end = tensors.subtract(tensors.subtract(job.x(), s), mean(world, job.residuals()))
    close(end, tensors.subtract(virtual, mean(world, total)))
    assert_same_bits(world, job.x(), "x")
    job.step(20)
    assert_same_bits(world, job.x(), "x")


@pytest.mark.parametrize(
    "settings",
    [PAIRS["two-way"][0], PAIRS["topk-topk"][0], ANY["randomk-qsgd"], ANY["powersgd"]],
    ids=["two-way", "topk-topk", "randomk-qsgd", "powersgd-sign"],
)
def test_goes_on_from_a_checkpoint_bit_for_bit(world, settings):
    problem, base = Problem(world.size, seed=2), BASES["adam"][0]
    whole = Job(world, problem, SAEF(**settings), base)
    for t in range(4):
        whole.step(t)
    saved = copy.deepcopy([whole.opt.state_dict(), whole.opt.local_state_dict()])
    other = Job(world, problem, SAEF(**settings), base)
    other.opt.load_state_dict(saved[0])
    other.opt.load_local_state_dict(saved[1])
    # The state says what the parameters are.
    same(other.y(), whole.y())
    for t in range(4, 8):
        whole.step(t)
        other.step(t)
    same(whole.y(), other.y())
    assert list(flat_bytes(whole.opt.local_state_dict())) == list(flat_bytes(other.opt.local_state_dict()))


def test_a_state_of_another_model_is_refused(world):
    job = Job(world, Problem(world.size), SAEF(hpctk.TopK(0.2)))
    other = Job(world, Problem(world.size, shapes=[(), (5,), (4, 3), (2, 2, 2)]), SAEF(hpctk.TopK(0.2)))
    with pytest.raises(TensorError, match=r"x of 'tensors.2': torch.float64 \(4, 3\) was saved"):
        job.opt.load_local_state_dict(other.opt.local_state_dict())


def test_one_object_may_be_worker_and_server(world):
    both = hpctk.QSGD(6, bucket=8)
    runs = []
    for compressor, server in [(both, both), (hpctk.QSGD(6, bucket=8), hpctk.QSGD(6, bucket=8))]:
        job = Job(world, Problem(world.size, seed=2), SAEF(compressor, server))
        for t in range(4):
            job.step(t)
            assert_same_bits(world, job.x(), "x")
        runs.append(job.x())
    same(*runs)


@pytest.mark.parametrize(
    "wrong",
    [
        {"compressor": None},
        {"compressor": "topk"},
        {"server": 3},
        {"server": hpctk.PowerSGD(1)},
        {"average_every": -1},
        {"average_every": 2.0},
        {"average_every": True},
        {"step_ahead": 2},
    ],
    ids=str,
)
def test_wrong_settings(wrong):
    with pytest.raises(SettingError, match=f"{next(iter(wrong))}="):
        SAEF(**{"compressor": hpctk.Sign(), **wrong})


def test_signs_that_spare_different_tensors(world):
    with pytest.raises(SettingError, match="spare the same tensors"):
        Job(world, Problem(world.size), SAEF(hpctk.Sign(min_elements=6), hpctk.Sign()))
