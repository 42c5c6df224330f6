"""SASG on real ranks: against the simulation, the spec's example, traps and invariants."""

import copy
import random

import numpy as np
import pytest
import torch
from methods_driver import BASES, Quadratic, assert_same_bits
from simulation import SIMULATIONS, tensors
from simulation import compress as simulation_compress
from simulation.compress import TopK
from simulation.problem import FixedProblem, Problem

import hpctk
from hpctk.errors import HpctkError, PeerError, SettingError
from hpctk.methods.sasg import SASG

FALLING = lambda t: 0.1 / (1 + 0.3 * t)  # noqa: E731
EXAMPLE = FixedProblem([[1, 2, 1, 0.5], [1, 0.5, 2, 1]], [[1, 0, -1, 1.6], [0, 1, 0.9, -1]], [2.0, 2, 0, 0])
SGD = BASES["sgd"][0]


class Job:
    """A model, its optimizer, and steps on a simulated problem."""

    def __init__(self, world, problem, method, base=SGD, dtype=torch.float64, **settings):
        self.world = world
        self.model = Quadratic(problem, world.rank, dtype)
        self.base = base(self.model.parameters())
        self.opt = hpctk.DistributedOptimizer(self.base, method, model=self.model, **settings)
        self.calls = 0

    def closure(self, t, spoil=None):
        def evaluate():
            self.calls += 1
            self.opt.zero_grad()
            loss = self.model(t)
            loss.backward()
            if spoil is not None:
                spoil(self)
            return loss

        return evaluate

    def step(self, t, spoil=None, lr=None):
        if lr is not None:
            for group in self.opt.param_groups:
                group["lr"] = lr(t)
        return self.opt.step(self.closure(t, spoil))

    @property
    def counts(self):
        return self.opt.stats.counts

    def w(self):
        return self.model.arrays()

    def residuals(self):
        kept = self.opt.local_state_dict()["residuals"]
        shapes = dict(self.model.named_parameters())
        return [kept.get(n, torch.zeros_like(p.detach())).numpy().copy() for n, p in shapes.items()]

    def q(self, rank=None):
        """The last message of a rank, dense, by tensor; None where there is none."""
        state = self.opt.local_state_dict()["messages"].get(str(self.world.rank if rank is None else rank))
        if state is None:
            return None
        flat = np.zeros(sum(a.size for a in self.w()))
        flat[state["indices"].numpy()] = state["values"].numpy()
        return tensors.unflatten(flat, [a.shape for a in self.w()])

    def everything(self):
        """All that a skipped or refused step must leave as it is, as bytes."""
        state = [*self.w(), self.opt.local_state_dict(), self.base.state_dict()["state"]]
        return list(flat_bytes(state))


def flat_bytes(thing):
    if isinstance(thing, dict):
        for key in thing:
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


# The spec's example, and the simulation


def test_worked_example(world):
    if world.size != 2:
        pytest.skip("an example of two workers")
    job = Job(world, EXAMPLE, SASG(density=0.25, alpha=4, max_delay=2, terms=2, warmup=1))
    theta = [None, 0.2, 0.3424, 0.2724]
    uploads = [[1, 1], [1, 0], [1, 0], [0, 1]]
    q0 = [[0, 0.4, 0, 0], [0, 0.32, 0, 0], [0, 0, 0.3, 0], [0, 0, 0.3, 0]]
    q1 = [[0.2, 0, 0, 0]] * 3 + [[0, 0, -0.42, 0]]
    after = [[1.8, 1.6, 0, 0], [1.6, 1.28, 0, 0], [1.4, 1.28, -0.3, 0], [1.4, 1.28, -0.18, 0]]
    for t in range(4):
        before = job.counts.get("uploads", 0)
        if t:
            assert job.opt._run.threshold() == pytest.approx(theta[t], abs=1e-12)
        job.step(t)
        assert job.counts["uploads"] - before == uploads[t][world.rank]
        close([job.q(0)[0], job.q(1)[0], job.w()[0]], [q0[t], q1[t], after[t]])
        if t == 2:
            close(job.residuals(), [[[0.24, 0.256, 0, -0.24], [0, 0.05, -0.18, 0.1]][world.rank]])
    close(job.residuals(), [[[0.24, 0.256, 0, -0.24], [0.14, 0.064, 0, 0.2]][world.rank]])
    assert world.control.allreduce(job.counts["uploads"]) == 5
    assert job.counts["uploads"] + job.counts["skips"] == 4
    # In warm-up, and when it is late, as rank 1 is at last, a rank asks for no second gradient.
    assert job.calls == [7, 6][world.rank]


CASES = {
    "sgd": {"alpha": 20.0, "density": 0.3, "max_delay": 3, "warmup": 2},
    "momentum": {"alpha": None, "density": 0.2, "max_delay": 4, "warmup": 1},
    "nesterov": {"alpha": None, "density": 0.3, "max_delay": 3, "warmup": 0, "reduce": "mean"},
    "adam": {"alpha": 50.0, "density": 0.1, "max_delay": 2, "terms": 5, "warmup": 2},
    "adamw": {"alpha": 100.0, "density": 0.3, "max_delay": 5, "warmup": 1, "reduce": "mean"},
}


@pytest.mark.parametrize("base", CASES)
def test_follows_the_simulation(world, base):
    problem, steps, settings = Problem(world.size, seed=7), 12, CASES[base]
    ours, simulated = BASES[base]
    wanted = SIMULATIONS["SASG"](problem, steps, simulated, lr=FALLING, **settings)
    log, rank = wanted.log, world.rank
    job = Job(world, problem, SASG(**settings), ours)
    for t in range(steps):
        uploaded = job.counts.get("uploads", 0)
        job.step(t, lr=FALLING)
        assert job.counts.get("uploads", 0) - uploaded == log["uploads"][t][rank]
        close(job.w(), wanted.consensus[t], 1e-10)
        close(job.residuals(), log["residuals"][t][rank], 1e-10)
        for k in range(world.size):
            close(job.q(k), log["q"][t][k], 1e-10)
        assert job.opt.local_state_dict()["delay"] == log["delays"][t][rank]
    assert_same_bits(world, job.w())
    uploads = sum(map(sum, log["uploads"]))
    assert 0 < uploads < steps * world.size, "the case shows nothing"
    counts = job.counts
    assert counts["uploads"] + counts["skips"] == steps
    assert counts["rounds"] == counts["uploads"]


CHUNKS = {"k": 2, "chunk": 5}


@pytest.mark.parametrize("more", [{}, {"codebook": "signed"}, {"bits": None}], ids=["sigma", "signed", "all bits"])
def test_uploads_by_chunks_follow_the_simulation(world, more):
    problem, steps, settings = Problem(world.size, seed=7), 10, {"alpha": 20.0, "max_delay": 3, "warmup": 2}
    ours, simulated = BASES["momentum"]
    chosen = simulation_compress.ChunkTopK(**CHUNKS, **more)
    wanted = SIMULATIONS["SASG"](problem, steps, simulated, lr=FALLING, compressor=chosen, **settings)
    compressor = hpctk.ChunkTopK(**CHUNKS, **more)
    job = Job(world, problem, SASG(compressor=compressor, **settings), ours)
    for t in range(steps):
        job.step(t, lr=FALLING)
        close(job.w(), wanted.consensus[t], 1e-10)
        close(job.residuals(), wanted.log["residuals"][t][world.rank], 1e-10)
        for k in range(world.size):
            close(job.q(k), wanted.log["q"][t][k], 1e-10)
    assert_same_bits(world, job.w())
    uploads = sum(map(sum, wanted.log["uploads"]))
    assert 0 < uploads < steps * world.size, "the case shows nothing"
    nbytes = sum(compressor.wire_bytes(a.size, 8) for a in job.w())
    assert job.counts["upload_bits"] == 8 * nbytes * job.counts["uploads"]


def test_a_bad_update_leaves_the_residuals_of_chunks_as_they_are(world):
    # Finite gradients whose update is not: the rate overflows.
    job = Job(world, Problem(world.size), SASG(alpha=-1, compressor=hpctk.ChunkTopK(**CHUNKS)))
    job.step(0)
    before = [a.copy() for a in job.residuals()]
    with pytest.raises(HpctkError):
        job.step(1, lr=lambda t: 1e308 if world.rank == 0 else 0.1)
        job.step(2, lr=lambda t: 0.1)
    if world.rank == 0:
        same(job.residuals(), before)


# Invariants


def test_what_is_sent_and_what_is_kept_add_up_exactly(world):
    job = Job(world, Problem(world.size, seed=3), SASG(0.3, alpha=20.0, max_delay=3, warmup=1), BASES["adam"][0])
    seen = {}
    job.base.register_step_pre_hook(lambda *_: seen.update(before=job.w()))
    job.base.register_step_post_hook(lambda *_: seen.update(after=job.w()))
    skips = 0
    for t in range(10):
        seen.clear()
        w, residuals, q = job.w(), job.residuals(), job.q()
        state = job.opt.local_state_dict()
        snapshot = [s.numpy().copy() for s in state["snapshot"].values()]
        memory = list(flat_bytes(job.base.state_dict()["state"]))
        job.step(t)
        now = [s.numpy() for s in job.opt.local_state_dict()["snapshot"].values()]
        if seen:
            update = tensors.subtract(seen["before"], seen["after"])
            same(tensors.add(job.q(), job.residuals()), tensors.add(update, residuals))
            assert all(not np.any((a != 0) & (b != 0)) for a, b in zip(job.q(), job.residuals(), strict=True))
            same(now, w)
        else:
            skips += 1
            same(job.q(), q)
            same(job.residuals(), residuals)
            same(now, snapshot)
            assert list(flat_bytes(job.base.state_dict()["state"])) == memory
    assert skips == job.counts["skips"]
    assert world.control.allreduce(skips) > 0


def test_conserves_what_it_applies(world):
    job = Job(world, Problem(world.size, seed=7), SASG(0.3, alpha=20.0, max_delay=3, warmup=2))

    def total(rows):
        return [np.asarray(world.control.allreduce(row)) for row in rows]

    def virtual():
        return tensors.subtract(job.w(), total(job.residuals()))

    for t in range(10):
        before, e, uploads = virtual(), job.residuals(), job.counts.get("uploads", 0)
        job.step(t)
        moved = job.q()
        if job.counts["uploads"] > uploads:
            moved = tensors.subtract(tensors.add(job.q(), job.residuals()), e)
        close(virtual(), tensors.subtract(before, total(moved)))


def reference(problem, steps, base, density, *, last=None, dtype=torch.float64):
    """Top-k with memory of all workers in one process; worker k has data for last[k] steps."""
    models = [Quadratic(problem, k, dtype) for k in range(problem.workers)]
    bases = [base(model.parameters()) for model in models]
    residuals = [[np.zeros(p.shape) for p in model.arrays()] for model in models]
    w, path = models[0].arrays(), []
    for t in range(steps):
        total = [np.zeros(p.shape) for p in w]
        for k, (model, optimizer) in enumerate(zip(models, bases, strict=True)):
            if last is not None and t >= last[k]:
                continue
            with torch.no_grad():
                for p, value in zip(model.tensors, w, strict=True):
                    p.copy_(torch.from_numpy(value))
            optimizer.zero_grad()
            model(t).backward()
            optimizer.step()
            p = tensors.add(tensors.subtract(w, model.arrays()), residuals[k])
            q = [TopK(density)(x) for x in p]
            residuals[k] = [np.where(s != 0, 0.0, x) for x, s in zip(p, q, strict=True)]
            total = tensors.add(total, q)
        w = tensors.subtract(w, total)
        path.append(w)
    return path


@pytest.mark.parametrize(("base", "density"), [("nesterov", 0.3), ("adamw", 0.05)], ids=["dense", "lists"])
def test_negative_alpha_is_top_k_with_memory_bit_for_bit(world, base, density):
    # Few elements are added up as lists, many in a vector.
    problem = Problem(world.size, seed=6, shapes=[(), (60,), (5, 30), (4, 5, 10)])
    job = Job(world, problem, SASG(density, alpha=-1, warmup=0), BASES[base][0])
    for t, wanted in enumerate(reference(problem, 8, BASES[base][0], density)):
        job.step(t)
        same(job.w(), wanted)
    assert job.counts["uploads"] == job.calls == 8


def test_full_density_is_lasg(world):
    problem, size = Problem(world.size, seed=12), world.size
    job = Job(world, problem, SASG(density=1.0, alpha=10.0, max_delay=4, warmup=1))
    w, lengths, memory, skips = problem.start(), [], [None] * size, 0
    for t in range(10):
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
        job.step(t)
        close(job.w(), w)
        assert not any(e.any() for e in job.residuals())
    assert world.control.allreduce(job.counts.get("skips", 0)) == skips > 0


def test_float32_and_the_same_bits_in_every_run(world):
    runs = []
    for _ in range(2):
        job = Job(world, Problem(world.size, seed=1), SASG(0.2, alpha=20.0, warmup=2), dtype=torch.float32)
        for t in range(8):
            job.step(t)
            assert_same_bits(world, job.w())
        runs.append(job.w())
        assert runs[-1][1].dtype == np.float32
    same(*runs)
    wanted = SIMULATIONS["SASG"](Problem(world.size, seed=1), 8, BASES["sgd"][1], density=0.2, alpha=20.0, warmup=2)
    close(runs[0], wanted.consensus[-1], 1e-5)


# Traps


def test_zero_alpha_skips_equal_gradients(world):
    flat = FixedProblem([[0.0, 0.0]] * world.size, [[0.0, 0.0]] * world.size, [1.0, 1.0])
    job = Job(world, flat, SASG(alpha=0.0, warmup=1, max_delay=2))
    uploads = [0]
    for t in range(6):
        job.step(t)
        uploads.append(job.counts["uploads"])
    assert np.diff(uploads).tolist() == [1, 0, 0, 1, 0, 0]
    # In warm-up, and when it is late, a rank uploads without asking for a second gradient.
    assert job.calls == 6 + 4


def test_a_rate_of_zero_is_no_division_by_zero(world):
    job = Job(world, Problem(world.size), SASG(0.3, warmup=1))
    for t, rate in enumerate([0.0, 0.1, 0.0, 0.1]):
        job.step(t, lr=lambda _, rate=rate: rate)
    assert all(np.isfinite(a).all() for a in job.w())


def test_a_change_that_is_not_finite_is_news(world):
    job = Job(world, Problem(world.size), SASG(0.3, alpha=1e9, max_delay=100, warmup=1))
    job.step(0)

    def spoil(job):
        if job.calls == 3:
            job.model.tensors[1].grad[2] = float("nan")

    job.step(1, spoil)
    assert job.calls == 3
    assert job.counts["uploads"] == 2
    assert all(np.isfinite(a).all() for a in job.w())
    job.step(2)
    assert job.counts["skips"] == 1


class Noisy(torch.nn.Module):
    """Dropout, batch norm, a channels-last convolution, and noise from three generators."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.out = torch.nn.Linear(4, 2)
        self.seen = []

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.conv(x)))).mean((2, 3))
        noise = random.random() + np.random.random()
        self.seen.append((noise, torch.rand(3).tolist()))
        return (self.out(x) * noise).square().sum()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_second_evaluation_leaves_no_trace(world, set_to_none):
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    np.random.seed(world.rank)
    model = Noisy()
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), SASG(0.1, alpha=0.0, warmup=1), model=model
    )
    for t in range(4):
        x = torch.randn(5, 3, 6, 6)
        # A twin that evaluates once tells what there should be.
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(x).backward()
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        model.seen.clear()

        def closure(x=x):
            opt.zero_grad(set_to_none=set_to_none)
            loss = model(x)
            loss.backward()
            return loss

        opt.step(closure)
        assert len(model.seen) == (1 if t == 0 else 2)
        assert all(seen == twin.seen[-1] for seen in model.seen)
        for (name, mine), (_, wanted) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
            assert torch.equal(mine, wanted), name
        assert model.norm.num_batches_tracked == t + 1
        for (name, mine), (_, wanted) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert torch.equal(mine.grad, wanted.grad), name
        assert torch.equal(torch.get_rng_state(), after[0])
        assert random.getstate() == after[1]
        assert all(map(np.array_equal, np.random.get_state()[1:3], after[2][1:3]))
        assert_same_bits(world, [p.detach().numpy() for p in model.parameters()])


def test_an_unchanged_model_makes_no_news_under_dropout(world):
    """Were the masks different, the two gradients would be, and alpha = 0 would upload."""
    torch.manual_seed(world.rank)
    model = Noisy()
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), SASG(0.1, alpha=0.0, warmup=1), model=model
    )
    for _ in range(4):
        x = torch.randn(5, 3, 6, 6)

        def closure(x=x):
            opt.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        opt.step(closure)
    assert (opt.stats.counts["uploads"], opt.stats.counts["skips"]) == (1, 3)


def test_an_error_in_the_second_evaluation_is_everyones(world):
    job = Job(world, Problem(world.size), SASG(0.3, alpha=1e9, max_delay=100, warmup=1))
    job.step(0)
    before = job.everything()

    def spoil(job):
        if job.calls == 3 and world.rank == world.size - 1:
            raise RuntimeError("out of luck")

    with pytest.raises(PeerError, match=f"rank {world.size - 1}: RuntimeError: out of luck"):
        job.step(1, spoil)
    assert job.everything() == before


def test_needs_a_closure(world):
    job = Job(world, Problem(world.size), SASG())
    with pytest.raises(TypeError, match=r"SASG needs step\(closure\)"):
        job.opt.step()


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_bad_gradient_on_one_rank(world, policy):
    job = Job(world, Problem(world.size, seed=4), SASG(0.3, warmup=1), BASES["adam"][0], on_bad_gradient=policy)
    job.step(0)
    job.step(1)
    bad, before, counts = world.size - 1, job.everything(), dict(job.counts)

    def spoil(job):
        if world.rank == bad:
            job.model.tensors[2].grad[1, 2] = float("inf")

    if policy == "raise":
        with pytest.raises(HpctkError, match=f"rank {bad}: the gradient of 'tensors.2' is NaN or infinite"):
            job.step(2, spoil)
    else:
        job.step(2, spoil)
    assert job.everything() == before
    assert job.counts == counts | {"skipped_steps": 1}
    job.step(3)
    assert job.everything() != before
    assert_same_bits(world, job.w())


# What travels


def test_a_rank_that_skips_sends_its_flag_and_no_more(world):
    # Only worker 0's gradient depends on the model.
    n = 200
    scales = [np.ones(n) if k == 0 else np.zeros(n) for k in range(world.size)]
    targets = [np.linspace(1, 2, n)] * world.size
    job = Job(world, FixedProblem(scales, targets, np.zeros(n)), SASG(0.05, alpha=0.0, warmup=1), dtype=torch.float32)
    job.step(0)
    before = job.opt.stats
    job.step(1)
    sent = job.opt.stats.sent_bytes - before.sent_bytes
    others = world.size - 1
    if world.rank:
        assert sent == others
        assert job.counts["skips"] == 1
    else:
        # Flag, length, header, 10 values; indices take at most 4 bytes each.
        assert others * (1 + 8 + 8 + 40) < sent <= others * (1 + 8 + 8 + 80) or others == 0
        assert job.counts["upload_bits"] == 2 * 10 * 64
    job = Job(world, Problem(world.size), SASG(density=1.0, warmup=1))
    job.step(0)
    assert job.counts["upload_bits"] == sum(a.size for a in job.w()) * 96


# Uneven data, and checkpoints


def test_a_rank_without_data_is_not_applied_any_more(world):
    problem, base = Problem(world.size, seed=8), BASES["momentum"][0]
    last = [3 + k for k in range(world.size)]
    job = Job(world, problem, SASG(0.3, alpha=-1, warmup=0), base)
    with job.opt.join():
        for t in range(last[world.rank]):
            job.step(t)
    wanted = reference(problem, max(last), base, 0.3, last=last)[-1]
    same(job.w(), wanted)
    assert_same_bits(world, job.w())
    assert job.counts["uploads"] == last[world.rank]
    assert job.counts["uploads"] + job.counts.get("skips", 0) == max(last) == job.opt.stats.steps
    # Those who were gone come back with an upload.
    calls = job.calls
    job.step(20)
    assert job.counts["uploads"] == last[world.rank] + 1
    assert job.calls == calls + 1
    assert_same_bits(world, job.w())


def test_a_rank_that_is_gone_says_so_once(world):
    job = Job(world, Problem(world.size), SASG(0.3, alpha=1e9, max_delay=100, warmup=1))
    last = 6 if world.rank == 0 else 1
    with job.opt.join():
        for t in range(last):
            job.step(t)
    known = job.opt.local_state_dict()["messages"]
    assert set(known) == {"0"}
    assert_same_bits(world, job.w())


def test_goes_on_from_a_checkpoint_bit_for_bit(world):
    problem, base = Problem(world.size, seed=2), BASES["adam"][0]
    method = SASG(0.2, alpha=20.0, max_delay=3, warmup=2)
    whole = Job(world, problem, method, base)
    for t in range(5):
        whole.step(t)
    saved = copy.deepcopy([whole.model.state_dict(), whole.opt.state_dict(), whole.opt.local_state_dict()])
    other = Job(world, problem, method, base)
    other.model.load_state_dict(saved[0])
    other.opt.load_state_dict(saved[1])
    other.opt.load_local_state_dict(saved[2])
    for t in range(5, 10):
        whole.step(t)
        other.step(t)
    same(whole.w(), other.w())
    assert list(flat_bytes(whole.opt.local_state_dict())) == list(flat_bytes(other.opt.local_state_dict()))
    with pytest.raises(HpctkError, match="'tensors.1' is only in the model"):
        del saved[2]["snapshot"]["tensors.1"]
        other.opt.load_local_state_dict(saved[2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"density": 0},
        {"density": 1.5},
        {"alpha": float("nan")},
        {"alpha": "big"},
        {"max_delay": -1},
        {"max_delay": 2.5},
        {"terms": -1},
        {"warmup": True},
        {"warmup": None},
        {"reduce": "max"},
        {"compressor": hpctk.Sign()},
        {"compressor": hpctk.TopK(0.1, keep=True)},
        {"compressor": hpctk.ChunkTopK(min_elements=5)},
    ],
    ids=str,
)
def test_wrong_settings(wrong):
    with pytest.raises(SettingError, match=f"{next(iter(wrong))}="):
        SASG(**wrong)
