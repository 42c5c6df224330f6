"""The names that a job is told, checked without torch: methods, their settings, schedules.

A misspelt name is said at once, by every way to it the same; values are checked where they are used.
"""

from __future__ import annotations

import ast
from importlib.resources import files

from hpctk.errors import SettingError
from hpctk.methods import METHODS
from hpctk.nearest import hint
from hpctk.schedules.core.registry import names as schedule_names
from hpctk.tasks.core.settings import Settings

#: What may stand for a schedule: the best by the calibration, or the one of the library that moves the bytes.
OTHER_SCHEDULES = ("auto", "mpi", "torch")

#: On the command line methods are in lower case.
_PUBLIC = {name.lower(): name for name in METHODS}


def check(settings: Settings) -> None:
    """Raise SettingError for a method, a method's setting or a schedule that is not known."""
    methods = [word.strip() for word in settings.method.split(",")]
    for text in methods:
        if text != "all" or len(methods) > 1:
            check_method(text)
    if len(methods) == 1 and methods[0] != "all":
        check_method_settings(methods[0], list(settings.method_settings))
    check_schedule(settings.schedule)


def check_method(text: str) -> None:
    """Raise SettingError unless a text begins with the name of a method: "saef", "mean:topk:0.01"."""
    name = text.partition(":")[0]
    if name not in _PUBLIC:
        raise SettingError(
            f"method={text!r}: {hint(name, _PUBLIC)}known are {', '.join(_PUBLIC)}, and all by itself"
        )


def check_method_settings(text: str, given: list[str]) -> None:
    """Raise SettingError for a setting that the method does not have."""
    known = method_settings(text.partition(":")[0])
    for key in given:
        if key not in known:
            raise SettingError(
                f"{text} has no setting {key!r}: {hint(key, known)}known are {', '.join(known) or 'none'}"
            )


def check_schedule(name: str) -> None:
    """Raise SettingError unless dense tensors can be averaged by this schedule somewhere."""
    known = [*schedule_names("allreduce", with_nodes=True), *OTHER_SCHEDULES]
    if name not in known:
        raise SettingError(f"schedule={name!r}: {hint(name, known)}known are {', '.join(known)}")


def method_settings(name: str) -> list[str]:
    """Return the settings of a method, read from its source: to import it is to import torch.

    Parameters
    ----------
    name : str
        As on the command line.
    """
    public = _PUBLIC[name]
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
