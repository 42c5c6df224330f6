"""Training under a GradScaler by the loops that people write, with infinities on random ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
from half_training import CLIPPED, GRADIENT, UPDATE
from half_training import sgd as slow_sgd
from training import loss_of, net, sgd, values

import hpctk

CLIP = 0.5
#: Of each training; HPCTK_STEPS asks for more.
STEPS = int(os.environ.get("HPCTK_STEPS", "40"))


def plain(scaler, opt, model) -> None:
    """Step and update, nothing between."""
    scaler.step(opt)
    scaler.update()


def clipped(scaler, opt, model) -> None:
    """Unscale, clip, step."""
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(opt)
    scaler.update()


def synchronized(scaler, opt, model) -> None:
    """Do as Horovod's documentation says."""
    opt.synchronize()
    scaler.unscale_(opt)
    with opt.skip_synchronize() if hasattr(opt, "skip_synchronize") else torch.enable_grad():
        scaler.step(opt)
    scaler.update()


RECIPES = {"plain": plain, "unscale_ and clip": clipped, "synchronize": synchronized}
METHODS = {
    "Mean": hpctk.Mean,
    "Mean of TopK": lambda: hpctk.Mean(hpctk.TopK(0.5)),
    "AdaCons": hpctk.AdaCons,
    "EF21": lambda: hpctk.EF21(hpctk.TopK(0.5)),
    "SAEF": lambda: hpctk.SAEF(hpctk.TopK(0.5)),
    "SAEF, Sign both ways": lambda: hpctk.SAEF(hpctk.Sign(), hpctk.Sign()),
}
#: All methods that exchange gradients or updates in every step; torch gives no closure to an optimizer under a scaler,
#: so not SASG.
EVERY = {
    **GRADIENT,
    **CLIPPED,
    "Mean of QSGD": hpctk.Mean(hpctk.QSGD(4)),
    "Mean of RandomK": hpctk.Mean(hpctk.RandomK(0.5)),
    "Mean without feedback": hpctk.Mean(hpctk.TopK(0.5), error_feedback=False),
    "AdaCons, layerwise": hpctk.AdaCons(layerwise=True),
    **{name: method for name, method in UPDATE.items() if name not in ("SASG", "SA-PEF")},
}
#: In which every method goes by every way in; the longer one with --full.
SHORT, LONG = 60, 1000
LENGTHS = (SHORT, pytest.param(LONG, marks=pytest.mark.full))


def scaled_model(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its base optimizer."""
    model = net(dtype=dtype)
    return model, sgd(model.parameters())


def steady_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and a base optimizer with which 1000 steps stay finite: at `sgd`'s rate EF21 and RandomK do not.

    Nor do they without a scaler.
    """
    model = net(dtype=torch.float32)
    return model, slow_sgd(model.parameters())


class Overflows:
    """Lets gradients of a model overflow in backward, before any way in sees them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._due: tuple[int, float] | None = None
        for number, parameter in enumerate(model.parameters()):
            parameter.register_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
            if self._due is None or self._due[0] != number:
                return None
            spoilt = gradient.clone(memory_format=torch.contiguous_format)
            spoilt.view(-1)[0] = self._due[1]
            return spoilt

        return spoil

    def let(self, number: int | None) -> None:
        """Let parameter number so and so have an infinity or a NaN in the backward that comes; None for none."""
        self._due = None if number is None else (number, float("inf" if number % 2 else "nan"))


def assert_in_step(world, model, opt, recipes, steps, *, shared=None, forward=None, scaler=None) -> tuple[float, int]:
    """Train; after every step scales and what all ranks share are equal. Return the last scale and the skipped steps.

    `recipes` are drawn from, step by step; one alone may be given. `shared` returns what is shared where that is not
    the model; `forward` is called in the place of the model.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5) if scaler is None else scaler
    overflows = Overflows(model)
    # The same draws on all ranks.
    draws = random.Random(7)
    skipped = 0
    for t in range(steps):
        # Who overflows, and in which tensor. As often as the scale grows again.
        unlucky = {rank for rank in range(world.size) if draws.random() < 0.5} or {0}
        unlucky = unlucky if draws.random() < 0.15 else set()
        which = draws.randrange(4)
        recipe = draws.choice(recipes) if isinstance(recipes, list) else recipes
        opt.zero_grad()
        overflows.let(which if world.rank in unlucky else None)
        scaler.scale(loss_of(model if forward is None else forward, world.rank, t)).backward()
        recipe(scaler, opt, model)
        skipped += bool(unlucky)
        held = [x.detach().float().numpy() for x in model.parameters()] if shared is None else shared()
        text = b"".join(x.tobytes() for x in held).hex()
        world.agree(f"step {t}", [("scale", scaler.get_scale()), ("bits", text)])
        assert all((abs(x) < 1e6).all() for x in held)
    assert 0 < skipped < steps
    return scaler.get_scale(), skipped


def assert_the_same_at_any_scale(world, make, recipe) -> None:
    """Train with a scale that grows, and is halved by an overflow, and without a scaler: the model is the same.

    `make` returns the optimizer of a model and a base optimizer; it skips bad gradients.
    """
    trained = []
    for scale in (None, 4.0, 2.0**20):
        model, base = scaled_model()
        model.double()
        opt = make(model, base)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
        for t in range(10):
            opt.zero_grad()
            loss = loss_of(model, world.rank, t)
            unlucky = t == 5 and world.rank == world.size - 1
            scaler.scale(loss * float("inf") if unlucky else loss).backward()
            recipe(scaler, opt, model)
        trained.append(values(model))
        assert scale is None or scaler.get_scale() == scale * 2.0**3
    # Powers of two: to the bit.
    for other in trained[1:]:
        assert all((a == b).all() for a, b in zip(trained[0], other, strict=True))
