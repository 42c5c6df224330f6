"""A process group that moves device memory, as NCCL's: what goes by it, and what comes to the host, which is said."""

import logging
import tempfile

import device_only
import numpy as np
import pytest
import shielded
import torch
import torch.distributed as dist
from device_only import DeviceOnly
from golden.cases import COMPRESSORS
from torch.nn.parallel import DistributedDataParallel
from training import alone, loss_of, net, sgd

import hpctk
import hpctk.comm.world

STEPS = 4
DEVICE = torch.device(shielded.NAME, 0)


@pytest.fixture(scope="module")
def device_group():
    """The default group, of devices only."""
    world = hpctk.comm.world.world()
    device_only.register()
    folder = world.run_on_root("making a folder", lambda: tempfile.mkdtemp(prefix="hpctk-devices-"))
    dist.init_process_group(
        device_only.NAME, init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size
    )
    yield dist.group.WORLD
    world.barrier("leaving the group")
    dist.destroy_process_group()


def trained(method, *, device=DEVICE, attached=False, **settings):
    """Return a model after some steps, and the optimizer or what was attached."""
    model = net().to(device)
    forward, base = model, sgd(model.parameters())
    if attached:
        forward = DistributedDataParallel(model)
        opt, made = base, hpctk.ddp.attach(forward, method, **settings)
    else:
        opt = made = hpctk.ddp.DistributedOptimizer(base, method, model=model, **settings)
    for t in range(STEPS):

        def closure(t=t):
            opt.zero_grad()
            loss = loss_of(forward, dist.get_rank(), t)
            loss.backward()
            return loss

        opt.step(closure)
    return model, made


def values(model):
    return np.concatenate([p.detach().cpu().numpy().reshape(-1) for p in model.parameters()])


def test_dense_gradients_go_by_the_group_itself(world, device_group, caplog):
    here = hpctk.comm.world.world(device_group)
    for settings in ({}, {"schedule": "torch"}, {"overlap": True}, {"attached": True}):
        DeviceOnly.calls.clear()
        model, _ = trained(hpctk.Mean(), **settings)
        np.testing.assert_allclose(values(model), values(alone(world.size, STEPS)), rtol=0, atol=1e-12)
        assert DeviceOnly.calls["allreduce"] >= STEPS * (world.size > 1), settings
    assert not here.has_staged
    assert not caplog.records


DIRECT = {
    **{f"Mean {name}": hpctk.Mean(each) for name, each in COMPRESSORS.items() if name != "TopK keep"},
    "Mean ChunkTopK": hpctk.Mean(hpctk.ChunkTopK(2, 4)),
    "Mean unit norm": hpctk.Mean(unit_norm=True),
    "EF21": hpctk.EF21(hpctk.TopK(0.3)),
    "SAEF TopK": hpctk.SAEF(hpctk.TopK(0.3), average_every=2),
    "SAEF Sign": hpctk.SAEF(hpctk.Sign()),
    "LocalSGD": hpctk.LocalSGD(2),
    "MGRAWA": hpctk.MGRAWA(2),
    "EASGD": hpctk.EASGD(2),
    "DiLoCo TopK": hpctk.DiLoCo(period=2, compressor=hpctk.TopK(0.3)),
    "SparseLoCo": hpctk.SparseLoCo(period=2, k=2, chunk=4),
}


@pytest.mark.parametrize("name", DIRECT)
def test_compressed_packets_and_models_go_by_the_group_itself(world, device_group, caplog, name):
    here = hpctk.comm.world.world(device_group)
    here.has_staged = False
    method = DIRECT[name]
    DeviceOnly.calls.clear()
    model, made = trained(method)
    np.testing.assert_allclose(values(model), values(trained(method, device="cpu")[0]), rtol=0, atol=1e-12)
    assert world.size == 1 or DeviceOnly.calls["allreduce"] + DeviceOnly.calls["allgather"] > 0
    if isinstance(method, hpctk.Mean | hpctk.EF21):
        other, attached = trained(method, attached=True)
        np.testing.assert_allclose(values(other), values(model), rtol=0, atol=1e-12)
        assert attached.stats.steps == STEPS
    assert not here.has_staged
    assert not caplog.records
    assert made.stats.steps == STEPS


STAGED = {
    "AdaCons": (hpctk.AdaCons(), {}),
    "TopK keep": (hpctk.Mean(hpctk.TopK(0.3, keep=True)), {}),
    "SASG": (hpctk.SASG(0.3), {}),
    "SAEF one bit": (hpctk.SAEF(hpctk.Sign(), hpctk.Sign()), {}),
    "named schedule": (hpctk.Mean(), {"schedule": "ring"}),
}


@pytest.mark.parametrize("name", STAGED)
def test_what_is_staged_is_said_once(world, device_group, caplog, name):
    method, settings = STAGED[name]
    here = hpctk.comm.world.world(device_group)
    here.has_staged = False
    with caplog.at_level(logging.WARNING, "hpctk"):
        model, _ = trained(method, **settings)
    np.testing.assert_allclose(values(model), values(trained(method, device="cpu", **settings)[0]), rtol=0, atol=1e-12)
    if method.kind == "gradient":
        np.testing.assert_allclose(
            values(trained(method, attached=True, **settings)[0]), values(model), rtol=0, atol=1e-12
        )
    assert here.has_staged
    said = [record.getMessage() for record in caplog.records if "host memory" in record.getMessage()]
    assert len(said) == (world.rank == 0 and world.size > 1)
    assert all("device_only moves whole tensors only" in text and "schedule='auto'" in text for text in said)


def test_host_tensors_still_go_by_gloo(world, device_group):
    DeviceOnly.calls.clear()
    trained(hpctk.Mean(), device="cpu")
    assert not DeviceOnly.calls


def test_a_maximum_keeps_nan(world, device_group):
    given = torch.tensor([float("nan") if world.rank == 0 else 1.0, float(world.rank)], device=DEVICE)
    found = hpctk.ops.allreduce(given, op="max", comm=device_group)
    assert found.device == DEVICE
    assert np.isnan(found[0].item())
    assert found[1].item() == world.size - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.complex64])
def test_sums_of_other_dtypes(world, device_group, dtype):
    given = (torch.arange(5) + world.rank).to(dtype).to(DEVICE)
    found = hpctk.ops.allreduce(given, op="sum", comm=device_group)
    wanted = sum((torch.arange(5) + rank).to(dtype) for rank in range(world.size))
    assert found.device == DEVICE
    assert torch.equal(found.cpu(), wanted)
