"""What each bundled job can be told: one dataclass per task, filled from a TOML file and the command line.

None of this needs torch: the command line knows all options, and finds what is wrong with its words, before anything
heavy is imported.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hpctk.errors import SettingError
from hpctk.settings import check, read_toml, setting, settings_of

#: Settings that may differ when a run is resumed: they do not change what is computed.
FREE = ("time_budget_s", "checkpoint_steps", "checkpoint_minutes", "on_lost_rank", "buddy")

#: The name of the saved settings in the folder of a run.
SAVED = "settings.toml"

#: What several jobs have, each with a default of its own.
_EPOCHS: dict[str, Any] = {"meaning": "passes over the data", "at_least": 1, "at_most": 10_000}
_COUNT: dict[str, Any] = {"at_least": 1, "at_most": 1_000_000}
_RATE: dict[str, Any] = {"meaning": "learning rate of SGD", "at_least": 0, "at_most": 100}
_SHARE: dict[str, Any] = {"at_least": 0, "at_most": 1}

T = TypeVar("T", bound="Settings")


@dataclass(frozen=True)
class Settings:
    """What every training job can be told; all ranks must be told the same."""

    task: ClassVar[str]

    method: str = setting("mean", "a method, several with commas, or all")
    method_settings: dict[str, Any] = setting({}, "settings of the method")
    compressor: str | None = setting(None, "the method's compressor, such as topk:0.01")
    schedule: str = setting("ring", "how dense tensors are averaged; hpctk schedule list shows all")
    lr: float = setting(0.1, **_RATE)
    momentum: float = setting(0.9, "momentum of SGD", **_SHARE)
    seed: int = setting(1, "of the model, the order of the data and dropout", at_least=0, at_most=2**31 - 1)
    time_budget_s: float | None = setting(
        None, "end after so many seconds of training, on rank 0's clock", at_least=1e-3, at_most=1e9
    )
    checkpoint_steps: int | None = setting(None, "save a checkpoint every so many steps", at_least=1, at_most=10**9)
    checkpoint_minutes: float | None = setting(
        None, "save a checkpoint every so many minutes", at_least=1e-3, at_most=1e6
    )

    on_lost_rank: str | None = setting(
        None,
        "end the job when a rank is gone, or go on without it",
        choices=("raise", "shrink"),
        shown="as HPCTK_ON_LOST_RANK says",
    )
    buddy: int | None = setting(
        None,
        "with --on-lost-rank shrink: steps between two copies of a rank's residuals on the next rank",
        at_least=1,
        at_most=10**9,
        shown="as HPCTK_BUDDY says",
    )

    def __post_init__(self) -> None:
        for name, value in check(self).items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class EpochSettings(Settings):
    """Of a task that goes over its data several times."""

    epochs: int = setting(10, **_EPOCHS)
    batch: int = setting(16, "samples per rank and step", **_COUNT)


@dataclass(frozen=True)
class RegressionSettings(Settings):
    """Of hpctk.tasks.regression."""

    task: ClassVar[str] = "regression"

    updates: int = setting(500, "steps of the optimizer", **_COUNT)
    global_batch: int = setting(128, "samples of a micro-batch, split over the ranks", **_COUNT)
    step_size: str = setting("oracle", "the best step (gradient methods only), or lr", choices=("oracle", "fixed"))
    lr: float = setting(0.003, **{**_RATE, "meaning": "learning rate with step_size fixed"})
    momentum: float = setting(0.0, "momentum of SGD", **_SHARE)


@dataclass(frozen=True)
class DigitsSettings(EpochSettings):
    """Of hpctk.tasks.digits."""

    task: ClassVar[str] = "digits"

    epochs: int = setting(20, **_EPOCHS)


@dataclass(frozen=True)
class FashionSettings(EpochSettings):
    """Of hpctk.tasks.fashion."""

    task: ClassVar[str] = "fashion"

    data: str | None = setting(None, "the folder with the four IDX files; without it, Debian's package")
    model: str = setting("mlp", "the network", choices=("mlp", "cnn"))
    epochs: int = setting(3, **_EPOCHS)
    batch: int = setting(32, "images per rank and step", **_COUNT)
    lr: float = setting(0.05, **_RATE)


@dataclass(frozen=True)
class LanguageModelSettings(EpochSettings):
    """Of hpctk.tasks.lm."""

    task: ClassVar[str] = "lm"

    data: str | None = setting(None, "the text file; without it, Python's manual")
    hidden: int = setting(128, "size of the LSTM's state", at_least=1, at_most=16384)
    window: int = setting(64, "bytes that the model sees in one piece", at_least=1, at_most=65536)
    epochs: int = setting(3, **_EPOCHS)
    batch: int = setting(8, "windows per rank and step", **_COUNT)
    lr: float = setting(1.0, **_RATE)


#: By the task's name on the command line.
SETTINGS: dict[str, type[Settings]] = {
    kind.task: kind for kind in (RegressionSettings, DigitsSettings, FashionSettings, LanguageModelSettings)
}


def read(path: Path, kind: type[Settings]) -> dict[str, Any]:
    """Return the settings that a TOML file gives; SettingError where one is unknown or it is for another task."""
    given = read_toml(path)
    task = given.pop("task", kind.task)
    if task != kind.task:
        raise SettingError(f"{path}: task={task!r}, but the command line says {kind.task}")
    known = settings_of(kind)
    for name in given:
        if name not in known:
            raise SettingError(f"{path}: no setting {name!r} for {kind.task}: known are task, {', '.join(known)}")
    try:
        kind(**given)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None
    return given


def resolve(kind: type[T], *layers: Mapping[str, Any]) -> T:
    """Return the settings that layers give, later ones winning; settings of methods are merged one by one."""
    merged: dict[str, Any] = {}
    for layer in layers:
        tables = {**merged.get("method_settings", {}), **layer.get("method_settings", {})}
        merged |= layer
        if tables:
            merged["method_settings"] = tables
    return kind(**merged)


def differences(saved: Mapping[str, Any], now: Settings) -> list[str]:
    """Return what keeps a run that was saved with other settings from going on with these."""
    before = dataclasses.asdict(resolve(type(now), saved))
    return [
        f"{name} was {before[name]!r}, not {value!r}"
        for name, value in dataclasses.asdict(now).items()
        if name not in FREE and before[name] != value
    ]


def toml(settings: Settings, remark: str) -> str:
    """Return the settings as a TOML file that people can read, and `read` too."""
    lines = [f"# {remark}", f"task = {_toml_value(settings.task)}"]
    for name, about in settings_of(type(settings)).items():
        value = getattr(settings, name)
        if value is not None and not isinstance(value, dict):
            lines.append(f"{name} = {_toml_value(value)}  # {about.meaning}")
    if settings.method_settings:
        lines += ["", "[method_settings]"]
        lines += [f"{_toml_value(key)} = {_toml_value(value)}" for key, value in settings.method_settings.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        # A JSON string is a TOML string, but for one character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return str(value).lower() if isinstance(value, bool) else repr(value)
