"""A run described in words, from its document: method, command, library, state. Pure."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any

from hpctk.stats.report.numbers import plural


def called(settings: str, method: str) -> str:
    """Return a method with its settings as one writes them: SAEF(compressor=TopK(density=0.01))."""
    try:
        return _called(json.loads(settings), "method") or method
    except (ValueError, TypeError, RecursionError):
        return method


def _called(settings: Any, name: str) -> str:
    if not isinstance(settings, dict) or not isinstance(settings.get(name), str):
        return ""
    inside = [
        f"{key}={_called(value, 'compressor') or value if isinstance(value, dict) else value}"
        for key, value in settings.items()
        if key != name and value is not None
    ]
    return f"{settings[name]}({', '.join(inside)})"


def places(totals: dict[str, Any]) -> str:
    """Return how many ranks there were, and on how many nodes where that is known."""
    return f"{totals['ranks']}" + (f" on {plural(totals['nodes'], 'node')}" if totals["nodes"] else "")


def library(one: dict[str, Any]) -> str:
    """Return a recording's library without the particulars of its build."""
    name: str = one["library"]
    return name.split(",")[0]


def typed(command: str) -> str:
    """Return a command line with its program as one types it: hpctk for /somewhere/hpctk/__main__.py."""
    program, space, rest = command.partition(" ")
    path = PurePath(program)
    return (path.parent.name if path.name == "__main__.py" else path.name) + space + rest


def state(one: dict[str, Any]) -> str:
    """Return how a recording stands."""
    if one["files"] < one["size"]:
        return f"{one['files']} of {one['size']} files"
    return "not closed" if one["not_closed_files"] else "closed"


def moment(began: str | None) -> str:
    """Return when something was."""
    return "?" if began is None else f"{began[:10]} {began[11:19]} UTC"
