"""What other packages bring: methods, compressors and schedules, found by their entry points.

    [options.entry_points]
    hpctk.methods =
        localclip = my_package.local_clip:LocalClip

The name is what a command line says. Names are read from the metadata of installed packages; a package is imported
when its name is used. See docs/extend.md.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hpctk.errors import SettingError
from hpctk.log import log

METHODS = "hpctk.methods"
COMPRESSORS = "hpctk.compressors"
SCHEDULES = "hpctk.schedules"


@cache
def _offered(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return what installed packages offer, by name; several where they disagree."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=group):
        # A package that is on the path twice, as an editable install often is, offers the same thing twice.
        found.setdefault(point.name, {})[point.value] = point
    return {name: tuple(found[name].values()) for name in sorted(found)}


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def names(group: str, own: Container[str]) -> list[str]:
    """Return the names that other packages offer; those that hpctk has itself, `own`, are left out with a warning."""
    allowed = []
    for name, points in _offered(group).items():
        if name in own:
            _warn_once(f"{group}: {_package(points[0])} offers {name!r}, which is hpctk's own: left out")
        elif name != name.lower() or not name.isidentifier():
            _warn_once(f"{group}: {_package(points[0])} offers {name!r}: need a word in lower case, left out")
        else:
            allowed.append(name)
    return allowed


def load(group: str, name: str) -> Any:
    """Return what another package offers under a name; import the package.

    Raise SettingError where two packages offer the name, or the import fails.
    """
    points = _offered(group)[name]
    if len(points) > 1:
        packages = " and ".join(f"{_package(point)} ({point.value})" for point in points)
        raise SettingError(f"{group}: {name!r} is offered by {packages}: uninstall one")
    (point,) = points
    try:
        return point.load()
    # Whatever it is: the package is somebody else's, and its name is what the user needs to hear.
    except Exception as error:
        raise SettingError(
            f"{group}: {name!r} of {_package(point)} cannot be loaded from {point.value}: "
            f"{type(error).__name__}: {error}"
        ) from error


def refuse(group: str, name: str, found: object, need: str) -> SettingError:
    """Return the error for an entry point that leads to something else than what is needed."""
    point = _offered(group)[name][0]
    return SettingError(f"{group}: {name!r} of {_package(point)} is {found!r} ({point.value}): need {need}")


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else f"package {point.dist.name}"
