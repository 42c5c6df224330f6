"""HDF5 files of which nothing is read that lies outside them.

Soft and external links, virtual datasets and external raw storage lead HDF5 to whatever file they name, without a word:
a file from elsewhere could so put any other into a weight, or into a report. The files that hpctk reads need none of
them. What is refused raises HpctkError with a text that goes after the file's name.
"""

from __future__ import annotations

import os
from typing import Any

import h5py

from hpctk.errors import HpctkError

#: As what h5py raises HDF5's errors.
ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def group(parent: Any, name: str) -> Any:
    """Return a group of a group (both `h5py.h5g.GroupID`). Raise HpctkError where it is missing or elsewhere."""
    _check_link(parent, name.encode())
    return h5py.h5g.open(parent, name.encode())


def dataset(parent: Any, name: str) -> Any:
    """Return a dataset of a group (`h5py.h5d.DatasetID`). Raise HpctkError where it is missing or elsewhere."""
    link = name.encode()
    _check_link(parent, link)
    found = h5py.h5d.open(parent, link)
    _check_storage(found, parent, link)
    return found


def check_inside(root: Any) -> None:
    """Raise HpctkError where any link or dataset below a group (`h5py.h5g.GroupID`) leads out of its file."""
    names: list[bytes] = []
    root.links.visit(names.append)
    for name in names:
        _check_link(root, name)
        found = h5py.h5o.open(root, name)
        if isinstance(found, h5py.h5d.DatasetID):
            _check_storage(found, root, name)


def reason(error: Exception) -> str:
    """Return why HDF5 or the system failed, in one line."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else " ".join(str(error).split())


def _check_link(parent: Any, name: bytes) -> None:
    try:
        link = parent.links.get_info(name)
    except (KeyError, RuntimeError):
        raise HpctkError(f"lacks {_called(parent, name)}") from None
    if link.type != h5py.h5l.TYPE_HARD:
        raise HpctkError(f"is not as hpctk writes it: {_called(parent, name)} is a link to elsewhere")


def _check_storage(found: Any, parent: Any, name: bytes) -> None:
    # Quickly for most: only what lies in this file, in one piece, has an offset in it.
    if found.get_offset() is not None:
        return
    plan = found.get_create_plist()
    if plan.get_external_count() or plan.get_layout() == h5py.h5d.VIRTUAL:
        raise HpctkError(f"is not as hpctk writes it: {_called(parent, name)} lies in another file")


def _called(parent: Any, name: bytes) -> str:
    path = h5py.h5i.get_name(parent) or b""
    return (path + b"/" + name).decode(errors="replace").strip("/")
