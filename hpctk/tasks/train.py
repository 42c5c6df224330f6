"""Data-parallel training with plain averaging: the frame in which methods are compared.

Every rank computes the gradient of its own batch; the mean over the ranks is the gradient of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from hpctk.buffers import DTYPES
from hpctk.collectives.allreduce import reduce_in_place
from hpctk.collectives.engine import engine_of
from hpctk.errors import SettingError
from hpctk.tasks import digits
from hpctk.world import World

#: The ranges of the settings: name -> (least, most).
RANGES = {"epochs": (1, 10_000), "batch": (1, 1497), "lr": (0.0, 100.0), "seed": (0, 2**31 - 1)}


@dataclass(frozen=True)
class Settings:
    """What a training job is told; all ranks must be told the same.

    Attributes
    ----------
    epochs : int
    batch : int
        Images in a batch of one rank.
    lr : float
        Learning rate of SGD with momentum 0.9.
    seed : int
        Of the model and the order of the images.
    schedule : str
        How the gradients are averaged.
    """

    epochs: int = 20
    batch: int = 16
    lr: float = 0.1
    seed: int = 1
    schedule: str = "ring"

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise SettingError(f"{name}={value}: allowed are {least} to {most}")


@dataclass(frozen=True)
class Result:
    """How a training job went, on this rank.

    `sent_bytes` is None where MPI's own collectives moved the gradients: they do not tell.
    """

    method: str
    accuracy: float
    loss: float
    seconds: float
    steps: int
    sent_bytes: int | None


def train_digits(here: World, settings: Settings, on_step: Callable[[int, int, float], None]) -> Result:
    """Train on the bundled digits. Collective over the world's communicator.

    Parameters
    ----------
    here : World
    settings : Settings
    on_step : callable
        Called after every step with its number, the number of all steps, and the loss of this rank.
    """
    here.agree("train digits", list(asdict(settings).items()))
    with here.shared_errors("loading the digits"):
        train, test = digits.load()
    network = digits.model(settings.seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=settings.lr, momentum=0.9)
    epochs = [
        digits.batches(len(train.labels), settings.batch, here.rank, here.size, settings.seed, epoch)
        for epoch in range(settings.epochs)
    ]
    order = [batch for epoch in epochs for batch in epoch]
    if not order:
        raise SettingError(
            f"batch={settings.batch}: {here.size} ranks need {here.size * settings.batch} images"
        )
    counter = engine_of(here).counter
    sent_before, uncounted_before = counter.sent_bytes, counter.uncounted_calls
    began = time.perf_counter()
    for step, batch in enumerate(order, 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(train.images[batch]), train.labels[batch])
        loss.backward()
        average_gradients(here, network, settings.schedule)
        optimizer.step()
        on_step(step, len(order), float(loss.detach()))
    seconds = time.perf_counter() - began
    counted = counter.uncounted_calls == uncounted_before
    sent = counter.sent_bytes - sent_before if counted else None
    return Result("mean", digits.accuracy(network, test), float(loss.detach()), seconds, len(order), sent)


def average_gradients(here: World, network: torch.nn.Module, schedule: str) -> None:
    """Replace the gradients of a network by their mean over all ranks, as one message.

    Collective over the communicator. In place.
    """
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    fused = torch.cat([gradient.flatten() for gradient in gradients])
    reduce_in_place(here, fused, DTYPES["float32"], "mean", schedule)
    parts = fused.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
