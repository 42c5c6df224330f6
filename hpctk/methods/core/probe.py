"""A look at the gradient aside of training, which goes on as if it had not happened."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpctk.errors import SettingError
from hpctk.methods.core.replica import Replica


@contextmanager
def probing(replica: Replica, probe: Callable[[], Any], number: int) -> Iterator[None]:
    """Let `probe` run forward and backward, and its gradients be seen inside.

    Collective over the communicator: a probe that fails on one rank fails on all. See `undisturbed`.
    """
    with replica.world.shared_errors("running the probe"), undisturbed(replica, number):
        probe()
        if all(gradient is None for gradient in replica.gradients()):
            raise SettingError("probe: left no gradients; it has to run forward and backward")
        yield


@contextmanager
def undisturbed(replica: Replica, number: int) -> Iterator[None]:
    """Let forward and backward run inside without any trace in gradients, buffers or random numbers.

    Inside, `.grad` is empty at first, and the random streams of torch, Python and numpy are streams of their own
    that follow from torch's seed, the rank and `number`: a training that draws no random numbers would otherwise
    give every probe the same "random" batch. Afterwards all is as before.
    """
    gradients = [parameter.grad for parameter in replica.parameters]
    buffers = {name: buffer.clone() for name, buffer in replica.buffers.items()}
    for parameter in replica.parameters:
        parameter.grad = None
    try:
        with _own_randomness([torch.initial_seed() % 2**64, replica.world.rank, number]), torch.enable_grad():
            yield
    finally:
        for parameter, gradient in zip(replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for name, kept in buffers.items():
                replica.buffers[name].copy_(kept)


@contextmanager
def _own_randomness(entropy: list[int]) -> Iterator[None]:
    python, legacy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    seeds = np.random.SeedSequence(entropy).generate_state(3)
    try:
        with torch.random.fork_rng(devices):
            # torch.manual_seed would also seed devices that are not in use yet, and stay in force there.
            torch.default_generator.manual_seed(int(seeds[0]))
            if devices:
                torch.cuda.manual_seed_all(int(seeds[0]))
            random.seed(int(seeds[1]))
            np.random.seed(int(seeds[2]))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
