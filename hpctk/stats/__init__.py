"""Statistics: what every rank sent, received and waited for, in HDF5 files that outlive the run.

    read        a run folder as Python objects (`hpctk.stats.load`): rank_reader
    merge       all ranks in one file; merged: what stands in it, and how it is read back
    trace       calls and steps for Perfetto
    report      text, page and JSON for people

hpctk.telemetry writes the files. Only `load` is imported from here; numpy comes with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctk.stats.read import load as load


def __getattr__(name: str) -> object:
    if name == "load":
        from hpctk.stats.read import load

        return load
    raise AttributeError(f"module 'hpctk.stats' has no attribute {name!r}")
