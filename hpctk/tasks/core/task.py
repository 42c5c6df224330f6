"""What a bundled training job is: data in an order that all ranks know, a model, a loss and a verdict.

A new one is a file beside this one, an entry in `hpctk.tasks`, a test, and a row in docs/training.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch

from hpctk.errors import SettingError
from hpctk.methods.core.method import Method
from hpctk.optimizer import DistributedOptimizer
from hpctk.tasks.core.settings import EpochSettings, Settings

S = TypeVar("S", bound=Settings)
E = TypeVar("E", bound=EpochSettings)


class Task(ABC, Generic[S]):
    """A training job: derive, give it an entry in the registry.

    An epoch has `samples` samples, known once `load` is over, in an order that is the same on all ranks; a step takes
    the next of them, some for each rank. So "samples done in this epoch" says where a job is, whatever the number of
    ranks.
    """

    settings_class: ClassVar[type[Settings]]
    #: Settings of methods that suit this task better than the constructors' defaults.
    recipes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    samples: int

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @abstractmethod
    def load(self) -> None:
        """Read the data. Local. HpctkError says what is wrong with them, or how to get them."""

    @property
    @abstractmethod
    def epochs(self) -> int:
        """How often all samples are seen."""

    @abstractmethod
    def step_samples(self, size: int) -> int:
        """Return how many samples one step of `size` ranks takes."""

    @abstractmethod
    def batch(self, rank: int, size: int, epoch: int, done: int) -> Any:
        """Return the samples of one rank in the step that begins where `done` samples of the epoch are over."""

    @abstractmethod
    def make_model(self) -> torch.nn.Module:
        """Return the model at its start; draws from torch's global generator."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of one batch."""

    @abstractmethod
    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return what the model is worth by name, what counts most first. Local; the model is in eval mode."""

    def check(self, size: int, method: Method) -> None:
        """Raise SettingError where the settings make no sense for so many ranks or this method."""
        if self.samples < self.step_samples(size):
            raise SettingError(
                f"batch={self.step_samples(size) // size}: {size} ranks need {self.step_samples(size)} samples "
                f"for one step, there are {self.samples}"
            )

    def model(self) -> torch.nn.Module:
        """Return the model at its start, the same for the same seed; torch's global generator stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            return self.make_model()

    def step(self, optimizer: DistributedOptimizer, model: torch.nn.Module, batch: Any) -> float:
        """Do one optimizer step; return the loss. Collective over the communicator, as optimizer.step is."""
        return float(optimizer.step(self.closure(optimizer, model, batch)))

    def closure(self, optimizer: DistributedOptimizer, model: torch.nn.Module, batch: Any) -> Callable[[], float]:
        """Return what computes the gradients of one batch, and returns its loss."""

        def evaluate() -> float:
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            return float(loss.detach())

        return evaluate


class ShuffledTask(Task[E]):
    """A task whose samples lie in memory, in another order in each epoch."""

    def __init__(self, settings: E) -> None:
        super().__init__(settings)
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    @property
    def epochs(self) -> int:
        """As the settings say."""
        return self.settings.epochs

    def step_samples(self, size: int) -> int:
        """Return how many samples one step of `size` ranks takes."""
        return self.settings.batch * size

    def batch(self, rank: int, size: int, epoch: int, done: int) -> Any:
        """Return the rank's part of the next samples of the epoch's order."""
        first = done + rank * self.settings.batch
        return self.pick(self.order(epoch)[first : first + self.settings.batch])

    @abstractmethod
    def pick(self, indices: torch.Tensor) -> Any:
        """Return the samples at these places."""

    def order(self, epoch: int) -> torch.Tensor:
        """Return the order of the samples in one epoch, the same on all ranks."""
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.settings.seed * 100_003 + epoch)
            self._order = (epoch, torch.randperm(self.samples, generator=generator))
        return self._order[1]
