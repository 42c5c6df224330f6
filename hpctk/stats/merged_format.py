"""What stands in a merged file: the tables of all recordings and ranks one after the other. docs/hdf5-format.md."""

from __future__ import annotations

from hpctk.telemetry.schema import CALLS, PROGRESS, SIZES, STEPS, SUMMARY, Column, TableFormat

NAME = "hpctk-stats-merged"
#: Raised when a reader of the version before would misread the file.
VERSION = 1
#: Rows of a chunk of a copy.
CHUNK_ROWS = 16384

#: Attributes of a merged file that a rank's has not, or that say something else there.
OWN = ("schema", "schema_version", "storage", "run", "merged_by")

ROW = Column("row", "<i8", "1", "number of the row")
RECORDING = Column("recording", "<i8", "1", "number of the recording, from 0")
RANK = Column("rank", "<i8", "1", "rank in the communicator of the recording")

RANKS = TableFormat(
    "ranks",
    "one row for each recording and rank, whether it left a file or not",
    (
        ROW,
        RECORDING,
        RANK,
        Column("size", "<i8", "1", "ranks in the recording"),
        Column("present", "<i8", "1", "1 where there was a file that could be read, 0 where not: see reason"),
        Column(
            "state", "S16", "", "closed, or running where the rank died or still runs; empty for absent ones"
        ),
        Column("reason", "S240", "", "why an absent rank is absent"),
        Column("file", "S240", "", "the rank's file, from where the merged file is"),
        Column("host", "S64", "", "name of the machine"),
        Column("node", "<i8", "1", "number of the node, from 0 in the order of their first ranks"),
        Column("local_rank", "<i8", "1", "rank on the node"),
        Column("pid", "<i8", "1", "process"),
        Column(
            "began_unix_s", "<f8", "s", "when the recording began, since 1970 in UTC, by the machine's clock"
        ),
        Column("clock_offset_s", "<f8", "s", "a time of this rank plus this is a time of rank 0"),
        Column("clock_error_s", "<f8", "s", "that is right up to this much"),
        *PROGRESS.columns,
    ),
)

#: Tables whose rows of all ranks come one after the other, after row, recording and rank.
JOINED = {
    table.name: TableFormat(table.name, table.description, (ROW, RECORDING, RANK, *table.columns))
    for table in (CALLS, STEPS, SUMMARY, SIZES)
}


def fill(column: Column) -> int | float | bytes:
    """Return what stands where nothing is known."""
    numbers: dict[str, int | float] = {"<i8": -1, "<f8": float("nan")}
    return numbers.get(column.kind, b"")
