"""Statistics: what every rank sent, received and waited for, in HDF5 files that outlive the run.

    schema      the tables and their columns
    recorder    what a collective tells about itself, and the counter that always listens
    tally       what an optimizer has done so far
    recording   the recorder that writes files: rank_file, traffic, metadata, clock
    read        a run folder as Python objects (`hpctk.stats.load`): rank_reader
    merge       all ranks in one file: merged_format, merged_datasets, merged_reader

Only `load` is imported from here; numpy comes with it.
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
