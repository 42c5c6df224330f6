"""Training under a GradScaler by the loops that people write, with infinities on random ranks."""

from __future__ import annotations

import os
import random

import torch
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


def scaled_model(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its base optimizer."""
    model = net(dtype=dtype)
    return model, sgd(model.parameters())


def assert_in_step(world, model, opt, recipe, steps, *, shared=None, forward=None) -> tuple[float, int]:
    """Train; after every step scales and what all ranks share are equal. Return the last scale and the skipped steps.

    `shared` returns what is shared where that is not the model; `forward` is called in the place of the model.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    draws = random.Random(7)
    skipped = 0
    for t in range(steps):
        opt.zero_grad()
        scaler.scale(loss_of(model if forward is None else forward, world.rank, t)).backward()
        # The same draws on all ranks: who overflows, and in which tensor. As often as the scale grows again.
        unlucky = {rank for rank in range(world.size) if draws.random() < 0.5} or {0}
        unlucky = unlucky if draws.random() < 0.15 else set()
        which = draws.randrange(4)
        if world.rank in unlucky:
            list(model.parameters())[which].grad.view(-1)[0] = float("inf") if which % 2 else float("nan")
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
