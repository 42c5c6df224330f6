"""hpctk.ddp on real ranks: DDP's own features with a method attached, mistakes, bad gradients, state, overlap."""

import copy
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from methods_driver import assert_same_bits
from torch.nn.parallel import DistributedDataParallel
from training import alone, assert_alike, loss_of, net, sgd, values

import hpctk
import hpctk.comm.world
from hpctk.collectives.engine.engine import engine_of
from hpctk.errors import HpctkError, MismatchError, PeerError, SettingError, TensorError

METHODS = {
    "Mean": hpctk.Mean,
    "Mean of TopK": lambda: hpctk.Mean(hpctk.TopK(0.3)),
    "AdaCons": lambda: hpctk.AdaCons(momentum=0.6),
    "AdaCons by layers": lambda: hpctk.AdaCons(momentum=0.6, layerwise=True),
}


@pytest.fixture(autouse=True)
def few_ranks(world):
    if world.size > 3:
        pytest.skip("nothing here depends on a fourth rank")


def wrap(model, group, method=None, *, schedule="ring", on_bad_gradient="raise", **settings):
    """Return a DDP model of many small buckets (from its second step on), and what `attach` returns."""
    settings.setdefault("bucket_cap_mb", 5e-5)
    wrapped = DistributedDataParallel(model, process_group=group, **settings)
    method = hpctk.Mean() if method is None else method
    return wrapped, hpctk.ddp.attach(wrapped, method, schedule=schedule, on_bad_gradient=on_bad_gradient)


def train(world, wrapped, base, steps, first=0, loss=loss_of):
    for t in range(first, first + steps):
        base.zero_grad()
        loss(wrapped, world.rank, t).backward()
        base.step()


def watch_buckets(attached):
    """Return a list that gets the number of buckets of every step."""
    found, take = [], attached.arrived

    def arrived(bucket):
        if bucket.is_last():
            found.append(bucket.index() + 1)
        return take(bucket)

    attached.arrived = arrived
    return found


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_mean_is_what_plain_torch_computes(world, process_group, settings):
    model = net()
    wrapped, attached = wrap(model, process_group, **settings)
    buckets = watch_buckets(attached)
    train(world, wrapped, sgd(model.parameters()), 5)
    assert_alike(model, alone(world.size, 5))
    assert_same_bits(world, values(model))
    assert max(buckets) > 1, "else nothing is shown about buckets"
    assert attached.stats.steps == attached.stats.counts["rounds"] == 5


@pytest.mark.parametrize("name", METHODS)
def test_a_hook_and_its_state_as_users_of_power_sgd_register_them(world, process_group, name, mpi_tmp_path):
    model, other = net(), net()
    wrapped, _ = wrap(other, process_group, METHODS[name]())
    train(world, wrapped, sgd(other.parameters()), 4)
    # Made before anything is wrapped, as by trainers that wrap themselves.
    state = hpctk.ddp.CommState(METHODS[name](), model, process_group, schedule="ring")
    wrapped = DistributedDataParallel(model, process_group=process_group, bucket_cap_mb=5e-5)
    wrapped.register_comm_hook(state, hpctk.ddp.comm_hook)
    train(world, wrapped, sgd(model.parameters()), 4)
    assert [bits.tolist() for bits in values(model)] == [bits.tolist() for bits in values(other)]
    assert state.attached.stats.steps == 4
    hpctk.save_checkpoint(mpi_tmp_path / "kept", state.attached, model)


def test_a_state_that_cannot_work_is_refused():
    with pytest.raises(SettingError, match="LocalSGD does not exchange gradients"):
        hpctk.ddp.CommState(hpctk.LocalSGD(), net())


class Branches(torch.nn.Module):
    """A trunk, a branch that only odd ranks run, not in every step, and one that nobody runs."""

    def __init__(self):
        super().__init__()
        self.idle, self.trunk, self.branch = net(3), net(1), net(2)

    def forward(self, rank, t):
        loss = loss_of(self.trunk, rank, t)
        return loss + loss_of(self.branch, rank, t) if rank % 2 and t != 1 else loss


@pytest.mark.parametrize("name", METHODS)
def test_gradients_that_some_ranks_or_all_lack(world, process_group, name):
    def loss(model, rank, t):
        return model(rank, t)

    model, other = Branches(), Branches()
    wrapped, attached = wrap(model, process_group, METHODS[name](), find_unused_parameters=True)
    train(world, wrapped, sgd(model.parameters()), 4, loss=loss)
    # The same over MPI, where a gradient that nobody has is left alone.
    opt = hpctk.DistributedOptimizer(sgd(other.parameters()), METHODS[name](), model=other, schedule="ring")
    train(world, other, opt, 4, loss=loss)
    assert_alike(model, other)
    assert all(parameter.grad is None for parameter in model.idle.parameters())
    if name == "Mean":
        assert_alike(model, alone(world.size, 4, model=Branches(), loss=loss))
    if name == "Mean of TopK":
        mine, theirs = attached.local_state_dict()["residuals"], opt.local_state_dict()["residuals"]
        assert not any(key.startswith("idle") for key in mine)
        assert {key: value.tolist() for key, value in mine.items()} == {
            key: value.tolist() for key, value in theirs.items()
        }


@pytest.mark.parametrize("name", METHODS)
def test_accumulation_under_no_sync(world, process_group, name):
    model, other = net(), net()
    wrapped, _ = wrap(model, process_group, METHODS[name]())
    base = sgd(model.parameters())
    opt = hpctk.DistributedOptimizer(sgd(other.parameters()), METHODS[name](), model=other, schedule="ring")
    for t in range(0, 6, 2):
        base.zero_grad()
        opt.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, world.rank, t).backward()
        loss_of(wrapped, world.rank, t + 1).backward()
        for part in (t, t + 1):
            loss_of(other, world.rank, part).backward()
        base.step()
        opt.step()
    assert_alike(model, other)


def cycled(model, steps):
    """Return AdamW whose rate and betas go through one cycle, and the scheduler."""
    base = torch.optim.AdamW(model.parameters(), lr=0.02)
    return base, torch.optim.lr_scheduler.OneCycleLR(base, max_lr=0.02, total_steps=steps)


@pytest.mark.parametrize("dense_steps", [0, 3], ids=["from the start", "after a dense start"])
def test_top_k_under_adamw_a_cycle_and_clipping(world, process_group, dense_steps):
    """Error feedback as plain torch does it for all ranks in this process; a dense start by wrapping the model anew."""
    steps, model, other = 10, net(), net()
    base, scheduler = cycled(model, steps)
    wrapped = DistributedDataParallel(model, process_group=process_group)
    for t in range(steps):
        if t == dense_steps:
            wrapped, _ = wrap(model, process_group, hpctk.Mean(hpctk.TopK(0.3)))
        base.zero_grad()
        loss_of(wrapped, world.rank, t).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        base.step()
        scheduler.step()

    base, scheduler = cycled(other, steps)
    residuals = [[torch.zeros_like(p) for p in other.parameters()] for _ in range(world.size)]
    for t in range(steps):
        sums = [torch.zeros_like(p) for p in other.parameters()]
        for rank, kept in enumerate(residuals):
            other.zero_grad()
            loss_of(other, rank, t).backward()
            for total, residual, p in zip(sums, kept, other.parameters(), strict=True):
                residual += p.grad
                k = residual.numel() if t < dense_steps else max(1, int(0.3 * residual.numel()))
                chosen = residual.abs().flatten().topk(k).indices
                total.view(-1)[chosen] += residual.view(-1)[chosen]
                residual.view(-1)[chosen] = 0
        for total, p in zip(sums, other.parameters(), strict=True):
            p.grad = total / world.size
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        base.step()
        scheduler.step()
    assert_alike(model, other)


@pytest.mark.parametrize("name", ["Mean", "Mean of TopK"])
def test_channels_last(world, process_group, name):
    def make():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2)
            return torch.nn.Sequential(*layers).double().to(memory_format=torch.channels_last)

    def loss(model, rank, t):
        generator = torch.Generator().manual_seed(100 * rank + t)
        return model(torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)).square().mean()

    model, other = make(), make()
    assert not model[0].weight.is_contiguous()
    wrapped, attached = wrap(model, process_group, METHODS[name]())
    train(world, wrapped, sgd(model.parameters()), 4, loss=loss)
    opt = hpctk.DistributedOptimizer(sgd(other.parameters()), METHODS[name](), model=other)
    train(world, other, opt, 4, loss=loss)
    assert_alike(model, other, 1e-14)
    residuals = opt.local_state_dict()["residuals"]
    for key, mine in attached.local_state_dict()["residuals"].items():
        np.testing.assert_allclose(mine.numpy(), residuals[key].numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("how", ["raise", "skip"])
@pytest.mark.parametrize("name", METHODS)
def test_a_bad_gradient_leaves_nothing_behind(world, process_group, name, how):
    """Step 2 is bad on one rank: training is as if it had never been."""
    culprit, model, other = world.size - 1, net(), net()
    wrapped, attached = wrap(model, process_group, METHODS[name](), on_bad_gradient=how)
    base = sgd(model.parameters())
    for t in (0, 1, 2, 3):
        base.zero_grad()
        loss = loss_of(wrapped, world.rank, t)
        if t != 2:
            loss.backward()
        elif how == "skip":
            (loss * (np.inf if world.rank == culprit else 1)).backward()
        else:
            with pytest.raises(HpctkError, match=f"rank {culprit}: the gradient of '0.weight' is NaN or infinite"):
                (loss * (np.nan if world.rank == culprit else 1)).backward()
        if t == 2 and how == "raise":
            assert all(parameter.grad is None for parameter in model.parameters())
        elif t == 2:
            # As DDP itself leaves it, for a GradScaler to find on every rank.
            assert model[0].weight.grad.isinf().all()
        base.step()
    clean, untouched = wrap(other, process_group, METHODS[name]())
    base = sgd(other.parameters())
    train(world, clean, base, 2)
    train(world, clean, base, 1, first=3)
    assert_alike(model, other, 0)
    mine, theirs = attached.local_state_dict(), untouched.local_state_dict()
    assert str(mine) == str(theirs)
    assert attached.stats.counts["skipped_steps"] == 1
    assert attached.stats.counts["rounds"] == 3


@pytest.mark.parametrize("name", METHODS)
def test_state_goes_from_ddp_to_ddp(world, process_group, name):
    straight = net()
    wrapped, _ = wrap(straight, process_group, METHODS[name]())
    train(world, wrapped, sgd(straight.parameters()), 6)

    first = net()
    wrapped, attached = wrap(first, process_group, METHODS[name]())
    base = sgd(first.parameters())
    train(world, wrapped, base, 3)
    state = copy.deepcopy((first.state_dict(), base.state_dict(), attached.local_state_dict()))

    second = net(seed=9)
    second.load_state_dict(state[0])
    wrapped, attached = wrap(second, process_group, METHODS[name]())
    base = sgd(second.parameters())
    base.load_state_dict(state[1])
    attached.load_local_state_dict(state[2])
    train(world, wrapped, base, 3, first=3)
    # The first step of a DDP model has other buckets than the rest, so by rounding only.
    assert_alike(second, straight, 1e-14)


def test_state_goes_from_a_distributed_optimizer_to_ddp(world, process_group):
    method = METHODS["Mean of TopK"]
    straight, model = net(), net()
    opt = hpctk.DistributedOptimizer(sgd(straight.parameters()), method(), model=straight, schedule="ring")
    train(world, straight, opt, 6)
    opt = hpctk.DistributedOptimizer(sgd(model.parameters()), method(), model=model, schedule="ring")
    train(world, model, opt, 3)
    base = sgd(model.parameters())
    base.load_state_dict(opt.state_dict())
    wrapped, attached = wrap(model, process_group, method())
    attached.load_local_state_dict(copy.deepcopy(opt.local_state_dict()))
    train(world, wrapped, base, 3, first=3)
    assert_alike(model, straight, 0)


def test_ranks_that_run_out_of_data_under_ddps_join(world, process_group):
    model = net()
    wrapped, _ = wrap(model, process_group)
    base = sgd(model.parameters())
    with wrapped.join():
        train(world, wrapped, base, 2 + world.rank)

    def loss(model, rank, t):
        return loss_of(model, rank, t) if t < 2 + rank else 0 * loss_of(model, rank, t)

    # DDP gives the model of a rank that was last to all.
    assert_alike(model, alone(world.size, 2 + world.size - 1, loss=loss))


class Gate(torch.autograd.Function):
    """Lets nothing pass backward before `opened()`."""

    @staticmethod
    def forward(ctx, x, opened):
        ctx.opened = opened
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.opened()
        return gradient, None


class Noted:
    """A recorder that keeps calls."""

    traffic, flags = None, False

    def __init__(self):
        self.calls = []

    def record(self, call):
        self.calls.append(call)


@pytest.mark.parametrize("name", ["Mean", "AdaCons", "AdaCons by layers"])
def test_the_first_bucket_is_exchanged_while_backward_goes_on(world, process_group, name):
    """Backward stops half-way until the first bucket has come home: without a thread that drives it, for ever."""
    if world.size == 1:
        pytest.skip("one rank exchanges nothing")
    noted, times, gated = Noted(), {}, []

    def opened():
        deadline = time.monotonic() + 10
        while gated and not noted.calls and time.monotonic() < deadline:
            time.sleep(1e-3)
        times["reached the first layer"] = time.perf_counter()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.back = torch.nn.Linear(50, 50), torch.nn.Linear(50, 5000, bias=False)

        def forward(self, x):
            return self.back(Gate.apply(self.front(x), opened))

    model = Model()
    wrapped, _ = wrap(model, process_group, METHODS[name](), bucket_cap_mb=0.01)
    recorders = engine_of(hpctk.comm.world.world(process_group)).recorders
    recorders.append(noted)
    try:
        for step in range(2):
            # DDP lays out its buckets in the order of the first step.
            gated[:] = [True] if step else []
            noted.calls.clear()
            wrapped(torch.randn(4, 50)).sum().backward()
            ended = time.perf_counter()
    finally:
        recorders.remove(noted)
    first = noted.calls[0]
    assert first.elements == 50 * 5000
    assert first.began_s + first.seconds <= times["reached the first layer"] < ended
    assert noted.calls[-1].began_s > times["reached the first layer"]


def test_no_thread_is_left_behind(world, process_group):
    wrapped, _ = wrap(net(), process_group)
    for t in range(3):
        loss_of(wrapped, world.rank, t).backward()
    assert not any(thread.name == "hpctk driver" for thread in threading.enumerate())


@pytest.mark.parametrize("method", [hpctk.LocalSGD(), hpctk.SAEF(hpctk.TopK(0.1)), hpctk.SASG()], ids=str)
def test_methods_that_do_not_exchange_gradients_are_told_where_to_go(process_group, method):
    with pytest.raises(SettingError, match="hpctk.ddp.DistributedOptimizer"):
        wrap(net(), process_group, method)


def test_what_attach_refuses(process_group):
    with pytest.raises(SettingError, match="DistributedDataParallel, not Sequential"):
        hpctk.ddp.attach(net(), hpctk.Mean())
    with pytest.raises(SettingError, match=r"clip=0.1.*clip_grad_norm_"):
        wrap(net(), process_group, hpctk.Mean(clip=0.1))
    with pytest.raises(SettingError, match="schedule='mpi': known are .*torch on a process group"):
        wrap(net(), process_group, schedule="mpi")
    with pytest.raises(SettingError, match="on_bad_gradient='ignore'"):
        wrap(net(), process_group, on_bad_gradient="ignore")
    with pytest.raises(TensorError, match="parameters of bfloat16, float64"):
        wrap(torch.nn.ModuleList([net(), net(dtype=torch.bfloat16)]), process_group)
    wrapped, _ = wrap(net(), process_group)
    with pytest.raises(SettingError, match="has a communication hook already"):
        hpctk.ddp.attach(wrapped, hpctk.Mean())


def test_ranks_that_attach_different_methods(world, process_group):
    if world.size == 1:
        pytest.skip("one rank cannot disagree")
    with pytest.raises(MismatchError, match="hpctk.ddp.attach: rank .* momentum|method"):
        wrap(net(), process_group, hpctk.Mean() if world.rank else hpctk.AdaCons())


def test_a_wrapped_model_is_refused_by_the_optimizer(process_group):
    model = net()
    wrapped = DistributedDataParallel(model, process_group=process_group)
    with pytest.raises(SettingError, match="averages all gradients in full.*hpctk.ddp.attach"):
        hpctk.ddp.DistributedOptimizer(sgd(model.parameters()), hpctk.LocalSGD(), model=wrapped)


def test_a_group_of_some_ranks(world, process_group):
    if world.size < 3:
        pytest.skip("needs a group of two that is not all ranks")
    group = dist.new_group(range(1, world.size))
    if world.rank == 0:
        with pytest.raises(SettingError, match="no member"):
            hpctk.ddp.DistributedOptimizer(sgd(net().parameters()), hpctk.Mean(), model=net(), group=group)
        return
    model = net()
    opt = hpctk.ddp.DistributedOptimizer(sgd(model.parameters()), hpctk.Mean(), model=model, group=group)
    assert (opt.world.rank, opt.world.size) == (world.rank - 1, world.size - 1)
    train(opt.world, model, opt, 3)
    assert_alike(model, alone(world.size - 1, 3))


def test_one_world_per_group(process_group):
    assert hpctk.comm.world.world(process_group) is hpctk.comm.world.world(dist.group.WORLD)


def test_the_world_of_a_group_is_like_that_of_mpi(world, process_group):
    here = hpctk.comm.world.world(process_group)
    assert (here.rank, here.size, here.nodes) == (world.rank, world.size, world.nodes)
    assert (here.local_rank, here.local_size) == (world.local_rank, world.local_size)
    assert here.minimum([here.rank, -here.rank], "ends") == [0, 1 - here.size]
    assert here.gather_texts("x" * here.rank, "texts") == ["x" * rank for rank in range(here.size)]
    with pytest.raises(PeerError, match=f"failing failed on rank {here.size - 1}: KeyError"):
        here.run_on_root("failing", lambda: {}["no"], root=here.size - 1)


@pytest.mark.parametrize("schedule", ["auto", "torch", "ring"])
def test_allreduce_on_a_group(world, process_group, schedule):
    for dtype in (torch.float32, torch.float16, torch.int16, torch.int64, torch.complex64):
        for n in (0, 5, 20_000):
            arrays = [np.random.default_rng([7, rank]).integers(-9, 9, n) for rank in range(world.size)]
            mine = torch.from_numpy(arrays[world.rank]).to(dtype)
            got = hpctk.allreduce(mine, op="sum", schedule=schedule, comm=process_group)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.to(torch.complex128).numpy(), sum(arrays))


def test_handles_may_be_waited_for_in_any_order(world, process_group):
    """Rank 0 waits for the first, the others for the last; and for an agreement with handles under way."""
    rows = [torch.full((70_000,), float(rank)) for rank in range(world.size)]
    handles = [
        hpctk.ops.iallreduce(rows[world.rank] + i, op="sum", schedule="ring", comm=process_group) for i in range(5)
    ]
    here, order = hpctk.comm.world.world(process_group), range(5) if world.rank == 0 else range(4, -1, -1)
    if world.rank == 0:
        here.barrier("in the middle")
    results = {i: handles[i].wait() for i in order}
    if world.rank != 0:
        here.barrier("in the middle")
    for i, result in results.items():
        assert torch.equal(result, sum(row + i for row in rows))


def test_asynchronous_grawa_takes_its_tickets_from_the_store(world, process_group):
    model = net()
    method = hpctk.MGRAWA(period=2, asynchronous=True)
    opt = hpctk.ddp.DistributedOptimizer(sgd(model.parameters()), method, model=model, group=process_group)
    with opt.join():
        for t in range(6 if world.rank else 8):
            opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            opt.step()
    assert opt.stats.counts["tickets"] == (6 if world.rank else 8)
    rounds = opt.world.gather_texts(str(opt.stats.counts["rounds"]), "rounds")
    assert len(set(rounds)) == 1
    assert int(rounds[0]) >= 2


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_keeps_what_ddp_would_lose(world, process_group, mpi_tmp_path, name):
    """Residuals and momenta of each rank, with the user's own optimizer as an extra: bit for bit."""
    ends = []
    for interrupted in (False, True):
        model = net()
        wrapped, attached = wrap(model, process_group, METHODS[name]())
        base = sgd(wrapped.parameters())
        train(world, wrapped, base, 4)
        if interrupted:
            hpctk.save_checkpoint(mpi_tmp_path / "kept", attached, model, optimizer=base)
            model = net(seed=5)
            wrapped, attached = wrap(model, process_group, METHODS[name]())
            base = sgd(wrapped.parameters())
            extra = hpctk.load_checkpoint(mpi_tmp_path / "kept", attached, model)
            base.load_state_dict(extra["optimizer"])
        train(world, wrapped, base, 3, first=4)
        ends.append(values(model))
        assert attached.stats.steps == 7
        world.barrier()
    for straight, resumed in zip(*ends, strict=True):
        np.testing.assert_allclose(resumed, straight, rtol=0, atol=1e-14)


def test_a_checkpoint_over_torch_distributed(world, process_group, mpi_tmp_path):
    ends = []
    for interrupted in (False, True):
        model = net()
        opt = hpctk.ddp.DistributedOptimizer(sgd(model.parameters()), hpctk.SAEF(hpctk.TopK(0.3)), model=model)
        train(world, model, opt, 4)
        if interrupted:
            hpctk.save_checkpoint(mpi_tmp_path / "kept", opt, model)
            model = net(seed=5)
            opt = hpctk.ddp.DistributedOptimizer(sgd(model.parameters()), hpctk.SAEF(hpctk.TopK(0.3)), model=model)
            hpctk.load_checkpoint(mpi_tmp_path / "kept", opt, model)
        train(world, model, opt, 3, first=4)
        ends.append(b"".join(value.tobytes() for value in values(model)))
        world.barrier()
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", METHODS)
def test_statistics(world, process_group, mpi_tmp_path, name):
    """The file says what the counter says; buckets have names."""
    model = net()
    wrapped = DistributedDataParallel(model, process_group=process_group, bucket_cap_mb=5e-5)
    attached = hpctk.ddp.attach(wrapped, METHODS[name](), schedule="ring", stats=mpi_tmp_path / "run")
    base = sgd(model.parameters())
    for t in range(4):
        base.zero_grad()
        loss = loss_of(wrapped, world.rank, t)
        attached.note_loss(loss)
        loss.backward()
        base.step()
    attached.close_stats()
    (recording,) = hpctk.stats.load(mpi_tmp_path / "run").recordings
    calls, steps = (recording.ranks[world.rank].table(table) for table in ("calls", "steps"))
    known = calls["sent_bytes"] >= 0
    assert calls["sent_bytes"][known].sum() == attached.stats.sent_bytes == steps["sent_bytes"].sum()
    assert steps["step"].tolist() == [0, 1, 2, 3]
    assert steps["rounds"].tolist() == [1] * 4
    assert (steps["loss"] > 0).all()
    labels = set(calls["tensor"][(calls["dense_bytes"] > 0) & (calls["step"] > 0)])
    if name == "Mean":
        assert labels >= {b"bucket 0", b"bucket 1"}
    assert recording.ranks[world.rank].attributes["library"].startswith("torch.distributed")


def test_a_dropped_step_inside_a_closure_changes_nothing(world, process_group):
    model = net()
    wrapped, attached = wrap(model, process_group, on_bad_gradient="skip")
    base = sgd(model.parameters())

    def closure(t):
        base.zero_grad()
        loss = loss_of(wrapped, world.rank, t) * (np.inf if t == 1 and world.rank == 0 else 1)
        loss.backward()
        return loss

    base.step(lambda: closure(0))
    before = values(model)
    base.step(lambda: closure(1))
    assert all((a == b).all() for a, b in zip(before, values(model), strict=True))
    base.step(lambda: closure(2))
    assert attached.stats.counts["skipped_steps"] == 1
    assert not any((a == b).all() for a, b in zip(before, values(model), strict=True))


def test_another_optimizer_is_not_touched_by_a_dropped_step(world, process_group):
    model, other = net(), net()
    wrapped, _ = wrap(model, process_group, on_bad_gradient="skip")
    base = sgd(other.parameters())
    (loss_of(wrapped, world.rank, 0) * (np.inf if world.rank == 0 else 1)).backward()
    loss_of(other, world.rank, 0).backward()
    before = values(other)
    base.step()
    assert not any((a == b).all() for a, b in zip(before, values(other), strict=True))


def test_a_step_is_dropped_wherever_an_optimizer_has_the_parameters(world, process_group):
    """One optimizer for two models: those of the other come first in its group, and are stepped."""
    model, other = net(), net(seed=1)
    wrapped, _ = wrap(model, process_group, on_bad_gradient="skip")
    base = sgd([*other.parameters(), *model.parameters()])
    (loss_of(wrapped, world.rank, 0) * (np.inf if world.rank == 0 else 1)).backward()
    loss_of(other, world.rank, 0).backward()
    before = values(model), values(other)
    base.step()
    assert all((a == b).all() for a, b in zip(before[0], values(model), strict=True))
    assert not any((a == b).all() for a, b in zip(before[1], values(other), strict=True))


def test_two_models_in_different_orders(world, process_group):
    """Each on its own would be right; the buckets of one must not be taken for those of the other."""
    if world.size == 1:
        pytest.skip("needs another rank")
    pair = [wrap(net(seed), process_group)[0] for seed in (0, 1)]
    first = pair[0 if world.rank == 0 else 1]
    with pytest.raises(MismatchError, match=r"the optimizer is number \d+ on rank 0 and number \d+ on rank 1"):
        loss_of(first, world.rank, 0).backward()
