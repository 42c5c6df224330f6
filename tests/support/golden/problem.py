"""A model without matrix products: gradients are made of single additions and multiplications, element by element.

Those are rounded the same way by every processor, so that gradients are the same bits everywhere. Their mantissas are
full: a sum over ranks in another order is another number. See golden/__init__.py for when digests may change.
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import torch

SHAPES = {"conv": (4, 2, 3, 3), "matrix": (12, 7), "bias": (12,), "scalar": (), "vector": (33,)}
#: Beyond what a library's short all-reduce takes, and several messages for each block.
LARGE_SHAPES = {"matrix": (130, 101), "bias": (130,)}
#: Two buckets of overlap=True.
HUGE_SHAPES = {"front": (20, 30), "back": (525, 1000)}

MODELS = {"small": SHAPES, "large": LARGE_SHAPES, "huge": HUGE_SHAPES}

#: Powers of two as factors: torch multiplies and adds by one fused operation or by two, as the processor has it, and
#: rounds the same way then. The momentum is a factor alone.
LR, MOMENTUM, WEIGHT_DECAY = 2.0**-4, 0.875, 2.0**-7


@cache
def numbers(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float64 numbers from -1 to below 1 with full mantissas, by integer arithmetic alone (splitmix64)."""
    n = int(np.prod(shape))
    seed = np.uint64(zlib.crc32(key.encode()))
    with np.errstate(over="ignore"):
        x = (np.arange(1, n + 1, dtype=np.uint64) + (seed << np.uint64(20))) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(11)) * 2.0**-52 - 1).reshape(shape)


#: Where models lie; tests of devices set it before anything is made.
device = torch.device("cpu")


def known(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return `numbers` in a dtype, on the device."""
    return _known(key, shape, dtype, device)


@cache
def _known(key: str, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    return numbers(key, shape).to(where, dtype)


@cache
def curvature(key: str, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    """Return numbers of few bits, 0.5 to 1.5."""
    return (_known(key, shape, dtype, where) * 8).floor() / 16 + 1


class Given(torch.autograd.Function):
    """A loss whose gradients are given: backward() finds them, and all that listens to it."""

    @staticmethod
    def forward(ctx, gradients, *parameters):
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return None, *ctx.gradients


class Model(torch.nn.Module):
    """Parameters whose gradient on rank k in step t is a_k * (p - b_k) + c_kt, element by element.

    Parameters
    ----------
    rank, size : int
        Of this process.
    shapes : mapping of str to tuple of int
    dtype : torch.dtype
    start : str
        Another model for another text.
    rate : float
        The learning rate that its optimizer begins with.
    uses_all : bool
        Whether the gradient of every parameter is there in every step.
    bad_steps : sequence of int
        When the last rank has an infinite gradient.
    """

    def __init__(self, rank, size, shapes, dtype, *, start="start", rate=LR, uses_all=True, bad_steps=()):
        super().__init__()
        self.rank, self.size, self.rate, self.uses_all, self.bad_steps = rank, size, rate, uses_all, bad_steps
        for name, shape in shapes.items():
            value = known(f"{start} {name}", shape, dtype).clone()
            if len(shape) == 4:
                value = value.to(memory_format=torch.channels_last)
            self.register_parameter(name, torch.nn.Parameter(value))
        self.trained = dict(self.named_parameters())
        self.frozen = torch.nn.Parameter(known(start, (3,), dtype).clone(), requires_grad=False)
        self.register_buffer("running", known(f"{start} running", (5,), dtype).clone())
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device=device))

    def forward(self, t: int) -> torch.Tensor:
        """Return a loss with the gradients of step t."""
        self.running.mul_(0.5).add_(self._known("running", self.running, t))
        self.batches += 1
        used = {name: parameter for name, parameter in self.trained.items() if self._used(name, t)}
        gradients = [self._gradient(name, parameter.detach(), t) for name, parameter in used.items()]
        return Given.apply(gradients, *used.values())

    def _used(self, name: str, t: int) -> bool:
        # In step 2 on no rank, else on most.
        return self.uses_all or name != "vector" or (t != 2 and (self.rank + t) % 3 > 0)

    def _known(self, name: str, like: torch.Tensor, t: int | str) -> torch.Tensor:
        return known(f"{name} {self.rank} {t}", tuple(like.shape), like.dtype)

    def _gradient(self, name: str, value: torch.Tensor, t: int) -> torch.Tensor:
        bends = curvature(f"{name} {self.rank} bends", tuple(value.shape), value.dtype, device)
        gradient = bends * (value - self._known(name, value, "target")) + self._known(name, value, t)
        if t in self.bad_steps and self.rank == self.size - 1 and name == "matrix":
            gradient[1, 2] = float("inf")
        return gradient

    def loss(self, t: int) -> float:
        """Return what is told as the loss of step t; a sum over elements would depend on the processor."""
        return float(numbers(f"loss {self.rank}", (64,))[t % 64])


class Probe:
    """A fresh random batch for the model that is trained just now."""

    model: Model

    def __call__(self) -> None:
        """Run forward and backward."""
        self.model(int(torch.randint(1000, 2000, ()))).backward()


PROBE = Probe()


def sgd(model: Model) -> torch.optim.Optimizer:
    """Return an optimizer that remembers and decays: what it sees of a parameter leaves a trace."""
    return torch.optim.SGD(model.parameters(), lr=model.rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def two_groups(model: Model) -> torch.optim.Optimizer:
    """Return an optimizer with another rate for matrices."""
    flat = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    groups = [{"params": flat}, {"params": matrices, "lr": model.rate / 2}]
    # Nesterov's momentum is a factor of what is added.
    return torch.optim.SGD(groups, lr=model.rate, momentum=0.5, nesterov=True)


def adam(model: Model) -> torch.optim.Optimizer:
    """Return Adam, whose state has numbers beside tensors."""
    return torch.optim.Adam(model.parameters(), lr=model.rate / 2)


BASES = {"sgd": sgd, "two groups": two_groups, "adam": adam}
