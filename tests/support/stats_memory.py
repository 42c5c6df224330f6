"""Runs that never were, in memory: what `hpctk.stats.load` would return, without files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from stats_files import attributes, rank_tables

from hpctk.stats.read import RankStats, RecordingStats, RunStats
from hpctk.telemetry import schema


def rank_stats(rank, size, tables=None, *, per_node=2, number=0, **attrs):
    """Return one rank's statistics; `tables` as in stats_files.rank_tables."""
    tables = rank_tables(rank, size) if tables is None else tables
    kept = {name: {c.name: tables[name][c.name] for c in table.columns} for name, table in schema.TABLES.items()}
    progress = {name: values[0].item() for name, values in kept["progress"].items()}
    about = {"state": "closed", **attributes(rank, size, per_node, **attrs)}
    return RankStats(Path(f"{number:03d}/rank-{rank:05d}.h5"), rank, size, about, {}, progress, kept)


def recording(size=4, *, number=0, missing=(), running=(), per_node=2, change=None, attrs=None, **settings):
    """Return one start of training; `change(rank, tables)` alters a rank's tables in place."""
    ranks, attrs = {}, {"began_unix_s": 1.7e9 + 1000 * number, **(attrs or {})}
    for rank in range(size):
        if rank not in missing:
            tables = rank_tables(rank, size, **settings)
            if change is not None:
                change(rank, tables)
            state = "running" if rank in running else "closed"
            ranks[rank] = rank_stats(rank, size, tables, per_node=per_node, number=number, state=state, **attrs)
    return RecordingStats(number, size, ranks, dict.fromkeys(missing, "no such file"))


def run(size=4, *, recordings=1, **settings):
    """Return a run of one or several starts of training."""
    return RunStats(Path("runs/made/stats"), [recording(size, number=i, **settings) for i in range(recordings)])


def add_call(tables, **columns):
    """Add a row to a rank's summary: a kind of call with these columns, others 0."""
    row = np.zeros(1, schema.SUMMARY.dtype)
    for name, value in columns.items():
        row[name] = value
    tables["summary"] = np.concatenate([tables["summary"], row])
