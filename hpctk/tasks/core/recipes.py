"""Methods by the names of the command line, with settings that suit the bundled jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpctk.compressors import Compressor, by_name, forms
from hpctk.errors import SettingError
from hpctk.methods import METHODS, method_class
from hpctk.methods.core.method import Method
from hpctk.settings import settings_of
from hpctk.tasks.core import names
from hpctk.tasks.core.settings import Settings

#: What `--method all` compares: plain averaging, and the five methods (GRAWA in both forms).
COMPARED = ("mean", "adacons", "sasg", "saef", "mgrawa", "lgrawa", "celgc")

#: Settings that differ from the constructor's defaults: the bundled jobs are small and short.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "sasg": {"density": 0.05, "alpha": 0.25, "reduce": "mean"},
    "saef": {"compressor": "topk:0.05"},
    "mgrawa": {"period": 8},
    "lgrawa": {"period": 8},
    "celgc": {"clip": 0.5, "period": 8},
    "localsgd": {"period": 8},
}


@dataclass(frozen=True)
class Recipe:
    """A method as the command line names it.

    Attributes
    ----------
    name : str
        Such as "saef", or "mean:topk:0.01".
    settings : dict
        Of its constructor.
    """

    name: str
    settings: Mapping[str, Any]

    def make(self) -> Method:
        """Return a new method object: compressors keep a state of their own."""
        kind = classes()[self.name.partition(":")[0]]
        names.check_method_settings(self.name, list(self.settings))
        declared = settings_of(kind)
        # Compressors and none have to be written as texts.
        given = {
            key: declared[key].parse(key, value) if isinstance(value, str) else value
            for key, value in self.settings.items()
        }
        try:
            made: Method = kind(**given)
        except TypeError as error:
            raise SettingError(f"{self.name}: {error}") from None
        return made


def recipe(text: str, suited: Mapping[str, Mapping[str, Any]] = SETTINGS) -> Recipe:
    """Return the recipe of one method; "mean:COMPRESSOR" is averaging with that compressor."""
    name, _, compressor = text.partition(":")
    names.check_method(text)
    if compressor:
        if name != "mean":
            raise SettingError(
                f"method={text!r}: only mean takes a compressor so; give others --compressor ..."
            )
        by_name(compressor)
        return Recipe(text, {"compressor": compressor})
    return Recipe(name, suited.get(name, {}))


def recipes(settings: Settings, suited: Mapping[str, Mapping[str, Any]]) -> list[Recipe]:
    """Return the recipes that the settings of a job name; "all" is plain averaging and the five methods.

    Parameters
    ----------
    settings : Settings
    suited : mapping
        Settings of methods that suit the task.
    """
    words = COMPARED if settings.method == "all" else settings.method.split(",")
    found = [recipe(word.strip(), {**SETTINGS, **suited}) for word in words]
    doubled = {one.name for one in found if [two.name for two in found].count(one.name) > 1}
    if doubled:
        raise SettingError(f"method={settings.method!r}: {', '.join(doubled)} is there twice")
    given = dict(settings.method_settings)
    if settings.compressor is not None:
        by_name(settings.compressor)
        given["compressor"] = settings.compressor
    if given and len(found) > 1:
        raise SettingError(
            f"{', '.join(given)}: give one method with it, settings differ from method to method"
        )
    return [replace(one, settings={**one.settings, **given}) for one in found]


def classes() -> dict[str, Any]:
    """Return the classes of all methods by their names on the command line."""
    return {name.lower(): method_class(name) for name in METHODS}


def compressor_forms() -> str:
    """Return how compressors are written on the command line."""
    return ", ".join(forms())


def readable(method: Method) -> dict[str, Any]:
    """Return a method's settings as JSON can hold them."""
    return {
        key: value if isinstance(value, str | int | float | bool | dict | None) else str(value)
        for key, value in method.settings().items()
        if not isinstance(value, Compressor)
    }
