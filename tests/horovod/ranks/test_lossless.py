"""Without loss a Compression is Horovod as it is: the same bits as the stock optimizer without it.

Gradients are whole numbers, divisible by the number of ranks: no sum or mean of them is rounded, in whatever order.
"""

import warnings

import numpy as np
import pytest
import torch
from horovod_ways import bits, stock
from training import net

import hpctk

STEPS = 4

LOSSLESS = {
    "Mean": lambda: hpctk.Mean(),
    "Identity": lambda: hpctk.Identity(),
    "TopK 1": lambda: hpctk.TopK(1.0),
    "RandomK 1": lambda: hpctk.RandomK(1.0),
}

BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def whole(hvd, shape, *seed):
    """Return whole numbers that the number of ranks divides."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(-50, 50, shape) * hvd.size()).float()


def loss(hvd, model, t, uses=lambda name, rank, t: True):
    """Return a loss whose gradients are whole numbers of this rank and step; `uses` says of which parameters."""
    rank = hvd.rank()
    named = enumerate(model.named_parameters())
    terms = [(whole(hvd, p.shape, rank, t, i) * p).sum() for i, (name, p) in named if uses(name, rank, t)]
    return sum(terms)


def model_of(hvd):
    return net(dtype=torch.float32)


def train(hvd, model, opt, backward, steps=STEPS):
    seen = []
    for t in range(steps):
        opt.zero_grad()
        backward(model, t)
        opt.step()
        seen.append(bits(model))
    return seen


def assert_stock(hvd, method, backward=None, *, make=model_of, base="momentum", **settings):
    """Horovod with and without a Compression goes the same way."""
    if backward is None:

        def backward(model, t):
            loss(hvd, model, t).backward()

    model = make(hvd)
    opt = hvd.DistributedOptimizer(
        BASES[base](model.parameters()), named_parameters=model.named_parameters(), **settings
    )
    wanted = train(hvd, model, opt, backward)
    model = make(hvd)
    model, opt, compression = stock(
        hvd, method, model=model, base=BASES[base](model.parameters()), attach=False, **settings
    )
    assert train(hvd, model, opt, backward) == wanted
    assert len(set(wanted)) == STEPS
    assert not compression._kept, "gradients were not let go"
    # At one rank Horovod compresses nothing.
    assert compression.stats.steps == (STEPS if hvd.size() > 1 else 0)


@pytest.mark.parametrize(
    ("name", "base"), [*((name, "momentum") for name in LOSSLESS), ("Identity", "sgd"), ("Identity", "adam")]
)
def test_it_is_the_stock_optimizer(hvd, name, base):
    assert_stock(hvd, LOSSLESS[name](), base=base)


@pytest.mark.parametrize("name", ["Identity", "TopK 1"])
@pytest.mark.parametrize(
    "settings", [{"op": "Sum"}, {"gradient_predivide_factor": 2.0}, {"groups": 2}, {"op": "Sum", "groups": 1}], ids=str
)
def test_what_horovod_can_be_asked_for(hvd, name, settings):
    settings = {key: getattr(hvd, value) if key == "op" else value for key, value in settings.items()}
    assert_stock(hvd, LOSSLESS[name](), **settings)


def test_a_sum_is_not_the_mean_times_the_ranks(hvd):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, opt, _ = stock(hvd, hpctk.Mean(), model=model, base=torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    # The least float32 there is: any part of it is nothing.
    least = torch.tensor([[1e-45]])
    model.weight.grad = least.clone() if hvd.rank() == 0 else torch.zeros(1, 1)
    opt.step()
    assert torch.equal(model.weight.detach(), -least)


def test_groups_of_chosen_parameters(hvd):
    method = hpctk.Identity()
    model, twin = model_of(hvd), model_of(hvd)

    def optimizer(one, **settings):
        groups = [[one[2].bias, one[0].weight]]
        base = BASES["momentum"](one.parameters())
        return hvd.DistributedOptimizer(base, named_parameters=one.named_parameters(), groups=groups, **settings)

    def backward(one, t):
        loss(hvd, one, t).backward()

    wanted = train(hvd, twin, optimizer(twin), backward)
    opt = optimizer(model, compression=hpctk.horovod.Compression(method, model))
    assert train(hvd, model, opt, backward) == wanted


@pytest.mark.parametrize("passes", [1, 2])
def test_accumulated_gradients(hvd, passes):
    def backward(model, t):
        # With one pass of two the step comes early.
        for i in range(passes):
            loss(hvd, model, 10 * t + i).backward()

    assert_stock(hvd, hpctk.Identity(), backward, backward_passes_per_step=2)


@pytest.mark.parametrize("base", BASES)
def test_parameters_without_gradients_on_some_ranks(hvd, base):
    def backward(model, t):
        loss(hvd, model, t, lambda name, rank, t: name != "0.weight" or rank == t % hvd.size()).backward()

    assert_stock(hvd, hpctk.Identity(), backward, base=base)


def test_changing_graphs(hvd):
    def backward(model, t):
        loss(hvd, model, t, lambda name, rank, t: ("weight" in name) == (t % 2 == 0)).backward()

    assert_stock(hvd, hpctk.Identity(), backward)


class Words(torch.nn.Module):
    """Two embeddings of one shape, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = (torch.nn.Embedding(5, 2, sparse=True) for _ in range(2))
            self.dense = torch.nn.Parameter(torch.ones(2))

    def forward(self, hvd, t):
        rank = hvd.rank()
        parts = []
        # Gradients arrive in another order on every second rank.
        for i in (0, 1) if rank % 2 == 0 else (1, 0):
            layer = (self.first, self.second)[i]
            words = torch.tensor([(rank + t) % 5, (2 * t + i) % 5, 3])
            parts.append((layer(words) * whole(hvd, (3, 2), rank, t, i)).sum())
        return sum(parts) + (whole(hvd, (2,), rank, t) * self.dense).sum()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["Identity", "TopK 1"])
def test_sparse_embeddings_made_dense(hvd, name, passes):
    def backward(model, t):
        model(hvd, t).backward()

    settings = {"sparse_as_dense": True, "backward_passes_per_step": passes}
    assert_stock(hvd, LOSSLESS[name](), backward, make=lambda hvd: Words(), base="sgd", **settings)


def test_sparse_embeddings_as_they_are(hvd):
    def backward(model, t):
        model(hvd, t).backward()

    # Horovod gathers them by itself; the dense parameter goes by the token.
    assert_stock(hvd, hpctk.Identity(), backward, make=lambda hvd: Words(), base="sgd")


def test_clipping_between_synchronize_and_step(hvd):
    def opt_of(model, **settings):
        base = BASES["momentum"](model.parameters())
        return hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), **settings)

    def train(model, opt):
        for t in range(STEPS):
            opt.zero_grad()
            loss(hvd, model, t).backward()
            opt.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with opt.skip_synchronize(), warnings.catch_warnings():
                warnings.simplefilter("error")
                opt.step()
        return bits(model)

    model, twin = model_of(hvd), model_of(hvd)
    opt = opt_of(model, compression=hpctk.horovod.Compression(hpctk.Mean(), model))
    assert train(model, opt) == train(twin, opt_of(twin))


def test_only_some_parameters_are_optimized(hvd):
    def train(compressed):
        model = model_of(hvd)
        settings = {"compression": hpctk.horovod.Compression(hpctk.Mean(), model)} if compressed else {}
        base = BASES["momentum"](model[0].parameters())
        opt = hvd.DistributedOptimizer(base, named_parameters=model[0].named_parameters(), **settings)
        for t in range(3):
            opt.zero_grad()
            loss(hvd, model, t).backward()
            opt.step()
        return bits(model)

    assert train(True) == train(False)
