"""Methods by the names of the command line, with settings that suit the bundled jobs.

Names are checked without torch (`check`): a misspelt method, setting or schedule is said at once. Values are checked
where they are used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from hpctk.errors import SettingError
from hpctk.methods import METHODS, PUBLIC, by_name, names
from hpctk.nearest import hint
from hpctk.schedules.core.registry import names as schedule_names
from hpctk.schedules.core.registry import offered as offered_schedules
from hpctk.settings import settings_of
from hpctk.tasks.core.settings import Settings

if TYPE_CHECKING:
    from hpctk.methods.core.method import Method

#: What may stand for a schedule: the best by the calibration, or the one of the library that moves the bytes.
OTHER_SCHEDULES = ("auto", "shared_memory", "mpi", "torch")

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
    "episode": {"clip": 0.5, "period": 8},
    # The constructor's outer rate and momentum are for AdamW and long training; with SGD's momentum they overshoot.
    "diloco": {"period": 16, "outer_lr": 0.5, "outer_momentum": 0.5},
    # A sixteenth of the elements: of the default's 1.6 % few coincide, and small models have few to begin with.
    "sparseloco": {"period": 8, "k": 256, "outer_lr": 0.4},
    # The jobs' SGD has the momentum: with one of EF21's own beside it the estimate lags too far behind.
    "ef21": {"compressor": "topk:0.1", "momentum": 0.0},
}


def check(settings: Settings) -> None:
    """Raise SettingError for a method, a method's setting or a schedule that is not known; imports no torch."""
    methods = [word.strip() for word in settings.method.split(",")]
    for text in methods:
        if text != "all" or len(methods) > 1:
            _check_method(text)
    # Those of another package's method are checked when that is made: to read them is to import it.
    if len(methods) == 1 and methods[0].partition(":")[0] in PUBLIC:
        _check_settings(methods[0], settings.method_settings)
    known = [*schedule_names("allreduce", with_nodes=True), *OTHER_SCHEDULES]
    if settings.schedule not in known and settings.schedule not in offered_schedules():
        known += offered_schedules()
        raise SettingError(
            f"schedule={settings.schedule!r}: {hint(settings.schedule, known)}known are {', '.join(known)}"
        )


def _check_method(text: str) -> None:
    name = text.partition(":")[0]
    if name in PUBLIC:
        return
    known = names()
    if name not in known:
        raise SettingError(f"method={text!r}: {hint(name, known)}known are {', '.join(known)}, and all by itself")


def _check_settings(text: str, given: Iterable[str], known: Iterable[str] | None = None) -> None:
    """Raise SettingError for a setting that is not among the known, those of hpctk's own method where not given."""
    known = list(method_settings(text.partition(":")[0]) if known is None else known)
    for key in given:
        if key not in known:
            raise SettingError(
                f"{text} has no setting {key!r}: {hint(key, known)}known are {', '.join(known) or 'none'}"
            )


def method_settings(name: str) -> list[str]:
    """Return the settings of a method of hpctk, read from its source: to import it is to import torch."""
    public = PUBLIC[name]
    source = files("hpctk.methods").joinpath(f"{METHODS[public]}.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return _fields(classes, public)


def _fields(classes: dict[str, ast.ClassDef], name: str) -> list[str]:
    """Return the fields of a dataclass: those of its bases in the same file, then its own."""
    if name not in classes:
        return []
    inherited = [field for base in classes[name].bases for field in _fields(classes, getattr(base, "id", ""))]
    own = [
        node.target.id
        for node in classes[name].body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not ast.unparse(node.annotation).startswith(("ClassVar", "InitVar"))
    ]
    return list(dict.fromkeys([*inherited, *own]))


@dataclass(frozen=True)
class Recipe:
    """A method as the command line names it, such as "saef" or "mean:topk:0.01", and the settings it is made with."""

    name: str
    settings: Mapping[str, Any]

    def make(self) -> Method:
        """Return a new method object: compressors keep a state of their own."""
        kind = by_name(self.name.partition(":")[0])
        declared = settings_of(kind)
        _check_settings(self.name, self.settings, declared)
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


def recipes(settings: Settings, suited: Mapping[str, Mapping[str, Any]]) -> list[Recipe]:
    """Return the recipes that the settings of a job name; "all" is plain averaging and the five methods.

    `suited` are settings of methods that suit the task.
    """
    from hpctk.compressors import by_name as compressor_by_name

    words = COMPARED if settings.method == "all" else settings.method.split(",")
    found = [_recipe(word.strip(), {**SETTINGS, **suited}) for word in words]
    doubled = {one.name for one in found if [two.name for two in found].count(one.name) > 1}
    if doubled:
        raise SettingError(f"method={settings.method!r}: {', '.join(doubled)} is there twice")
    given = dict(settings.method_settings)
    if settings.compressor is not None:
        compressor_by_name(settings.compressor)
        given["compressor"] = settings.compressor
    if given and len(found) > 1:
        raise SettingError(f"{', '.join(given)}: give one method with it, settings differ from method to method")
    return [replace(one, settings={**one.settings, **given}) for one in found]


def _recipe(text: str, suited: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """Return the recipe of one method; "mean:COMPRESSOR" is averaging with that compressor."""
    from hpctk.compressors import by_name as compressor_by_name

    name, _, compressor = text.partition(":")
    _check_method(text)
    if not compressor:
        return Recipe(name, suited.get(name, {}))
    if name != "mean":
        raise SettingError(f"method={text!r}: only mean takes a compressor so; give others --compressor ...")
    compressor_by_name(compressor)
    return Recipe(text, {"compressor": compressor})


def classes() -> dict[str, Any]:
    """Return the classes of all methods by their names on the command line."""
    return {name: by_name(name) for name in names()}


def readable(method: Method) -> dict[str, Any]:
    """Return a method's settings as JSON can hold them."""
    return {
        key: value if isinstance(value, str | int | float | bool | dict | None) else str(value)
        for key, value in method.settings().items()
    }
