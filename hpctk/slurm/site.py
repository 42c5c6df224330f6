"""What all jobs of a site have in common, from a TOML file: partitions, accounts, modules.

partition = "batch"
modules = ["openmpi/5.0"]

[gpu]                       # for one kind only
partition = "gpu"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctk.errors import SettingError
from hpctk.settings import read_toml
from hpctk.slurm.options import KINDS, from_layers, known

#: What belongs to one job only.
_OWN = ("job_name", "run", "table")


def read(path: Path, kind: str) -> dict[str, Any]:
    """Return the defaults that a file gives for a kind; SettingError where one is unknown or wrong."""
    given = read_toml(path)
    try:
        # All kinds, so that a mistake shows before the day on which it counts.
        layers = {one: _defaults(given, one) for one in KINDS}
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from None
    return layers[kind]


def _defaults(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return what a document says for a kind: what it says for all, where the kind knows it, and for this one."""
    tables = {name: value for name, value in given.items() if isinstance(value, dict)}
    unknown = [name for name in tables if name not in KINDS]
    if unknown:
        raise SettingError(f"no kind [{unknown[0]}]: known are {', '.join(KINDS)}")
    everywhere = {name: value for name, value in given.items() if name not in tables}
    anywhere = sorted({name for one in KINDS for name in known(one)} - set(_OWN))
    for name in (*everywhere, *tables.get(kind, {})):
        if name not in anywhere:
            raise SettingError(f"no option {name!r}: known are {', '.join(anywhere)}")
    shared = {name: value for name, value in everywhere.items() if name in known(kind)}
    merged = {**shared, **tables.get(kind, {})}
    from_layers(kind, merged)
    return merged
