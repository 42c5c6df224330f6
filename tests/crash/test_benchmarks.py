"""Every benchmark runs, at a size that says nothing about speed, and writes JSON of the same form."""

import json
import math
import shutil
import sys

import pytest
from jobs import ROOT, mpirun, run

#: Options that let a benchmark end soon, and names that are in its rows.
SINGLE = {
    "compress": (["--elements", "1e5"], ["memory:read", "torch:topk", "kernel:topk", "compress:qsgd"]),
    "faults": (["--kills", "1", "--ranks", "2", "--every", "3", "--only", "Mean"], ["Mean"]),
    "paper/adacons": (
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
    "small": (
        ["--steps", "2", "--elements", "5e4"],
        ["alone", "ddp gloo", "ddp gloo fp16", "AdaCons overlap", "Mean", "Mean TopK", "SASG", "SAEF TopK", "CELGC"],
    ),
    "step": (
        ["--elements", "1e5"],
        ["alone", "gloo fp16", "Mean", "Mean TopK", "AdaCons", "SASG", "SAEF TopK", "MGRAWA", "CELGC"],
    ),
}
#: Experiments of the papers, and contenders of each.
PAPERS = {
    "sasg": ["SGD", "SASG"],
    "saef": ["full precision, rate x1", "SAEF, rate x1"],
    "grawa": ["MGRAWA", "uniform weights"],
    "celgc": ["naive clipping, rate 4", "CELGC, period 2, rate 4"],
    "defaults": ["text: mean, rate x1", "text: AdaCons unit, rate x1"],
}
#: Where those one folder down find what benchmarks share. A rank may need long to read its data on a busy machine.
SHARED = {"PYTHONPATH": f"{ROOT}/benchmarks:{ROOT}/benchmarks/paper", "HPCTK_TIMEOUT_S": "120"}


def words_of(name, options, target):
    """Return the command line of a benchmark that writes its rows to a file."""
    repeats = [] if name in ("adam_topk", "paper/adacons") else ["--repeats", "1"]
    return [f"benchmarks/{name}.py", *options, *repeats, "--json", str(target)]


def in_turn(benchmarks):
    """Run benchmarks on two ranks, one after the other in one job; return what each has printed."""
    words = [sys.executable, "-m", "mpi4py", "tests/crash/benchmarks_in_turn.py", json.dumps(benchmarks)]
    ended = run(mpirun(2, *words), timeout_s=300, **SHARED)
    assert ended.code == 0, ended.output
    said = dict(part.split("\n", 1) for part in ended.output.split("== ")[1:])
    assert set(said) == set(benchmarks)
    return said


def rows_of(name, output, target):
    """Return the rows of a benchmark by name."""
    rows = json.loads(target.read_text())
    assert isinstance(rows, list), rows
    for row in rows:
        assert isinstance(row["name"], str), row
        assert isinstance(row["seconds"], float), row
        assert math.isfinite(row["seconds"]), row
        assert row["name"] in output or name == "paper/adacons", (row, output)
    found = {row["name"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_none_is_left_out():
    folder = ROOT / "benchmarks"
    scripts = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("[!_]*.py")}
    scripts = {name for name in scripts if not name.startswith("_")}
    assert scripts == {*SINGLE, *RANKS, "shrink", "train", "report", *(f"paper/{name}" for name in PAPERS)}


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_process(name, tmp_path):
    options, names = SINGLE[name]
    target = tmp_path / "rows.json"
    ended = run([sys.executable, *words_of(name, options, target)], timeout_s=240, **SHARED)
    assert ended.code == 0, ended.output
    rows = rows_of(name, ended.output, target)
    assert set(names) <= set(rows)
    assert all(row["seconds"] > 0 for row in rows.values())


#: A second run of a benchmark: its name, and its options.
MANY = {"small, many tensors": ("small", ["--tensors", "100", "--steps", "2", "--only", "Mean,Mean TopK"])}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """Return the rows of all benchmarks of several ranks, in shared memory."""
    folder = tmp_path_factory.mktemp("rows")
    runs = {name: (name, options) for name, (options, _) in RANKS.items()} | MANY
    targets = {run: folder / f"{number}.json" for number, run in enumerate(runs)}
    said = in_turn({run: words_of(name, options, targets[run]) for run, (name, options) in runs.items()})
    return {run: rows_of(runs[run][0], said[run], targets[run]) for run in runs}


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_in_shared_memory(name, on_two_ranks):
    rows = on_two_ranks[name]
    assert set(RANKS[name][1]) <= set(rows)
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
            assert row["to_ddp_fp16"] == pytest.approx(row["seconds"] / rows["ddp gloo fp16"]["seconds"])


def test_many_tensors_of_one_element(on_two_ranks):
    rows = on_two_ranks["small, many tensors"]
    assert set(rows) == {"alone", "Mean", "Mean TopK"}
    assert rows["Mean"]["to_alone"] > 0


def test_what_surviving_costs(tmp_path):
    words = words_of("shrink", ["--steps", "2", "--only", "Mean,SASG"], tmp_path / "rows.json")
    ended = run(mpirun(2, sys.executable, "-m", "mpi4py", *words, tolerant=True), timeout_s=240)
    assert ended.code == 0, ended.output
    rows = rows_of("shrink", ended.output, tmp_path / "rows.json")
    assert set(rows) == {"Mean", "SASG"}
    assert all(row["to_raise"] > 0 for row in rows.values())


def test_experiments_of_the_papers(tmp_path):
    options = ["--tiny", "--seeds", "1", "--steps", "4", "--every", "2"]
    runs = {
        name: [
            *words_of(f"paper/{name}", [*options, "--only", ";".join(chosen)], tmp_path / f"{name}-rows.json"),
            "--output",
            f"{tmp_path}/{name}.json",
        ]
        for name, chosen in PAPERS.items()
    }
    # Run again, it finds everything done.
    said = in_turn({**runs, "again": runs["celgc"]})
    assert "seed 0" in said["celgc"]
    assert "seed 0" not in said["again"]
    for name, contenders in PAPERS.items():
        rows = rows_of(name, said[name], tmp_path / f"{name}-rows.json")
        kept = json.loads((tmp_path / f"{name}.json").read_text())
        assert len(rows) == len(contenders)
        assert [run["name"] for run in kept["runs"]] == contenders
        assert all(len(run["curve"]) == 2 for run in kept["runs"])


TRAIN = ["--tiny", "--seeds", "2", "--steps", "8", "--every", "4", "--search-steps", "2", "--rates", "1,2"]


FIRST = ["--methods", "alone,ddp-fp16", "--target", "0.01"]
TASKS = ("cnn", "lstm", "transformer")
#: Controls by one worker, and a method that has to beat them.
ONE_WORKER = "one-worker,one-worker-diloco,diloco-streaming"


def train_words(kept, *words):
    return ["benchmarks/train.py", *TRAIN, "--output", str(kept), *words]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of what tiny training benchmarks on two ranks have kept: "tiny", and one for each task."""
    folder = tmp_path_factory.mktemp("trained") / "results"
    words = {name: ("--task", name, "--methods", "local-sgd", "--seeds", "1", "--rates", "1") for name in TASKS}
    words["cnn"] = ("--task", "cnn", "--methods", ONE_WORKER, "--seeds", "1", "--rates", "1")
    in_turn({name: train_words(folder / f"{name}.json", *more) for name, more in {"tiny": FIRST, **words}.items()})
    return folder


def test_training_goes_on_where_it_was_and_is_reported(trained, tmp_path):
    kept = tmp_path / "results" / "tiny.json"
    kept.parent.mkdir()
    shutil.copy(trained / "tiny.json", kept)
    before = json.loads(kept.read_text())
    assert {run["method"] for run in before["runs"]} == {"alone", "ddp-fp16"}
    # Any model is right about one image in a hundred: the first look ends the run.
    assert all(run["reached"] and run["steps"] == 4 for run in before["runs"])
    assert all(run["samples"] == 4 * 2 * before["settings"]["batch_of_a_rank"] for run in before["runs"])
    assert [(run["method"], run["rate"]) for run in before["search"]] == [
        ("alone", 0.02), ("ddp-fp16", 0.02), ("alone", 0.04), ("ddp-fp16", 0.04),
    ]  # fmt: skip
    target = tmp_path / "rows.json"
    words = ["--methods", "ddp-fp16,saef", "--target", "0.01", "--json", str(target)]
    output = in_turn({"train": train_words(kept, *words)})["train"]
    after = json.loads(kept.read_text())
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


@pytest.mark.parametrize("task", TASKS)
def test_other_tasks_train(task, trained):
    kept = json.loads((trained / f"{task}.json").read_text())
    assert [row["name"] for row in kept["summary"]] == (ONE_WORKER.split(",") if task == "cnn" else ["local-sgd"])
    for row in kept["summary"]:
        assert row["samples"] == 8 * 2 * kept["settings"]["batch_of_a_rank"]
        assert math.isfinite(row["loss"])
        # The target was not reached, and nobody says it was.
        assert row["to_target_s"] is None or row["reached"] == 1


def test_one_worker_sends_nothing(trained):
    """By its own account; and what it learned is not what a rank learns from its part of the samples."""
    runs = {run["method"]: run for run in json.loads((trained / "cnn.json").read_text())["runs"]}
    assert runs["one-worker-diloco"]["account_bytes"] in (0, None)
    assert runs["one-worker"]["loss"] != runs["one-worker-diloco"]["loss"]


def test_wrong_methods_are_named(tmp_path):
    command = mpirun(1, sys.executable, "-m", "mpi4py", "benchmarks/train.py", "--methods", "saef,sead")
    ended = run(command, timeout_s=60)
    assert ended.code == 2
    assert "--methods sead: known are ddp, ddp-fp16, alone" in ended.output
