"""What stands in a statistics file: tables of one 1-D dataset per column. docs/hdf5-format.md explains them.

Data only. Whoever changes a column changes VERSION, that page, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

#: A table as arrays by column.
Table = dict[str, Any]

NAME = "hpctk-stats"
#: Raised when a reader of the version before would misread the file. Readers take their own version and older ones.
VERSION = 1

#: Where a number of bytes is this, it is not known: MPI's own collectives do not report what they send.
UNKNOWN = -1


@dataclass(frozen=True)
class Column:
    """One column of a table.

    `kind` is as numpy spells it ("<i8", "<f8", or "S24" for UTF-8 of at most 24 bytes), `units` as UDUNITS does ("s",
    "byte", "1").
    """

    name: str
    kind: str
    units: str
    long_name: str
    #: Whether files may lack it that were written before there was such a column: then it reads as 0.
    later: bool = False


@dataclass(frozen=True)
class TableFormat:
    """The columns of a table; the first is its dimension scale."""

    name: str
    description: str
    columns: tuple[Column, ...]

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """A row of the table in memory, packed."""
        return np.dtype([(column.name, column.kind) for column in self.columns])


def _columns_of(kind: str, units: str) -> Callable[[str, str], Column]:
    return lambda name, long_name: Column(name, kind, units, long_name)


_text, _count, _bytes = _columns_of("S", ""), _columns_of("<i8", "1"), _columns_of("<i8", "byte")
_seconds = _columns_of("<f8", "s")

#: What distinguishes calls; summaries have one row for each combination.
LABELS = (
    Column("operation", "S24", "", "what was done: allreduce, broadcast, flags, ticket and so on"),
    Column("schedule", "S24", "", "who sent which part to whom; mpi or torch: the library's own"),
    Column("compressor", "S16", "", "how tensors were written down; empty: as they are"),
    Column("communicator", "S32", "", "among which ranks"),
    Column("tensor", "S64", "", "the tensor, or the bucket of several"),
)

#: What calls are made of, and summed up by.
AMOUNTS = (
    _count("elements", "elements that this rank contributed"),
    _bytes("dense_bytes", "bytes of what this rank contributed, as it is"),
    _bytes("dense_sent_bytes", "bytes it would have sent had that travelled as it is, by a schedule that sends least"),
    _bytes("payload_bytes", "bytes of what this rank contributed, as the compressor wrote it down"),
    _bytes("sent_bytes", "bytes sent, -1 where only the library knows"),
    _bytes("received_bytes", "bytes received, -1 where only the library knows"),
    _count("messages", "messages sent; long ones travel in segments"),
    _seconds("waiting_s", "seconds waiting for messages, with nothing else to do"),
    _seconds("combining_s", "seconds adding what came in"),
    _seconds("compressing_s", "seconds compressing what went out"),
    _seconds("decompressing_s", "seconds decompressing what came in"),
    _seconds("staging_s", "seconds copying between device or strided memory and where messages lie"),
)  # fmt: skip

#: What came of lost ranks, the last columns of STEPS; the same on all ranks that are left.
LOSSES = (
    Column("lost_ranks", "<i8", "1", "ranks that were lost in this step, or since the one before", later=True),
    Column("redone", "<i8", "1", "times that its collective work was begun anew without a lost rank", later=True),
    Column("lost_residuals", "<i8", "1", "lost ranks whose residuals were lost with them", later=True),
    Column("restored_residuals", "<i8", "1", "lost ranks whose residuals were shared out from a copy", later=True),
    Column(
        "lost_residual_norm", "<f8", "1",
        "2-norm of the lost residuals, each taken for as long as those of the ranks left are", later=True,
    ),
    Column("restored_residual_norm", "<f8", "1", "2-norm of the residuals shared out from copies", later=True),
)  # fmt: skip

CALLS = TableFormat(
    "calls",
    "one row for each collective call",
    (
        _count("call", "number of the call on this rank, from 0"),
        _count("step", "optimizer step it belongs to, from 0; -1 before the first"),
        _seconds("start_s", "when it began, since the recording began, on this rank's clock"),
        _seconds("end_s", "when it was over, since the recording began, on this rank's clock"),
        *LABELS,
        *AMOUNTS,
    ),
)

STEPS = TableFormat(
    "steps",
    "one row for each optimizer step",
    (
        _count("step", "number of the step, from 0; goes on after a restart"),
        _seconds("start_s", "when it began, which is when the one before was over, since the recording began"),
        _seconds("seconds", "its duration, computing and all"),
        _seconds("communication_s", "seconds from beginning to end of its calls, summed"),
        _seconds("exposed_s", "seconds the training thread spent in communication instead of computing"),
        Column("loss", "<f8", "1", "the loss that the optimizer was told, NaN for none"),
        _count("calls", "collective calls"),
        _bytes("dense_bytes", "bytes that averaging all gradients uncompressed would have sent"),
        _bytes("sent_bytes", "bytes sent; unknown ones not counted"),
        _bytes("received_bytes", "bytes received; unknown ones not counted"),
        _count("messages", "messages sent"),
        _count("rounds", "exchanges of gradients, updates or models"),
        _count("uploads", "uploads of this rank (SASG)"),
        _count("skips", "uploads this rank had no need for (SASG)"),
        _count("clipped", "1 where the gradient was clipped (CELGC)"),
        _count("skipped", "1 where the step was skipped for a bad gradient"),
        _count("fallbacks", "groups whose weights fell back to the plain mean (AdaCons)"),
        *LOSSES,
    ),
)  # fmt: skip

SUMMARY = TableFormat(
    "summary",
    "sums over all calls that are alike, also of those without a row in calls",
    (
        _count("entry", "number of the row"),
        *LABELS,
        _count("calls", "calls"),
        _count("uncounted_calls", "calls whose bytes only the library knows; not in the sums of bytes"),
        _seconds("seconds", "seconds from beginning to end, summed"),
        _seconds("longest_s", "seconds of the longest"),
        *AMOUNTS,
    ),
)

PEERS = TableFormat(
    "peers",
    "what this rank exchanged with every other, as far as it is known",
    (
        _count("peer", "rank in the communicator of the recording"),
        _bytes("sent_bytes", "bytes sent to it"),
        _count("sent_messages", "messages sent to it"),
        _bytes("received_bytes", "bytes received from it"),
        _count("received_messages", "messages received from it"),
    ),
)

SIZES = TableFormat(
    "sizes",
    "how long messages and contributions were: row i from 2^i to 2^(i+1)-1 bytes, the first also 0",
    (
        _bytes("lower_bytes", "shortest length of this row, 2^i"),
        _count("messages", "messages sent"),
        _bytes("sent_bytes", "bytes in them"),
        _count("calls", "calls by their payload"),
    ),
)
#: Rows of SIZES.
SIZE_BINS = 48

PROGRESS = TableFormat(
    "progress",
    "one row: how far the other tables are filled. Rows beyond are room for more, in a file that was not closed",
    (
        _count("calls_rows", "rows of calls"),
        _count("steps_rows", "rows of steps"),
        _count("summary_rows", "rows of summary"),
        _count("events_dropped", "calls without a row in calls"),
        _count("steps_dropped", "steps without a row in steps"),
        _count("steps", "steps recorded, with or without a row"),
        _seconds("steps_s", "their seconds"),
        _seconds("exposed_s", "seconds the training thread spent in communication in them"),
        _seconds("flushed_s", "when this was written, since the recording began"),
    ),
)

TABLES = {table.name: table for table in (CALLS, STEPS, SUMMARY, PEERS, SIZES, PROGRESS)}


#: The attributes of a file; those of the environment apart, and others that a method may add.
ATTRIBUTES = (
    _text("schema", f'"{NAME}"'),
    _count("schema_version", "version of the tables; a reader refuses a newer one"),
    _text("state", '"running", or "closed" once its process wrote the last of it; one that was killed never does'),
    _text("run_id", "the same for all ranks and recordings of a run"),
    _count("recording", "number of the recording in its run, from 0"),
    _count("rank", "rank in the communicator of the recording"),
    _count("size", "ranks in it"),
    _count("node", "number of the node, from 0 in the order of their first ranks"),
    _count("nodes", "nodes"),
    _count("local_rank", "rank on the node"),
    _count("local_size", "ranks on the node"),
    _text("host", "name of the machine"),
    _count("pid", "process"),
    _text("command", "command line, without what options such as --api-key say"),
    _text("platform", "operating system"),
    _text("python", "version of Python"),
    _text("hpctk", "version of hpctk"),
    _text("numpy", "version of numpy"),
    _text("torch", "version of torch"),
    _text("h5py", "version of h5py"),
    _text("mpi4py", "version of mpi4py, empty for none"),
    _text("horovod", "version of Horovod, empty for none"),
    _text("numba", "version of numba"),
    _text("communicator", "name of the communicator of the recording"),
    _text("library", "MPI library, or what else moves bytes"),
    _count("gpu_aware", "1 where device memory goes to the library as it is"),
    _text("gpu_aware_because", "how that was found out"),
    _text("method", "name of the method"),
    _text("settings", "its settings, as JSON"),
    _text("schedule", "schedule that was asked for"),
    _count("events", "the most rows of calls, and of steps"),
    _count("parameters", "elements of the model's parameters"),
    _bytes("parameter_bytes", "bytes of the model's parameters"),
    _seconds("began_unix_s", "when the recording began, since 1970 in UTC, by the clock of the machine"),
    _seconds("clock_offset_s", "a time of this rank plus this is a time of rank 0"),
    _seconds("clock_error_s", "that is right up to this much"),
)  # fmt: skip
