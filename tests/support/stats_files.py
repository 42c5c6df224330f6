"""Statistics files of runs that never were, for what reads them: any number of ranks, no MPI."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from hpctk.telemetry import schema
from hpctk.telemetry.names import file_name
from hpctk.telemetry.rank_file import RankFile

SEGMENT = 61440
STEP_S = 0.02


def attributes(rank, size, per_node, **more):
    node = rank // per_node
    return {
        "run_id": "made", "recording": 0, "rank": rank, "size": size, "node": node, "nodes": -(-size // per_node),
        "local_rank": rank % per_node, "local_size": min(per_node, size - node * per_node),
        "host": f"host{node}", "pid": 1000 + rank, "command": "train.py --lr 0.1", "platform": "Linux",
        "python": "3.11", "hpctk": "0", "numpy": "", "torch": "", "h5py": "", "mpi4py": "", "horovod": "", "numba": "",
        "communicator": "MPI_COMM_WORLD", "library": "Open MPI v5.0.11", "gpu_aware": 0, "gpu_aware_because": "no",
        "method": "Mean", "settings": '{"method": "Mean"}', "parameters": 1000, "parameter_bytes": 4000,
        "began_unix_s": 1.7e9, "clock_offset_s": 1e-4 * node, "clock_error_s": 1e-5,
        **more,
    }  # fmt: skip


def rank_tables(rank, size, steps=20, nbytes=4_000_000, density=1.0, wait=0.1):
    """Return the tables of a rank that all-reduces a tensor and a flag in every step; the last rank is slow."""
    rng = np.random.default_rng(rank)
    tables = {name: np.zeros(0, table.dtype) for name, table in schema.TABLES.items()}
    calls = tables["calls"] = np.zeros(2 * steps, schema.CALLS.dtype)
    calls["call"], calls["step"] = np.arange(2 * steps), np.arange(2 * steps) // 2
    calls["communicator"] = b"MPI_COMM_WORLD"
    flags, data = calls[::2], calls[1::2]
    waiting = (0.0005 if rank == size - 1 else 0.004) * (1 + wait * rng.random(steps))
    flags["start_s"] = np.arange(steps) * STEP_S + 0.01
    flags["end_s"] = flags["start_s"] + 1e-4
    flags["operation"], flags["schedule"] = b"flags", b"mpi"
    flags["payload_bytes"], flags["sent_bytes"], flags["received_bytes"] = 40, schema.UNKNOWN, schema.UNKNOWN
    data["start_s"] = flags["end_s"] + 1e-5
    data["end_s"] = data["start_s"] + 0.002 + waiting
    data["operation"], data["schedule"], data["tensor"] = b"allreduce", b"ring", b"4 tensors"
    data["compressor"] = b"" if density == 1 else b"TopK"
    payload = int(nbytes * density)
    sent = 2 * (size - 1) * payload // size
    data["elements"], data["dense_bytes"], data["payload_bytes"] = nbytes // 4, nbytes, payload
    data["dense_sent_bytes"], data["sent_bytes"] = 2 * (size - 1) * nbytes // size, sent
    data["received_bytes"], data["messages"] = sent, -(-sent // SEGMENT)
    data["waiting_s"], data["combining_s"] = waiting, 0.001
    table = tables["steps"] = np.zeros(steps, schema.STEPS.dtype)
    table["step"], table["start_s"], table["seconds"] = np.arange(steps), np.arange(steps) * STEP_S, STEP_S
    table["communication_s"] = 1e-4 + data["end_s"] - data["start_s"]
    table["exposed_s"], table["loss"] = table["communication_s"], 2.3 * np.exp(-np.arange(steps) / 10)
    table["calls"], table["dense_bytes"], table["sent_bytes"] = 2, 2 * (size - 1) * nbytes // size, sent
    table["received_bytes"], table["messages"], table["rounds"] = sent, data["messages"], 1
    tables["summary"] = np.array([_summed(0, flags), _summed(1, data)], schema.SUMMARY.dtype)
    peers = tables["peers"] = np.zeros(size, schema.PEERS.dtype)
    peers["peer"] = np.arange(size)
    right, left = (rank + 1) % size, (rank - 1) % size
    peers["sent_bytes"][right], peers["sent_messages"][right] = sent * steps, data["messages"].sum()
    peers["received_bytes"][left], peers["received_messages"][left] = sent * steps, data["messages"].sum()
    sizes = tables["sizes"] = np.zeros(schema.SIZE_BINS, schema.SIZES.dtype)
    sizes["lower_bytes"] = 2 ** np.arange(schema.SIZE_BINS)
    sizes["messages"][15], sizes["sent_bytes"][15] = data["messages"].sum(), sent * steps
    sizes["calls"][max(0, payload.bit_length() - 1)], sizes["calls"][5] = steps, steps
    progress = (len(calls), steps, 2, 0, 0, steps, steps * STEP_S, table["exposed_s"].sum(), steps * STEP_S)
    tables["progress"] = np.array([progress], schema.PROGRESS.dtype)
    return tables


def _summed(entry, calls):
    labels = tuple(calls[column.name][0] for column in schema.LABELS)
    seconds = calls["end_s"] - calls["start_s"]
    unknown = int((calls["sent_bytes"] < 0).sum())
    amounts = [np.maximum(calls[column.name], 0).sum() for column in schema.CALLS.columns[9:]]
    return (entry, *labels, len(calls), unknown, seconds.sum(), seconds.max(), *amounts)


def write_rank(folder, rank, size, tables=None, *, per_node=2, closed=True, **attrs):
    """Write one rank's file into a recording's folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = rank_tables(rank, size) if tables is None else tables
    rows = {name: len(tables[name]) for name in schema.TABLES}
    path = folder / file_name(rank)
    file = RankFile(path, attributes(rank, size, per_node, **attrs), {"SLURM_JOB_ID": "7"}, rows)
    for name, table in schema.TABLES.items():
        file.write(table, 0, tables[name])
    file.close(rows) if closed else file.abandon()
    return path


def write_run(run, size=4, *, per_node=2, missing=(), running=(), recordings=1, **settings):
    """Write a whole run folder; `missing` ranks have no file, `running` ones did not close theirs."""
    for number in range(recordings):
        for rank in set(range(size)) - set(missing):
            tables = rank_tables(rank, size, **settings)
            closed = rank not in running
            write_rank(
                Path(run) / f"{number:03d}",
                rank,
                size,
                tables,
                per_node=per_node,
                closed=closed,
                recording=number,
                began_unix_s=1.7e9 + 1000 * number,
            )
    return Path(run)


MARKS = {name: 0x7A_0000_0001 + i for i, name in enumerate(("rank", "node", "pid", "local_rank", "local_size"))}


def write_many(run, size, *, steps=20, per_node=8, missing=(), running=()):
    """Write a run folder of many ranks: HDF5 lays out one file, the others are copies with their own values."""
    folder = Path(run) / "000"
    folder.mkdir(parents=True, exist_ok=True)
    models = {closed: _model(folder / "model.h5", size, steps, per_node, closed) for closed in (True, False)}
    for rank in sorted(set(range(size)) - set(missing)):
        data, attrs, places = models[rank not in running]
        mine, told, tables = bytearray(data), attributes(rank, size, per_node), rank_tables(rank, size, steps)
        told["host"] = told["host"].encode().ljust(8, b"\0")
        for name, place in attrs.items():
            value = told[name] if name == "host" else np.array(told[name]).tobytes()
            mine[place : place + 8] = value
        for (name, column), place in places.items():
            values = tables[name][column].tobytes()
            mine[place : place + len(values)] = values
        (folder / file_name(rank)).write_bytes(mine)
    return Path(run)


def _model(path, size, steps, per_node, closed):
    """Return a file's bytes, and where its attributes and columns lie in them."""
    tables = rank_tables(0, size, steps)
    rows, marks = ({name: len(tables[name]) for name in schema.TABLES}, {**MARKS, "clock_offset_s": 0.123456789})
    told = {**attributes(0, size, per_node), **marks, "host": "hostMARK"}
    file = RankFile(path, told, {"SLURM_JOB_ID": "7"}, rows)
    file.close(rows) if closed else file.abandon()
    data = path.read_bytes()
    with h5py.File(path) as opened:
        places = {
            (name, column.name): opened[name][column.name].id.get_offset()
            for name, table in schema.TABLES.items()
            for column in table.columns
        }
    path.unlink()
    attrs = {name: data.index(np.array(mark).tobytes()) for name, mark in marks.items()}
    return data, {**attrs, "host": data.index(b"hostMARK")}, places
