"""How the datasets of a merged file are made: compressed, or pointing to where their parts are; with their scales."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from hpctk.stats import merged_format
from hpctk.stats.merged_format import CHUNK_ROWS
from hpctk.telemetry.rank_file import describe, put_attributes, stored
from hpctk.telemetry.schema import Column, TableFormat


def part(shape: tuple[int, ...], first: tuple[int, ...], count: tuple[int, ...]) -> Any:
    """Return a box in a dataspace."""
    space = h5py.h5s.create_simple(shape)
    space.select_hyperslab(first, count)
    return space


def plan(column: Column) -> Any:
    """Begin the plan of a virtual dataset."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # Text is empty by itself; h5py 3.16 fills it with whatever lies in memory where it is told so.
    if column.kind[0] != "S":
        plan.set_fill_value(np.array(merged_format.fill(column), column.kind))
    return plan


def virtual(group: Any, column: Column, shape: tuple[int, ...], plan: Any) -> Any:
    """Make a dataset that is elsewhere."""
    if not all(shape):
        return packed(group, column, shape)
    kind = h5py.h5t.py_create(np.dtype(stored(column)), logical=True)
    h5py.h5d.create(group.id, column.name.encode(), kind, h5py.h5s.create_simple(shape), plan)
    dataset = group[column.name]
    describe(dataset, column)
    return dataset


def packed(group: Any, column: Column, shape: tuple[int, ...], values: Any = None) -> Any:
    """Make a compressed dataset, where there is anything to compress."""
    options: dict[str, Any] = {}
    if all(shape):
        chunk = (min(shape[0], CHUNK_ROWS),) if len(shape) == 1 else (1, min(shape[1], 64), shape[2])
        options = {"chunks": chunk, "compression": "gzip", "compression_opts": 1, "shuffle": True}
        if column.kind[0] != "S":
            options["fillvalue"] = merged_format.fill(column)
    dataset = group.create_dataset(column.name, shape, stored(column), **options)
    if values is not None and len(values):
        dataset[...] = values
    describe(dataset, column)
    return dataset


def group(file: Any, table: TableFormat) -> Any:
    """Make a table's group."""
    made = file.create_group(table.name)
    put_attributes(made, {"long_name": table.description})
    return made


def scaled(dataset: Any, scale: Any) -> Any:
    """Attach a table's scale to a column; the first column is it. Return the scale."""
    if scale is None:
        dataset.make_scale(dataset.name.rpartition("/")[2])
        return dataset
    dataset.dims[0].attach_scale(scale)
    return scale


def scaled_matrix(dataset: Any, scales: list[Any]) -> None:
    """Attach a scale to each dimension."""
    for place, scale in enumerate(scales):
        dataset.dims[place].attach_scale(scale)
