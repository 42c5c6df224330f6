"""Every benchmark runs, at a size that says nothing about speed, and writes JSON of the same form."""

import json
import math
import sys

import pytest
from jobs import ROOT, mpirun, run

#: Options that let a benchmark end soon, and names that are in its rows.
SINGLE = {
    "compress": (["--elements", "1e5"], ["memory:read", "torch:topk", "kernel:topk", "compress:qsgd"]),
    "faults": (["--kills", "1", "--ranks", "2", "--every", "3", "--only", "Mean"], ["Mean"]),
    "regression": (
        ["--seeds", "1", "--workers", "4", "--batches", "64", "--updates", "3"],
        ["plain mean, N=4, B=64", "AdaCons, N=4, B=64"],
    ),
    "stats": (["--size", "6", "--steps", "5"], ["merge:view", "merge:copy", "load", "load:copy", "report"]),
}
RANKS = {
    "adam_topk": (["--seeds", "1", "--only", "dense"], ["dense"]),
    "adapters": (["--elements", "1e5"], ["hpctk", "hpctk:alone", "ddp"]),
    "allreduce": (
        ["--bytes", "8192", "--no-calibration"],
        ["auto", "mpi:default", "gloo", "plan:ring", "adacons:one-pass"],
    ),
    "checkpoint": (["--elements", "1e5"], ["plain", "save", "load"]),
    "recorder": (["--calls", "2000", "--epochs", "1"], ["recorder:off", "recorder:on"]),
    "sparse": (["--elements", "1e5"], ["sparse:auto", "sparse:split", "sparse:keep", "grace", "gloo"]),
    "small": (["--steps", "2"], ["alone", "ddp gloo fp16", "Mean", "Mean TopK", "SASG", "SAEF TopK", "CELGC"]),
    "step": (
        ["--elements", "1e5"],
        ["alone", "gloo fp16", "Mean", "Mean TopK", "AdaCons", "SASG", "SAEF TopK", "MGRAWA", "CELGC"],
    ),
}


def rows_of(name, command, options, tmp_path):
    """Run a benchmark and return its rows by name."""
    target = tmp_path / "rows.json"
    repeats = [] if name in ("adam_topk", "regression") else ["--repeats", "1"]
    ended = run([*command, *options, *repeats, "--json", str(target)], timeout_s=240)
    assert ended.code == 0, ended.output
    rows = json.loads(target.read_text())
    assert isinstance(rows, list), rows
    for row in rows:
        assert isinstance(row["name"], str), row
        assert isinstance(row["seconds"], float), row
        assert math.isfinite(row["seconds"]), row
        assert row["name"] in ended.output or name == "regression", (row, ended.output)
    found = {row["name"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_none_is_left_out():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert scripts == {*SINGLE, *RANKS}


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_process(name, tmp_path):
    options, names = SINGLE[name]
    rows = rows_of(name, [sys.executable, f"benchmarks/{name}.py"], options, tmp_path)
    assert set(names) <= set(rows)
    assert all(row["seconds"] > 0 for row in rows.values())


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_in_shared_memory(name, tmp_path):
    options, names = RANKS[name]
    command = mpirun(2, sys.executable, "-m", "mpi4py", f"benchmarks/{name}.py")
    rows = rows_of(name, command, options, tmp_path)
    assert set(names) <= set(rows)
    if name == "step":
        # The parts of a step, which the rest makes whole.
        for row in rows.values():
            assert row["to_alone"] == pytest.approx(row["seconds"] / rows["alone"]["seconds"])
            assert row["to_gloo"] == pytest.approx(row["seconds"] / rows["gloo fp16"]["seconds"])
            parts = ("base", "compression", "communication", "rest")
            assert sum(row[kind] for kind in parts) == pytest.approx(row["seconds"], rel=1e-6)
            assert row["base"] > 0, row
            assert row["communication"] > 0 or row["name"] in ("alone", "gloo fp16"), row
        assert rows["SAEF TopK"]["compression"] > 0
        assert rows["Mean"]["compression"] == 0
    if name == "small":
        for row in rows.values():
            assert row["to_alone"] == pytest.approx(row["seconds"] / rows["alone"]["seconds"])
            assert row["to_ddp"] == pytest.approx(row["seconds"] / rows["ddp gloo fp16"]["seconds"])


def test_many_tensors_of_one_element(tmp_path):
    command = mpirun(2, sys.executable, "-m", "mpi4py", "benchmarks/small.py")
    rows = rows_of("small", command, ["--tensors", "100", "--steps", "2", "--only", "Mean,Mean TopK"], tmp_path)
    assert set(rows) == {"alone", "Mean", "Mean TopK"}
    assert rows["Mean"]["to_alone"] > 0
