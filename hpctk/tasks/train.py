"""Data-parallel training of a bundled job by any method: the frame in which methods are compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from hpctk.errors import SettingError
from hpctk.optimizer import DistributedOptimizer
from hpctk.tasks import digits
from hpctk.tasks.recipes import Recipe, readable
from hpctk.world import World

#: The ranges of the settings: name -> (least, most).
RANGES = {
    "epochs": (1, 10_000),
    "batch": (1, 1497),
    "lr": (0.0, 100.0),
    "momentum": (0.0, 1.0),
    "seed": (0, 2**31 - 1),
}


@dataclass(frozen=True)
class Settings:
    """What a training job is told; all ranks must be told the same.

    Attributes
    ----------
    epochs : int
    batch : int
        Images in a batch of one rank.
    lr, momentum : float
        Of the base optimizer, SGD.
    seed : int
        Of the model and the order of the images.
    schedule : str
        How dense tensors are averaged.
    """

    epochs: int = 20
    batch: int = 16
    lr: float = 0.1
    momentum: float = 0.9
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

    `sent_bytes` is None where MPI's own collectives moved tensors: they do not tell. `rounds` are this rank's
    exchanges; for SASG its uploads.
    """

    method: str
    accuracy: float
    loss: float
    seconds: float
    steps: int
    rounds: int
    sent_bytes: int | None
    counts: dict[str, int]


def train_digits(
    here: World, settings: Settings, recipe: Recipe, on_step: Callable[[int, int, float], None]
) -> Result:
    """Train on the bundled digits. Collective over the world's communicator.

    Parameters
    ----------
    here : World
    settings : Settings
    recipe : Recipe
        The method.
    on_step : callable
        Called after every step with its number, the number of all steps, and the loss of this rank.
    """
    method = recipe.make()
    here.agree("train digits", [*asdict(settings).items(), *readable(method).items()])
    with here.shared_errors("loading the digits"):
        train, test = digits.load()
    network = digits.model(settings.seed)
    base = torch.optim.SGD(network.parameters(), lr=settings.lr, momentum=settings.momentum)
    epochs = [
        digits.batches(len(train.labels), settings.batch, here.rank, here.size, settings.seed, epoch)
        for epoch in range(settings.epochs)
    ]
    order = [batch for epoch in epochs for batch in epoch]
    if not order:
        raise SettingError(
            f"batch={settings.batch}: {here.size} ranks need {here.size * settings.batch} images"
        )
    optimizer = DistributedOptimizer(base, method, model=network, schedule=settings.schedule)
    began = time.perf_counter()
    for step, batch in enumerate(order, 1):
        loss = optimizer.step(_closure(optimizer, network, train.images[batch], train.labels[batch]))
        on_step(step, len(order), float(loss))
    seconds = time.perf_counter() - began
    stats = optimizer.stats
    with optimizer.consensus():
        accuracy = digits.accuracy(network, test)
    sent = None if stats.uncounted_calls else stats.sent_bytes
    rounds = stats.counts.get("rounds", 0)
    return Result(recipe.name, accuracy, float(loss), seconds, len(order), rounds, sent, dict(stats.counts))


def _closure(
    optimizer: DistributedOptimizer, network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], float]:
    def evaluate() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        return float(loss.detach())

    return evaluate
