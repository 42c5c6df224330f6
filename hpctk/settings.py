"""A setting: its type, range, meaning and default, declared once.

    @documented
    @dataclass(frozen=True)
    class Sparse:
        period: int = field(metadata=required("steps between rounds", at_least=1))
        density: float = setting(0.01, "share of the elements that travels", above=0, at_most=1)

        def __post_init__(self) -> None:
            check(self)

Methods, compressors, training jobs, job scripts and environment variables all declare theirs so. Checks and their
messages, `--help`, docstrings and the tables of docs/settings.md are made from the declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hpctk.errors import SettingError

#: The default of a setting that has to be given.
REQUIRED: Any = object()
_KEY = "setting"
_DECLARED: dict[type, dict[str, Setting]] = {}
#: How values of a type are called.
_CALLED = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a table",
    tuple: "a list of texts",
    Callable: "a function",
    Path: "a path",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What is known of one setting.

    Attributes
    ----------
    meaning : str
        In one line.
    kind : type
        Of its values. A float may be given as a whole number, a tuple as a list.
    default : object
        REQUIRED where it has to be given.
    above, at_least, below, at_most : float, optional
        Its range. Infinity is only allowed by at_most=math.inf, NaN never.
    choices : tuple of str
        All that is allowed, where that is a few texts.
    allowed, is_allowed : str, callable
        What else is asked of a value, in words and as a function that is true for values of the type that have it.
    optional : bool
        Whether None is allowed.
    parser : callable, optional
        Reads a value from a text, where the type alone does not.
    shown : str
        What a default is called where the value does not say it.
    metavar : str
        What a value is called in `--help`.
    """

    meaning: str
    kind: Any = str
    default: Any = REQUIRED
    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    allowed: str = ""
    is_allowed: Callable[[Any], object] | None = None
    optional: bool = False
    parser: Callable[[str], Any] | None = None
    shown: str = ""
    metavar: str = ""

    def field(self, default: Any) -> Any:
        """Return the field of a dataclass for this setting, with a default."""
        if isinstance(default, dict):
            return dataclasses.field(default_factory=default.copy, metadata={_KEY: self})
        return dataclasses.field(default=default, metadata={_KEY: self})

    def check(self, name: str, value: Any) -> Any:
        """Return a value as its type wants it; SettingError names the setting, the value and what is allowed."""
        if value is None and self.optional:
            return None
        wanted = self._converted(value)
        if not self._is_kind(wanted) or not self._in_range(wanted):
            raise SettingError(f"{name}={value!r}: {self._need()}")
        return wanted

    def parse(self, name: str, text: str) -> Any:
        """Return the value that a text stands for, checked; "none" is None where that is allowed."""
        if self.optional and text.lower() == "none":
            return None
        if self.parser is not None:
            return self.check(name, self.parser(text))
        words = {"true": True, "false": False}
        try:
            value = words[text.lower()] if self.kind is bool else self.kind(text)
            return self.check(name, value)
        except (KeyError, ValueError):
            raise SettingError(f"{name}={text!r}: {self._need()}") from None

    @property
    def values(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return ", ".join(self.choices)
        return self.allowed or f"{self._called()}{self._range()}"

    @property
    def default_text(self) -> str:
        """The default, in words; empty where it has to be given."""
        if self.shown or self.default is REQUIRED:
            return self.shown
        if self.default in (None, (), {}):
            return "none"
        return str(self.default).lower() if isinstance(self.default, bool) else _number(self.default)

    @property
    def help(self) -> str:
        """The meaning with the default in brackets, for argparse."""
        none = self.default_text in ("", "none")
        return (self.meaning if none else f"{self.meaning} [{self.default_text}]").replace("%", "%%")

    def _converted(self, value: Any) -> Any:
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                return math.inf
        if self.kind is tuple and isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(value)
        return value

    def _is_kind(self, value: Any) -> bool:
        if self.kind is Callable:
            return callable(value)
        if not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            return False
        return self.kind is not tuple or all(isinstance(one, str) for one in value)

    def _in_range(self, value: Any) -> bool:
        if self.kind is float and not (math.isfinite(value) or value == self.at_most):
            return False
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
            and (not self.choices or value in self.choices)
            and (self.is_allowed is None or bool(self.is_allowed(value)))
        )

    def _need(self) -> str:
        return f"{'allowed are' if self.choices else 'need'} {self.values}{', or none' if self.optional else ''}"

    def _called(self) -> str:
        if self.kind is float and self.below is None and self.at_most is None:
            return "a finite number"
        return _CALLED.get(self.kind) or f"a {self.kind.__name__}"

    def _range(self) -> str:
        most = None if self.at_most == math.inf else self.at_most
        if self.at_least is not None and (most is not None or self.below is not None):
            end = f"below {_number(self.below)}" if most is None else _number(most)
            return f" from {_number(self.at_least)} to {end}"
        parts = []
        if self.above is not None:
            parts.append(f" above {_number(self.above)}")
        if self.at_least is not None:
            parts.append(f", {_number(self.at_least)} or more")
        if self.below is not None:
            parts.append(f" below {_number(self.below)}")
        if most is not None:
            parts.append(f", at most {_number(most)}")
        return "".join(parts)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def setting(default: Any, meaning: str, **rules: Any) -> Any:
    """Return the field of a dataclass for a setting; `rules` are the other attributes of Setting."""
    return Setting(meaning, **rules).field(default)


def required(meaning: str, **rules: Any) -> dict[str, Any]:
    """Return the metadata of a field for a setting without a default: `field(metadata=required(...))`."""
    return {_KEY: Setting(meaning, **rules)}


def settings_of(kind: type) -> dict[str, Setting]:
    """Return the settings that a dataclass declares by name; fields that are none are left out."""
    if kind not in _DECLARED:
        hints = get_type_hints(kind)
        # Positional ones first, as the constructor takes them.
        fields = sorted(dataclasses.fields(kind), key=lambda one: one.kw_only is True)
        _DECLARED[kind] = {one.name: _declared(one, hints[one.name]) for one in fields if _KEY in one.metadata}
    return _DECLARED[kind]


def _declared(field: dataclasses.Field[Any], hint: Any) -> Setting:
    kind, optional = _kind_of(hint)
    default = field.default if field.default_factory is MISSING else field.default_factory()
    default = REQUIRED if default is MISSING else default
    rules: Setting = field.metadata[_KEY]
    return dataclasses.replace(rules, kind=kind, optional=optional, default=default)


def _kind_of(hint: Any) -> tuple[Any, bool]:
    """Return the type that an annotation names, and whether it allows None."""
    if isinstance(hint, UnionType):
        (given,) = [one for one in get_args(hint) if one is not NoneType]
        return _kind_of(given)[0], True
    origin = get_origin(hint)
    if origin is not None and issubclass(tuple, origin):
        return tuple, False
    return (Callable if str(hint).startswith("collections.abc.Callable") else origin or hint), False


def check(owner: Any) -> dict[str, Any]:
    """Check all settings of a dataclass's instance, and return their values as their types want them.

    Raises
    ------
    SettingError
        Names the first setting that is not allowed, its value, and what is allowed.
    """
    declared = settings_of(type(owner))
    return {name: one.check(name, getattr(owner, name)) for name, one in declared.items()}


def documented(kind: type[T]) -> type[T]:
    """Add the settings of a dataclass to its docstring."""
    # Without the indentation of the class's body, which Python itself takes off since 3.13.
    lines = [inspect.cleandoc(kind.__doc__ or ""), "", "Parameters", "----------"]
    for name, one in settings_of(kind).items():
        default = f", by default {one.default_text}" if one.default_text else ""
        lines += [f"{name} : {one.values}{default}", f"    {one.meaning[0].upper()}{one.meaning[1:]}."]
    kind.__doc__ = "\n".join(lines) + "\n"
    return kind


def rows(declared: Mapping[str, Setting]) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, allowed values, default and meaning of each setting, for a table."""
    for name, one in declared.items():
        yield name, one.values, one.default_text, one.meaning


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds; SettingError names the file and what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise SettingError(f"{path}: cannot be read ({reason})") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path}: is not TOML: {error}") from None
