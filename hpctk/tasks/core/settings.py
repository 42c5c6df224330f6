"""What a training job is told: one dataclass per task, filled from its defaults, a TOML file and the command line.

Every setting is a field made by `setting`, which carries its meaning and what is allowed; the command line, the
error messages and the saved settings.toml are all made from these fields.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from hpctk.errors import SettingError

#: Settings that may differ when a run is resumed: they do not change what is computed.
FREE = ("time_budget_s", "checkpoint_steps", "checkpoint_minutes")

#: The name of the saved settings in the folder of a run.
SAVED = "settings.toml"

_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}

T = TypeVar("T", bound="Settings")


def setting(
    default: Any, meaning: str, *, range: tuple[float, float] | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """Declare one setting: its default, what it means, and what is allowed."""
    metadata = {"meaning": meaning, "range": range, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """What every training job can be told; all ranks must be told the same."""

    task: ClassVar[str]

    method: str = setting("mean", "a method, several with commas, or all")
    method_settings: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"meaning": "settings of the method", "range": None, "choices": ()}
    )
    compressor: str | None = setting(None, "the method's compressor, such as topk:0.01")
    schedule: str = setting("ring", "how dense tensors are averaged; hpctk schedule list shows all")
    lr: float = setting(0.1, "learning rate of SGD", range=(0.0, 100.0))
    momentum: float = setting(0.9, "momentum of SGD", range=(0.0, 1.0))
    seed: int = setting(1, "of the model, the order of the data and dropout", range=(0, 2**31 - 1))
    time_budget_s: float | None = setting(
        None, "end after so many seconds of training, on rank 0's clock", range=(1e-3, 1e9)
    )
    checkpoint_steps: int | None = setting(None, "save a checkpoint every so many steps", range=(1, 10**9))
    checkpoint_minutes: float | None = setting(
        None, "save a checkpoint every so many minutes", range=(1e-3, 1e6)
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(field, kind_of(type(self), field.name), self))


@dataclass(frozen=True)
class EpochSettings(Settings):
    """Of a task that goes over its data several times."""

    epochs: int = setting(10, "passes over the data", range=(1, 10_000))
    batch: int = setting(16, "samples per rank and step", range=(1, 1_000_000))


def kind_of(settings: type[Settings], name: str) -> tuple[type, bool]:
    """Return the type of a setting's values, and whether it may be left out."""
    hint = get_type_hints(settings)[name]
    if not isinstance(hint, UnionType):
        return (dict if getattr(hint, "__origin__", hint) is dict else hint), False
    given = [one for one in get_args(hint) if one is not NoneType]
    return given[0], True


def checked(field: dataclasses.Field[Any], kind: tuple[type, bool], settings: Settings) -> Any:
    """Return the value of one setting, a whole number as float where that is asked for; else SettingError."""
    (wanted, optional), value = kind, getattr(settings, field.name)
    if value is None and optional:
        return None
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise SettingError(f"{field.name}={value!r}: need {_NAMES[wanted]}")
    range, choices = field.metadata["range"], field.metadata["choices"]
    if range is not None and not range[0] <= value <= range[1]:
        raise SettingError(f"{field.name}={value}: allowed are {_number(range[0])} to {_number(range[1])}")
    if choices and value not in choices:
        raise SettingError(f"{field.name}={value!r}: allowed are {', '.join(choices)}")
    return value


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def read(path: Path, kind: type[Settings]) -> dict[str, Any]:
    """Return the settings that a TOML file gives; SettingError where one is unknown or it is for another task."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'it is no text'})"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path}: is not TOML: {error}") from None
    task = given.pop("task", kind.task)
    if task != kind.task:
        raise SettingError(f"{path}: task={task!r}, but the command line says {kind.task}")
    known = [field.name for field in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            raise SettingError(
                f"{path}: no setting {name!r} for {kind.task}: known are task, {', '.join(known)}"
            )
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
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None or isinstance(value, dict):
            continue
        lines.append(f"{field.name} = {_toml_value(value)}  # {field.metadata['meaning']}")
    if settings.method_settings:
        lines += ["", "[method_settings]"]
        lines += [
            f"{_toml_value(key)} = {_toml_value(value)}" for key, value in settings.method_settings.items()
        ]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        # A JSON string is a TOML string, but for one character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return str(value).lower() if isinstance(value, bool) else repr(value)
