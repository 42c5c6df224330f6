"""A compressor that hpctk does not have, as somebody else would add it: its class, its line in the registry.

And what training with it must come to, all ranks simulated in one process without anything of hpctk.
"""

from __future__ import annotations

import copy

import torch
from training import loss_of, net, sgd

from hpctk.compressors import COMPRESSORS
from hpctk.compressors.core.sparse import SparseCompressor


class Threshold(SparseCompressor):
    """Send the elements whose magnitude is `least` or more: how many, is another number on every rank."""

    def __init__(self, least=0.05, *, exclude=(), min_elements=0):
        super().__init__(exclude=exclude, min_elements=min_elements)
        self.least = least

    def _choose(self, flat):
        return (flat.abs() >= self.least).nonzero().view(-1)


COMPRESSORS["threshold"] = Threshold


def split(total, least):
    """Return what is sent of a tensor, and what is not."""
    sent = torch.where(total.abs() >= least, total, torch.zeros_like(total))
    return sent, total - sent


def simulated_mean(size, steps, least):
    """Return the model after steps of Mean(Threshold(least)), and how many elements each rank sent in all."""
    model = net()
    base, residuals, counts = sgd(model.parameters()), None, [0] * size
    for t in range(steps):
        gradients = [_gradients(model, rank, t) for rank in range(size)]
        residuals = residuals or [[torch.zeros_like(g) for g in gradients[0]] for _ in range(size)]
        for i, parameter in enumerate(model.parameters()):
            parts = []
            for rank in range(size):
                sent, residuals[rank][i] = split(gradients[rank][i] + residuals[rank][i], least)
                parts.append(sent)
                counts[rank] += int((sent != 0).sum())
            parameter.grad = sum(parts) / size
        base.step()
    return model, counts


def simulated_saef(size, steps, least):
    """Return x after steps of SAEF(Threshold(least)): each rank's gradient is taken at x minus its residual."""
    x = [p.detach().clone() for p in net().parameters()]
    models = [net() for _ in range(size)]
    bases = [sgd(model.parameters()) for model in models]
    residuals = [[torch.zeros_like(p) for p in x] for _ in range(size)]
    for t in range(steps):
        moves = [torch.zeros_like(p) for p in x]
        for rank, model in enumerate(models):
            before = [p.detach().clone() for p in model.parameters()]
            for parameter, gradient in zip(model.parameters(), _gradients(model, rank, t), strict=True):
                parameter.grad = gradient
            bases[rank].step()
            for i, parameter in enumerate(model.parameters()):
                update = before[i] - parameter.detach()
                sent, residuals[rank][i] = split(residuals[rank][i] + update, least)
                moves[i] += sent / size
        x = [p - move for p, move in zip(x, moves, strict=True)]
        for rank, model in enumerate(models):
            for parameter, value, residual in zip(model.parameters(), x, residuals[rank], strict=True):
                parameter.data = value - residual
    model = net()
    for parameter, value in zip(model.parameters(), x, strict=True):
        parameter.data = value
    return model


def _gradients(model, rank, t):
    other = copy.deepcopy(model)
    other.zero_grad()
    loss_of(other, rank, t).backward()
    return [p.grad for p in other.parameters()]
