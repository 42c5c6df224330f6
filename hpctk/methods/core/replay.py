"""Forward and backward run aside of training, which goes on as if nothing had happened.

SASG runs its closure again at an earlier model and compares the two gradients of one minibatch. Whatever else differs
would be taken for news: random numbers are drawn again from where the first evaluation drew them (torch on the host
and on CUDA devices, Python's `random`, numpy's global generator; a generator that the closure made itself is not known
here), and buffers start from the values that they had. Afterwards all is as the first evaluation left it, so batch
norm counts every minibatch once. GRAWA runs a probe on a batch of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hpctk import torch_private
from hpctk.errors import SettingError
from hpctk.methods.core.replica import Replica
from hpctk.methods.core.run import Closure, evaluate

State = dict[str, Any]


def random_state() -> State:
    """Return where all global generators are: tensors, numbers and tuples of them."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": devices,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def restore_random_state(state: State) -> None:
    """Let all global generators go on from what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    # There may be fewer devices now than there were.
    devices = state["cuda"][: torch.cuda.device_count()]
    if devices:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


@contextmanager
def probing(replica: Replica, probe: Callable[[], Any], number: int) -> Iterator[None]:
    """Let `probe` run forward and backward, and its gradients be seen inside.

    Collective over the communicator: a probe that fails on one rank fails on all. See `undisturbed`.
    """
    with replica.world.shared_errors("running the probe"), undisturbed(replica, number):
        with replica.forward_and_backward():
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


class Replay:
    """A closure that is about to be run, and may have to be run once more.

    Parameters
    ----------
    replica : Replica
        Its buffers are looked after, so far as it knows them.
    closure : callable
    """

    def __init__(self, replica: Replica, closure: Closure) -> None:
        self._replica, self._closure = replica, closure
        self._random = random_state()
        self._buffers = _copies(replica)

    def gradients_at(self, point: Sequence[torch.Tensor], room: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the closure's gradients at another point, None for parameters that have none.

        Not in place: parameters, gradients, buffers and random numbers are what they were, also when the
        closure raises. `room` is overwritten; it is where the parameters stay meanwhile.
        """
        replica = self._replica
        first = [parameter.grad for parameter in replica.parameters]
        after, drawn = _copies(replica), random_state()
        torch_private.foreach_copy_(list(room), replica.values)
        try:
            # Taken away, not zeroed: zero_grad(set_to_none=False) would wipe out the first ones.
            self._put([None] * len(first), self._buffers, self._random)
            replica.load(point)
            evaluate(self._closure)
            return replica.gradients()
        finally:
            replica.load(room)
            self._put(first, after, drawn)

    def _put(self, gradients: Sequence[torch.Tensor | None], buffers: Mapping[str, torch.Tensor], drawn: Any) -> None:
        for parameter, gradient in zip(self._replica.parameters, gradients, strict=True):
            parameter.grad = gradient
        # By name: a module may have put another tensor in a buffer's place.
        for name, buffer in self._replica.buffers.items():
            if name in buffers:
                buffer.detach().copy_(buffers[name])
        restore_random_state(drawn)


def _copies(replica: Replica) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in replica.buffers.items()}
