"""Compression.attach: the method acts once in every step of Horovod's optimizer, and only there."""

import pytest
import torch
from horovod_ways import bits, over_mpi, stock, trajectory
from torch.optim.lr_scheduler import StepLR
from training import assert_alike, loss_of, net, sgd

import hpctk
from hpctk.errors import HpctkError, MismatchError, SettingError

BASES = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("base", BASES)
def test_the_base_optimizer_steps_once(world, hvd, base):
    method = hpctk.SAEF(hpctk.TopK(0.3))
    twin = net()
    opt = hpctk.DistributedOptimizer(BASES[base](twin.parameters()), method, model=twin)
    wanted = trajectory(world, twin, opt, 4)
    model = net()
    model, opt, _ = stock(hvd, method, model=model, base=BASES[base](model.parameters()))
    assert trajectory(world, model, opt, 4) == wanted
    steps = {int(state["step"]) for state in opt.state.values()}
    assert steps == {4}


def test_gradients_are_still_there_after_the_step(world, hvd):
    model, opt, _ = stock(hvd, hpctk.CELGC(clip=0.1, period=2))
    loss_of(model, world.rank, 0).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    opt.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), wanted, strict=True))


def test_hooks_of_the_user_run_as_often_as_before(world, hvd):
    calls = []
    model, opt, _ = stock(hvd, hpctk.CELGC(clip=0.1, period=2))
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    trajectory(world, model, opt, 1)
    assert calls == ["before", "before", "after", "after"]


@pytest.mark.parametrize("method", [hpctk.SAEF(hpctk.TopK(0.3)), hpctk.CELGC(clip=0.02, period=2)])
def test_schedulers_and_clipping(world, hvd, method):
    def train(model, opt, synchronizes):
        scheduler = StepLR(opt, step_size=2, gamma=0.5)

        def step(t):
            loss_of(model, world.rank, t).backward()
            if synchronizes:
                opt.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if synchronizes:
                with opt.skip_synchronize():
                    opt.step()
            else:
                opt.step()
            scheduler.step()

        return trajectory(world, model, opt, 5, step=step)

    model, opt, _ = stock(hvd, method)
    assert train(model, opt, True) == train(*over_mpi(world, method), False)


@pytest.mark.parametrize("method", [hpctk.SAEF(hpctk.TopK(0.3)), hpctk.LocalSGD(period=2), hpctk.Mean(hpctk.TopK(0.3))])
def test_horovods_broadcasts_leave_the_method_alone(world, hvd, method):
    def train(broadcasts):
        model, opt, compression = stock(hvd, method, attach=True)
        seen = []
        for t in range(4):
            opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            opt.step()
            if broadcasts:
                # Momentum is local in these methods, residuals are: only rank 0's momentum is given away.
                steps, local = compression.stats.steps, flat(compression.local_state_dict())
                kept = [opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]
                hvd.broadcast_optimizer_state(opt, root_rank=0)
                for p, momentum in zip(model.parameters(), kept, strict=True):
                    opt.state[p]["momentum_buffer"].copy_(momentum)
                assert flat(compression.local_state_dict()) == local
                assert compression.stats.steps == steps
            seen.append(bits(model))
        return seen

    assert train(True) == train(False)


def flat(state):
    """Return a state with bytes in the place of tensors."""
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


def test_making_the_state_of_a_new_optimizer_is_no_step(world, hvd):
    method = hpctk.LocalSGD(period=2)
    model, opt, compression = stock(hvd, method, base=None)
    hvd.broadcast_optimizer_state(opt, root_rank=0)
    assert compression.stats.steps == 0
    assert len(opt.state) == 4
    assert compression.local_state_dict() == {}
    trajectory(world, model, opt, 2)
    assert compression.stats.counts["rounds"] == 1


def test_consensus(world, hvd):
    method = hpctk.SAEF(hpctk.TopK(0.3))
    twin, opt = over_mpi(world, method)
    trajectory(world, twin, opt, 3)
    model, stepped, compression = stock(hvd, method)
    trajectory(world, model, stepped, 3)
    held = bits(model)
    with opt.averaged_model(), compression.averaged_model():
        assert bits(model) == bits(twin)
        assert bits(model) != held
    assert bits(model) == held


TOP_K = hpctk.TopK(0.3)


@pytest.mark.parametrize(
    ("method", "attach"), [(hpctk.Mean(TOP_K), False), (hpctk.Mean(TOP_K), True), (hpctk.SAEF(TOP_K), True)]
)
def test_a_bad_gradient_is_an_error_on_every_rank(world, hvd, method, attach):
    if not attach and world.size == 1:
        pytest.skip("Horovod compresses nothing at one rank")
    model, opt, compression = stock(hvd, method, attach=attach)
    trajectory(world, model, opt, 2)
    before, local = bits(model), flat(compression.local_state_dict())
    bad_rank = world.size - 1
    opt.zero_grad()
    loss = loss_of(model, world.rank, 2)
    (loss * (float("nan") if world.rank == bad_rank else 1.0)).backward()
    with pytest.raises(HpctkError, match=f"rank {bad_rank}: the gradient of '0.weight' is NaN or infinite"):
        opt.step()
    assert bits(model) == before
    assert flat(compression.local_state_dict()) == local
    if not attach:
        # The error came in the midst of Horovod's handles; this is how it forgets them.
        opt.load_state_dict(opt.state_dict())
    twin, other = over_mpi(world, method)
    wanted = trajectory(world, twin, other, 2) + trajectory(world, twin, other, 2, first=3)
    assert trajectory(world, model, opt, 2, first=3) == wanted[2:]


@pytest.mark.parametrize("method", [hpctk.Mean(hpctk.TopK(0.3)), hpctk.AdaCons(), hpctk.SAEF(hpctk.TopK(0.3))])
def test_bad_gradients_are_skipped_by_all(world, hvd, method):
    def train(model, opt):
        def step(t):
            bad = t == 1 and world.rank == 0
            (loss_of(model, world.rank, t) * (float("inf") if bad else 1.0)).backward()
            opt.step()

        return trajectory(world, model, opt, 4, step=step)

    model, opt, compression = stock(hvd, method, attach=True, of_compression={"on_bad_gradient": "skip"})
    seen = train(model, opt)
    assert seen == train(*over_mpi(world, method, on_bad_gradient="skip"))
    assert seen[0] == seen[1] != seen[2]
    assert compression.stats.counts["skipped_steps"] == 1


@pytest.mark.filterwarnings("ignore:optimizer.step.. called without")
def test_a_dropped_step_leaves_nothing_behind(world, hvd):
    model, opt, _ = stock(hvd, hpctk.Mean(), attach=True)
    loss_of(model, world.rank, 99).backward()
    opt.synchronize()
    assert trajectory(world, model, opt, 3) == trajectory(world, *over_mpi(world, hpctk.Mean()), 3)


@pytest.mark.filterwarnings("ignore:optimizer.step.. called without")
def test_after_a_step_that_failed_elsewhere(world, hvd):
    method = hpctk.LocalSGD(period=2)
    model, opt, compression = stock(hvd, method)
    fails = [True]

    def fail(*_):
        if fails:
            fails.clear()
            raise RuntimeError("of the user")

    hook = opt.register_step_pre_hook(fail)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(RuntimeError):
        opt.step()
    hook.remove()
    opt.synchronize()
    assert trajectory(world, model, opt, 3) == trajectory(world, *over_mpi(world, method), 3)
    assert compression.stats.steps == 3


@pytest.mark.parametrize("method", [hpctk.SAEF(hpctk.TopK(0.3)), hpctk.Mean(clip=0.1)])
def test_a_method_that_needs_attach_says_so(world, hvd, method):
    if world.size == 1:
        pytest.skip("Horovod compresses nothing at one rank")
    model, _, _ = stock(hvd, method, attach=False)
    with pytest.raises(SettingError, match="call compression.attach"):
        loss_of(model, world.rank, 0).backward()


def test_ranks_that_start_apart(world, hvd):
    if world.size == 1:
        pytest.skip("needs another rank")
    model = net(seed=world.rank)
    model, opt, _ = stock(hvd, hpctk.MGRAWA(period=2), model=model)
    with pytest.raises(MismatchError, match="0.weight is .* Call hvd.broadcast_parameters"):
        trajectory(world, model, opt, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    trajectory(world, model, opt, 2)
    assert bits(model) != bits(net())


def test_closures_are_refused(world, hvd):
    model, opt, _ = stock(hvd, hpctk.CELGC(clip=0.1), attach=True)
    with pytest.raises(SettingError, match="Horovod exchanges gradients before it calls the closure"):
        opt.step(lambda: loss_of(model, world.rank, 0))


def test_what_cannot_be_attached(world, hvd):
    model = net()
    compression = hpctk.horovod.Compression(hpctk.AdaCons(), model)
    with pytest.raises(SettingError, match="give what hvd.DistributedOptimizer"):
        compression.attach(sgd(model.parameters()))
    opt = hvd.DistributedOptimizer(
        sgd(model.parameters()), named_parameters=model.named_parameters(), compression=compression
    )
    assert compression.attach(opt) is opt
    with pytest.raises(SettingError, match="serves an optimizer already"):
        compression.attach(opt)


@pytest.mark.parametrize("method", [hpctk.Mean(hpctk.TopK(0.3)), hpctk.CELGC(clip=0.02, period=2)])
def test_sparse_embeddings_with_attach(world, hvd, method):
    def model_of(sparse):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return torch.nn.Embedding(6, 3, sparse=sparse).double()

    def train(model, opt):
        def step(t):
            (model(torch.tensor([world.rank, t % 6, 5])) ** 2).sum().backward()
            opt.step()

        trajectory(world, model, opt, 4, step=step)

    def base(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    if world.size == 1 and method.kind == "gradient":
        pytest.skip("at one rank sparse gradients stay as they are")
    model = model_of(True)
    model, opt, _ = stock(hvd, method, model=model, base=base(model), attach=True, sparse_as_dense=True)
    twin = model_of(False)
    other = hpctk.DistributedOptimizer(base(twin), method, model=twin)
    train(model, opt)
    train(twin, other)
    # Torch rounds otherwise where it adds a sparse gradient to a parameter.
    assert_alike(model, twin, 1e-14)
