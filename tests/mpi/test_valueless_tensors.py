"""Tensors that are only promised, on the meta device or in a lazy module: the same advice on every rank."""

import pytest
import torch

import hpctk
from hpctk.errors import MismatchError, SettingError, TensorError

MATERIALISE = r"is on the meta device and has no values: materialise the model with model.to_empty\(device="
COLLECTIVES = {
    "allreduce": lambda x: hpctk.allreduce(x),
    "iallreduce": lambda x: hpctk.ops.iallreduce(x, schedule="ring"),
    "allgather": lambda x: hpctk.ops.allgather(x),
    "broadcast": lambda x: hpctk.ops.broadcast(x),
    "reduce_scatter": lambda x: hpctk.ops.reduce_scatter(x),
    "weighted_mean": lambda x: hpctk.ops.weighted_mean([torch.ones(2), x], 1.0),
    "adacons_aggregate": lambda x: hpctk.ops.adacons_aggregate([torch.ones(2), x], hpctk.ops.ConsensusState()),
    "sparse_allreduce": lambda x: hpctk.ops.sparse_allreduce(torch.tensor([0]), x, 3),
    "sparse indices": lambda x: hpctk.ops.sparse_allreduce(x, torch.ones(1), 3),
}


def distributed(model, **given):
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return hpctk.DistributedOptimizer(base, hpctk.Mean(), **(given or {"model": model}))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_tensor_on_the_meta_device(name):
    with pytest.raises(TensorError, match=f"the tensor {MATERIALISE}"):
        COLLECTIVES[name](torch.ones(1, device="meta"))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_tensor_of_a_lazy_module(name):
    with pytest.raises(TensorError, match="lazy module .* run one forward pass first"):
        COLLECTIVES[name](torch.nn.LazyLinear(2).weight)


def test_a_model_on_the_meta_device():
    model = torch.nn.Linear(3, 2, device="meta")
    with pytest.raises(TensorError, match=f"weight {MATERIALISE}"):
        distributed(model)
    with pytest.raises(TensorError, match=f"weight {MATERIALISE}"):
        distributed(model, named_parameters=model.named_parameters())
    model.to_empty(device="cpu")
    model.reset_parameters()
    distributed(model)


def test_what_nobody_trains_has_values_too():
    frozen = torch.nn.Linear(3, 3, device="meta").requires_grad_(False)
    with pytest.raises(TensorError, match=f"1.weight {MATERIALISE}"):
        distributed(torch.nn.Sequential(torch.nn.Linear(3, 3), frozen))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model.register_buffer("scale", torch.ones(3, device="meta"))
    with pytest.raises(TensorError, match=f"scale {MATERIALISE}"):
        distributed(model)


@pytest.mark.parametrize("lazy", [torch.nn.LazyLinear, torch.nn.LazyBatchNorm1d])
def test_a_lazy_module_before_its_first_input(lazy):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), *([lazy(2)] if lazy is torch.nn.LazyLinear else [lazy()]))
    with pytest.raises(SettingError, match="1.weight belongs to a lazy module .* run one forward pass first"):
        distributed(model)
    model(torch.ones(4, 3))
    distributed(model)


def test_a_model_that_only_one_rank_has_made(world):
    if world.size < 2:
        pytest.skip("needs two ranks")
    model = torch.nn.Linear(3, 2, device="cpu" if world.rank == 0 else "meta")
    with pytest.raises(MismatchError, match=r"weight is .* and .* on the meta device, without values"):
        distributed(model)
    lazy = torch.nn.LazyLinear(2)
    if world.rank == 0:
        lazy(torch.ones(4, 3))
    with pytest.raises(MismatchError, match=r"weight is .*\(2, 3\).* and .* uninitialised"):
        distributed(lazy)
