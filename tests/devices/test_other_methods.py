"""The methods of which no digests are recorded come to the same on a device as on the host."""

import numpy as np
import pytest
import shielded
import torch
from training import loss_of, net, wrapped

import hpctk

METHODS = {
    "EF21": hpctk.EF21(hpctk.TopK(0.3)),
    "EPISODE": hpctk.EPISODE(0.1, period=2),
    "DiLoCo": hpctk.DiLoCo(period=2),
    "DiLoCo streaming": hpctk.DiLoCo(period=4, fragments=2, delay=1, compressor=hpctk.TopK(0.3)),
    "SparseLoCo": hpctk.SparseLoCo(period=2, k=2, chunk=4),
    "CELGC TopK": hpctk.CELGC(0.1, period=2, compressor=hpctk.TopK(0.3)),
    "Mean ChunkTopK": hpctk.Mean(hpctk.ChunkTopK(2, 4)),
    "SAEF several local steps": hpctk.SAEF(hpctk.TopK(0.3), period=2, step_ahead=0.5),
}


def trained(world, method, device):
    model = net().to(device)
    opt = wrapped(model, method)
    for t in range(6):
        opt.zero_grad()
        loss_of(model, world.rank, t).backward()
        opt.step()
    with opt.averaged_model():
        return np.concatenate([p.detach().cpu().numpy().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", METHODS)
def test_as_on_the_host(world, name):
    on_device = trained(world, METHODS[name], torch.device(shielded.NAME, 0))
    np.testing.assert_allclose(on_device, trained(world, METHODS[name], "cpu"), rtol=0, atol=1e-12)


def test_asynchronous_grawa_trains(world):
    model = net().to(torch.device(shielded.NAME, 0))
    opt = wrapped(model, hpctk.MGRAWA(period=2, asynchronous=True))
    # Who is ahead opens rounds that the others did not wait for: the ranks come out of join() together.
    with opt.join():
        for t in range(6):
            opt.zero_grad()
            loss_of(model, world.rank, t).backward()
            opt.step()
    with opt.averaged_model():
        assert all(p.isfinite().all().item() for p in model.parameters())


def test_the_stream_is_waited_for_before_memory_is_read(world):
    before = shielded.Stream.waits
    given = torch.arange(5.0).to(torch.device(shielded.NAME, 0))
    found = hpctk.ops.allreduce(given, op="sum")
    assert torch.equal(found.cpu(), torch.arange(5.0) * world.size)
    assert world.size == 1 or shielded.Stream.waits > before
