"""What each bundled job can be told, apart from the jobs themselves: none of this needs torch.

So the command line knows all options, and finds what is wrong with the words it is given, before anything heavy is
imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpctk.tasks.core.settings import EpochSettings, Settings, setting


@dataclass(frozen=True)
class RegressionSettings(Settings):
    """Of hpctk.tasks.regression."""

    task: ClassVar[str] = "regression"

    updates: int = setting(500, "steps of the optimizer", range=(1, 1_000_000))
    global_batch: int = setting(128, "samples of a micro-batch, split over the ranks", range=(1, 1_000_000))
    step_size: str = setting(
        "oracle", "the best step (gradient methods only), or lr", choices=("oracle", "fixed")
    )
    lr: float = setting(0.003, "learning rate with step_size fixed", range=(0.0, 100.0))
    momentum: float = setting(0.0, "momentum of SGD", range=(0.0, 1.0))


@dataclass(frozen=True)
class DigitsSettings(EpochSettings):
    """Of hpctk.tasks.digits."""

    task: ClassVar[str] = "digits"

    epochs: int = setting(20, "passes over the data", range=(1, 10_000))


@dataclass(frozen=True)
class FashionSettings(EpochSettings):
    """Of hpctk.tasks.fashion."""

    task: ClassVar[str] = "fashion"

    data: str | None = setting(None, "the folder with the four IDX files; without it, Debian's package")
    model: str = setting("mlp", "the network", choices=("mlp", "cnn"))
    epochs: int = setting(3, "passes over the data", range=(1, 10_000))
    batch: int = setting(32, "images per rank and step", range=(1, 1_000_000))
    lr: float = setting(0.05, "learning rate of SGD", range=(0.0, 100.0))


@dataclass(frozen=True)
class LanguageModelSettings(EpochSettings):
    """Of hpctk.tasks.lm."""

    task: ClassVar[str] = "lm"

    data: str | None = setting(None, "the text file; without it, Python's manual")
    hidden: int = setting(128, "size of the LSTM's state", range=(1, 16384))
    window: int = setting(64, "bytes that the model sees in one piece", range=(1, 65536))
    epochs: int = setting(3, "passes over the data", range=(1, 10_000))
    batch: int = setting(8, "windows per rank and step", range=(1, 1_000_000))
    lr: float = setting(1.0, "learning rate of SGD", range=(0.0, 100.0))


#: By the task's name on the command line.
SETTINGS: dict[str, type[Settings]] = {
    kind.task: kind for kind in (RegressionSettings, DigitsSettings, FashionSettings, LanguageModelSettings)
}
