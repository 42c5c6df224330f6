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
    assert scripts == {*SINGLE, *RANKS, "train", "report"}


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


TRAIN = ["--tiny", "--seeds", "2", "--steps", "8", "--every", "4", "--search-steps", "2", "--rates", "1,2"]


def trained(tmp_path, *words):
    """Run a tiny training benchmark on two ranks; return what it printed and what it kept."""
    kept = tmp_path / "results" / "tiny.json"
    command = mpirun(2, sys.executable, "-m", "mpi4py", "benchmarks/train.py", *TRAIN, "--output", str(kept), *words)
    ended = run(command, timeout_s=240)
    assert ended.code == 0, ended.output
    return ended.output, json.loads(kept.read_text())


def test_training_goes_on_where_it_was_and_is_reported(tmp_path):
    first = ["--methods", "alone,ddp-fp16", "--target", "0.01"]
    _, before = trained(tmp_path, *first)
    assert {run["method"] for run in before["runs"]} == {"alone", "ddp-fp16"}
    # Any model is right about one image in a hundred: the first look ends the run.
    assert all(run["reached"] and run["steps"] == 4 for run in before["runs"])
    assert all(run["samples"] == 4 * 2 * before["settings"]["batch_of_a_rank"] for run in before["runs"])
    assert [(run["method"], run["rate"]) for run in before["search"]] == [
        ("alone", 0.02), ("ddp-fp16", 0.02), ("alone", 0.04), ("ddp-fp16", 0.04),
    ]  # fmt: skip
    target = tmp_path / "rows.json"
    output, after = trained(tmp_path, "--methods", "ddp-fp16,saef", "--target", "0.01", "--json", str(target))
    # What was measured is not measured again, and the seeds of the newcomer take turns.
    assert after["runs"][:4] == before["runs"]
    assert [(run["method"], run["seed"]) for run in after["runs"][4:]] == [("saef", 0), ("saef", 1)]
    assert after["runs"][4]["account_bytes"] > 0
    rows = json.loads(target.read_text())
    assert [row["name"] for row in rows] == ["ddp-fp16", "saef"]
    assert all(row["seconds"] > 0 and row["reached"] == 2 for row in rows)
    assert all(row["to_target_s"] is not None and row["name"] in output for row in rows)
    ended = run([sys.executable, "benchmarks/report.py", "--folder", str(tmp_path / "results")], timeout_s=120)
    assert ended.code == 0, ended.output
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## Limitations" in page
    assert "| saef |" in page
    assert (tmp_path / "results" / "tiny.png").stat().st_size > 1000


def test_results_of_another_set_up_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from _training import results

    kept = tmp_path / "kept.json"
    document = results.begin(kept, {"target": 0.8}, 10, "digits")
    results.keep(kept, document)
    assert results.begin(kept, {"target": 0.8}, 10, "digits") == document
    with pytest.raises(ValueError, match="was measured with other target; --fresh begins anew"):
        results.begin(kept, {"target": 0.5}, 10, "digits")
    assert results.begin(kept, {"target": 0.5}, 10, "digits", fresh=True)["settings"] == {"target": 0.5}


@pytest.mark.parametrize("task", ["cnn", "lstm", "transformer"])
def test_other_tasks_train(task, tmp_path):
    _, kept = trained(tmp_path, "--task", task, "--methods", "local-sgd", "--seeds", "1", "--rates", "1")
    (row,) = kept["summary"]
    assert row["samples"] == 8 * 2 * kept["settings"]["batch_of_a_rank"]
    assert math.isfinite(row["loss"])
    # The target was not reached, and nobody says it was.
    assert row["to_target_s"] is None or row["reached"] == 1


def test_wrong_methods_are_named(tmp_path):
    command = mpirun(1, sys.executable, "-m", "mpi4py", "benchmarks/train.py", "--methods", "saef,sead")
    ended = run(command, timeout_s=60)
    assert ended.code == 2
    assert "--methods sead: known are ddp, ddp-fp16, alone" in ended.output
