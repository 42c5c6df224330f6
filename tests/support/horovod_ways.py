"""The ways in that Horovod gives, on one small model: stock optimizer with a Compression, and hpctk's own."""

from __future__ import annotations

import torch
from training import loss_of, net, sgd, values

import hpctk
import hpctk.horovod
from hpctk.horovod.check import needs_attach


def over_mpi(world, method, **settings):
    """Return a model and its optimizer without Horovod."""
    model = net()
    return model, hpctk.DistributedOptimizer(sgd(model.parameters()), method, model=model, **settings)


def own(world, method, **settings):
    """Return a model and hpctk's optimizer for Horovod."""
    model = net()
    return model, hpctk.horovod.DistributedOptimizer(sgd(model.parameters()), method, model=model, **settings)


def stock(hvd, method, *, model=None, base=None, attach=None, of_compression=(), **settings):
    """Return a model, Horovod's optimizer and its Compression; attached where need be."""
    model = net() if model is None else model
    base = sgd(model.parameters()) if base is None else base
    compression = hpctk.horovod.Compression(method, model, **dict(of_compression))
    opt = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters(), compression=compression, **settings)
    if attach is None:
        attach = needs_attach(compression.method) or hvd.size() == 1
    return model, compression.attach(opt) if attach else opt, compression


def trajectory(world, model, opt, steps, first=0, step=None) -> list[bytes]:
    """Return the bits of the model after each step on this rank's batches."""
    seen = []
    for t in range(first, first + steps):
        opt.zero_grad()
        if step is None:
            loss_of(model, world.rank, t).backward()
            opt.step()
        else:
            step(t)
        seen.append(bits(model))
    return seen


def bits(model: torch.nn.Module) -> bytes:
    """Return all parameters and buffers."""
    return b"".join(value.tobytes() for value in values(model))
