"""overlap=True: the same results as without, and mistakes that are noticed."""

import gc
import weakref

import pytest
import torch
from methods_driver import assert_same_bits
from threshold import Threshold
from training import alone, assert_alike, loss_of, net, sgd, values, wrapped

import hpctk
from hpctk.errors import HpctkError

METHODS = {
    "Mean": hpctk.Mean,
    "Mean clipped": lambda: hpctk.Mean(clip=0.02),
    "AdaCons": lambda: hpctk.AdaCons(momentum=0.6),
    "AdaCons by layers": lambda: hpctk.AdaCons(momentum=0.6, layerwise=True),
    "Mean of TopK": lambda: hpctk.Mean(hpctk.TopK(0.1)),
    "Mean of QSGD": lambda: hpctk.Mean(hpctk.QSGD(4)),
    # These cannot go by buckets, and wait for step().
    "Mean of PowerSGD": lambda: hpctk.Mean(hpctk.PowerSGD(1)),
    "Mean of unit norm": lambda: hpctk.Mean(unit_norm=True),
}
BUCKETS = ["Mean", "AdaCons", "Mean of TopK", "Mean of QSGD"]
#: Whose results are the same to the bit, with the schedule by which they are: of sums in an order that does not depend
#: on an element's place.
COMPRESSORS = {
    "identity": (hpctk.Identity, "recursive_doubling"),
    "half": (hpctk.Half, "recursive_doubling"),
    "randomk": (lambda: hpctk.RandomK(0.4), "recursive_doubling"),
    "qsgd": (lambda: hpctk.QSGD(4), "auto"),
    "sign": (hpctk.Sign, "auto"),
    "topk": (lambda: hpctk.TopK(0.1), "auto"),
    "topk of half": (lambda: hpctk.TopK(0.5), "auto"),
    "topk of all": (lambda: hpctk.TopK(1.0), "recursive_doubling"),
    "topk and keep": (lambda: hpctk.TopK(0.3, keep=True), "auto"),
    "topk but biases": (lambda: hpctk.TopK(0.3, exclude=["*bias"]), "recursive_doubling"),
    "threshold": (lambda: Threshold(0.05), "auto"),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Let every tensor of 32 bytes or more fill a bucket: the network has three."""
    monkeypatch.setattr("hpctk.ways_in.overlap.BUCKET_BYTES", 32)


class Branches(torch.nn.Module):
    """A trunk, a branch that only odd ranks run, not in every step, and one that nobody runs."""

    def __init__(self):
        super().__init__()
        self.idle, self.trunk, self.branch = net(3), net(1), net(2)


def branched_loss(model, rank, t):
    loss = loss_of(model.trunk, rank, t)
    return loss + loss_of(model.branch, rank, t) if rank % 2 and t != 1 else loss


def run(world, overlap, method, steps=4, *, model=None, loss=loss_of, step=None, **settings):
    """Train, with `step(opt, model, t)` after every backward instead of opt.step() where given."""
    model = net() if model is None else model
    opt = wrapped(model, method, overlap=overlap, **settings)
    for t in range(steps):
        opt.zero_grad()
        loss(model, world.rank, t).backward()
        opt.step() if step is None else step(opt, model, t)
    return model, opt


@pytest.mark.parametrize("name", METHODS)
def test_the_same_with_and_without(world, name):
    model, opt = run(world, True, METHODS[name]())
    plain, other = run(world, False, METHODS[name]())
    assert_alike(model, plain)
    assert_same_bits(world, values(model))
    assert opt.stats.counts == other.stats.counts
    assert opt.stats.steps == other.stats.steps == 4


def kept(opt):
    """The bits of all that a rank keeps for later: residuals, and the number of draws."""
    state = opt.local_state_dict()
    residuals = {name: residual.numpy().tobytes() for name, residual in state["residuals"].items()}
    return residuals, state["compressor"]


def assert_same(results):
    """Models and what was kept are the same to the bit."""
    (model, opt), (plain, other) = results
    for i, (got, wanted) in enumerate(zip(values(model), values(plain), strict=True)):
        assert got.tobytes() == wanted.tobytes(), f"tensor {i}: {got} {wanted}"
    assert kept(opt) == kept(other)
    assert opt.stats.counts == other.stats.counts


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "without"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_to_the_bit(world, name, dtype, feedback):
    make, schedule = COMPRESSORS[name]
    method = hpctk.Mean(make(), error_feedback=feedback)
    assert_same([run(world, o, method, 5, model=net(0, dtype), schedule=schedule) for o in (True, False)])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_where_gradients_are_missing(world, name):
    make, schedule = COMPRESSORS[name]
    results = [
        run(world, o, hpctk.Mean(make()), 5, model=Branches(), loss=branched_loss, schedule=schedule)
        for o in (True, False)
    ]
    assert_same(results)
    assert not any("idle" in residual for residual in kept(results[0][1])[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_bad_gradient_after_buckets_that_have_left(world, name, bad):
    """The first layers' gradients come last: those of the last layer are under way when one of them is bad."""
    make, schedule = COMPRESSORS[name]

    def spoiled(model, rank, t):
        loss = loss_of(model, rank, t)
        return loss + bad * model[0].weight[0, 0] if t == 2 and rank == world.size - 1 else loss

    method = hpctk.Mean(make())
    settings = {"schedule": schedule, "on_bad_gradient": "skip"}
    results = [run(world, o, method, 5, loss=spoiled, **settings) for o in (True, False)]
    assert_same(results)
    assert results[0][1].stats.counts["skipped_steps"] == 1
    with pytest.raises(HpctkError, match="NaN or infinite"):
        run(world, True, method, 3, loss=spoiled, schedule=schedule)
    works(world)


def test_a_sum_that_overflows_in_a_bucket(world):
    """One rank's gradient and residual are finite, their sum is not: all ranks raise, and keep what they had."""
    largest = torch.finfo(torch.float64).max

    def huge(model, rank, t):
        loss = loss_of(model, rank, t)
        return loss + 0.6 * largest * model[2].weight[1, 2] if rank == 0 else loss

    model = net()
    opt = wrapped(model, hpctk.Mean(Threshold(largest)), overlap=True)
    huge(model, world.rank, 0).backward()
    opt.step()
    before = kept(opt)
    opt.zero_grad()
    huge(model, world.rank, 0).backward()
    with pytest.raises(HpctkError, match=r"2\.weight.*or the sum with its residual"):
        opt.step()
    assert kept(opt) == before
    works(world)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_that_some_ranks_or_all_lack(world, name):
    model, opt = run(world, True, METHODS[name](), model=Branches(), loss=branched_loss)
    plain, other = run(world, False, METHODS[name](), model=Branches(), loss=branched_loss)
    assert_alike(model, plain)
    assert_alike(model.idle, net(3), 0)
    assert all(parameter.grad is None for parameter in model.idle.parameters())
    assert opt.stats.counts == other.stats.counts
    if name == "Mean":
        assert_alike(model, alone(world.size, 4, model=Branches(), loss=branched_loss))


@pytest.mark.parametrize("name", BUCKETS)
def test_a_step_without_any_gradient(world, name):
    model = net()
    opt, twin = wrapped(model, METHODS[name](), overlap=True), run(world, False, METHODS[name](), 2)[0]
    opt.step()
    assert_alike(model, net(), 0)
    for t in range(2):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()
    assert_alike(model, twin)
    assert opt.stats.counts["rounds"] == 2


@pytest.mark.parametrize("schedule", ["ring", "mpi"], ids="by {}".format)
@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_leave_during_backward(world, name, schedule):
    model = net()
    opt = wrapped(model, METHODS[name](), overlap=True, schedule=schedule)
    loss_of(model, world.rank, 0).backward()
    assert len(opt._overlap._buckets) == 3
    assert len(opt._overlap._buckets) == 3
    opt.step()
    assert_alike(model, run(world, False, METHODS[name](), 1)[0])


def test_more_buckets_than_the_engine_has_lanes(world):
    def deep():
        return torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False).double() for _ in range(20)), net(1))

    torch.manual_seed(0)
    model = deep()
    twin = deep()
    twin.load_state_dict(model.state_dict())
    run(world, True, hpctk.Mean(), 3, model=model)
    run(world, False, hpctk.Mean(), 3, model=twin)
    assert_alike(model, twin)


@pytest.mark.parametrize("last_too", [False, True], ids=["but the last", "all"])
@pytest.mark.parametrize("name", BUCKETS)
def test_accumulation_under_no_sync(world, name, last_too):
    model = net()
    opt = wrapped(model, METHODS[name](), overlap=True)
    for t in range(3):
        opt.zero_grad()
        with opt.no_sync():
            loss_of(model, world.rank, 3 * t).backward()
            with opt.no_sync():
                loss_of(model, world.rank, 3 * t + 1).backward()
            if last_too:
                loss_of(model, world.rank, 3 * t + 2).backward()
        if not last_too:
            loss_of(model, world.rank, 3 * t + 2).backward()
        opt.step()

    def three(one, rank, t):
        return sum(loss_of(one, rank, 3 * t + i) for i in range(3))

    assert_alike(model, run(world, False, METHODS[name](), 3, loss=three)[0])


def test_no_sync_without_overlap_does_no_harm(world):
    model = net()
    opt = wrapped(model)
    with opt.no_sync():
        loss_of(model, world.rank, 0).backward()
    opt.step()
    assert_alike(model, alone(world.size, 1))


def clipped(opt, model, t):
    opt.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    opt.step()


@pytest.mark.parametrize("name", METHODS)
def test_clipped_after_synchronize(world, name):
    model, _ = run(world, True, METHODS[name](), step=clipped)
    assert_alike(model, run(world, False, METHODS[name](), step=clipped)[0])


@pytest.mark.parametrize("name", BUCKETS)
def test_a_synchronized_step_may_be_dropped(world, name):
    def step(opt, model, t):
        opt.synchronize()
        if t != 1:
            opt.step()

    model, opt = run(world, True, METHODS[name](), step=step)
    assert_alike(model, run(world, False, METHODS[name](), step=step)[0])
    assert opt.stats.steps == 3


def test_backward_after_synchronize_is_exchanged_too(world):
    model = net()
    opt = wrapped(model, overlap=True)
    loss_of(model, world.rank, 0).backward()
    opt.synchronize()
    loss_of(model, world.rank, 1).backward()
    opt.step()

    def both(one, rank, t):
        return loss_of(one, rank, 0) + loss_of(one, rank, 1)

    assert_alike(model, alone(world.size, 1, loss=both))


@pytest.mark.parametrize("name", BUCKETS)
def test_closure(world, name):
    """The backward is inside the step: what it sends is counted once."""
    model = net()
    opt = wrapped(model, METHODS[name](), overlap=True, schedule="ring")
    for t in range(3):

        def closure(t=t):
            opt.zero_grad()
            loss = loss_of(model, world.rank, t)
            loss.backward()
            return loss

        assert torch.is_tensor(opt.step(closure))
    plain, other = run(world, True, METHODS[name](), 3, schedule="ring")
    assert_alike(model, plain, 0)
    assert opt.stats.sent_bytes == other.stats.sent_bytes
    assert opt.stats.messages == other.stats.messages
    assert opt.stats.sent_bytes > 0 or world.size == 1


def works(world):
    """A new optimizer on a new model is not disturbed by what was left under way."""
    model, _ = run(world, True, hpctk.Mean(), 2)
    assert_alike(model, alone(world.size, 2))


def test_a_second_backward_without_no_sync(world):
    model = net()
    opt = wrapped(model, overlap=True)
    loss_of(model, world.rank, 0).backward()
    assert opt.stats.steps == 0
    with pytest.raises(HpctkError, match=r"accumulated after its exchange had begun.*opt\.no_sync\(\)"):
        loss_of(model, world.rank, 1).backward()
    works(world)


@pytest.mark.parametrize("how", ["clipped", "accumulated", "replaced", "removed"])
def test_gradients_changed_between_backward_and_step(world, how):
    model = net()
    opt = wrapped(model, overlap=True)
    loss_of(model, world.rank, 0).backward()
    if how == "clipped":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "accumulated":
        with opt.no_sync():
            loss_of(model, world.rank, 1).backward()
    elif how == "replaced":
        model[0].weight.grad = model[0].weight.grad * 2
    else:
        model.zero_grad()
    with pytest.raises(HpctkError, match=r"was changed after its exchange had begun.*opt\.synchronize\(\)"):
        opt.step()
    works(world)


def test_zero_grad_between_backward_and_step(world):
    model = net()
    opt = wrapped(model, overlap=True)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(HpctkError, match=r"zero_grad\(\) between backward and step.*opt\.synchronize\(\)"):
        opt.zero_grad()
    # What the message says to do:
    opt.synchronize()
    opt.zero_grad()
    loss_of(model, world.rank, 1).backward()
    opt.step()
    assert_alike(model, alone(world.size, 1, first=1))


@pytest.mark.parametrize("name", METHODS)
def test_join(world, name):
    """Rank r has 2 + r batches."""
    results = []
    for overlap in (True, False):
        model = net()
        opt = wrapped(model, METHODS[name](), overlap=overlap)
        with opt.join():
            for t in range(2 + world.rank):
                opt.zero_grad()
                loss_of(model, world.rank, t).backward()
                opt.step()
        assert opt.stats.steps == 1 + world.size
        assert_same_bits(world, values(model))
        results.append(model)
    assert_alike(*results)


@pytest.mark.parametrize("again", [True, False], ids=["overlapping again", "at once then"])
def test_an_optimizer_made_anew_takes_over(world, again):
    """The hooks of the one before must not send anything any more, whether it is still there or not."""
    model = net()
    base = sgd(model.parameters())
    first = wrapped(model, base=base, overlap=True)
    loss_of(model, world.rank, 0).backward()
    first.step()
    second = wrapped(model, hpctk.Mean(), base=base, overlap=again)
    sent = first.stats.sent_bytes
    for t in (1, 2):
        second.zero_grad()
        loss_of(model, world.rank, t).backward()
        second.step()
    assert_alike(model, alone(world.size, 3))
    assert first.stats.sent_bytes == sent


@pytest.mark.parametrize("name", BUCKETS)
@pytest.mark.parametrize("both", [True, False], ids=["both overlap", "one overlaps"])
def test_two_optimizers_on_halves_of_a_model(world, name, both):
    def train(overlap):
        model = net()
        opts = [
            wrapped(model, METHODS[name](), sgd(model[i].parameters()), overlap=overlap and (both or i == 2))
            for i in (0, 2)
        ]
        for t in range(3):
            for opt in opts:
                opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            for opt in opts:
                opt.step()
        return model

    assert_alike(train(True), train(False))


def test_what_two_optimizers_send_is_counted_for_each(world):
    """Buckets of one may come home while the other lets the engine make progress."""

    def sent(numbers):
        model = net()
        opts = [wrapped(model, base=sgd(model[i].parameters()), overlap=True, schedule="ring") for i in numbers]
        for t in range(5):
            for opt in opts:
                opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            for opt in opts:
                opt.step()
        return [opt.stats.sent_bytes for opt in opts]

    assert sent([0, 2]) == sent([0]) + sent([2])


def test_hooks_do_not_keep_a_model_alive(world):
    model, opt = run(world, True, hpctk.Mean(), 1)
    gone = weakref.ref(model[0].weight)
    del model, opt
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("last", [0, 1])
def test_buckets_and_other_collectives_in_different_orders(world, last):
    """A bucket starts in backward on one rank and in step() on another; meanwhile others start theirs."""

    def train(overlap):
        model = net()
        opts = [wrapped(model, base=sgd(model[i].parameters()), overlap=overlap) for i in (0, 2)]
        for t in range(3):
            for opt in opts:
                opt.zero_grad()
            loss = loss_of(model, world.rank, t)
            loss.backward()
            if world.rank == 0 and not overlap:
                model[2].bias.grad = None
            sums = hpctk.allreduce(torch.ones(3), op="sum")
            assert torch.equal(sums, torch.full((3,), float(world.size)))
            for i in (last, 1 - last):
                opts[i].step()
        return model

    if world.rank == 0:
        # Rank 0 has no gradient of this one: its bucket starts in step().
        original = loss_of

        def without_bias(model, rank, t):
            model[2].bias.requires_grad_(False)
            try:
                return original(model, rank, t)
            finally:
                model[2].bias.requires_grad_(True)

        globals()["loss_of"] = without_bias
    try:
        assert_alike(train(True), train(False))
    finally:
        if world.rank == 0:
            globals()["loss_of"] = original


@pytest.mark.parametrize("method", [hpctk.Mean(), hpctk.Mean(hpctk.TopK(0.5)), hpctk.AdaCons()], ids=repr)
def test_buckets_that_leave_at_step_are_divided_by_the_scale_once(world, method):
    """The bucket of a parameter that rank 0 has not used never fills in its backward, nor do those after it leave."""

    def train(overlap):
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        opt = hpctk.DistributedOptimizer(
            sgd(model.parameters()), method, model=model, overlap=overlap, grad_scaler=scaler
        )
        for t in range(3):
            opt.zero_grad()
            model[2].bias.requires_grad_(world.rank != 0)
            loss = loss_of(model, world.rank, t)
            model[2].bias.requires_grad_(True)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        return model

    assert_alike(train(True), train(False))
