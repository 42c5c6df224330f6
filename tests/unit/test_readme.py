"""What README.md shows is what users get: its table and picture, its changes to a script, its job on a local Slurm."""

import argparse
import ast
import re
import shlex

import documents
import pytest
import readme

import hpctk
from hpctk.cli import slurm as command_line
from hpctk.cli.core.table import results_table
from hpctk.slurm.render import render
from hpctk.tasks.core.recipes import COMPARED
from hpctk.tasks.core.result import entry
from hpctk.tasks.digits import Digits, DigitsSettings

ROOT = readme.README.parent
DIFFS = [one for one in documents.blocks("diff") if "hpctk" in one.text]

#: How a job went on one rank, with figures that nobody has measured.
RANK = {
    "metrics": {"accuracy": 0.5, "test loss": 1.0}, "loss": 1.0, "complete": True, "parameters_sha256": "", "steps": 1,
    "rounds": 1, "sent_bytes": 1, "seconds": 1.0, "counts": {},
    "curve": {"steps": [], "seconds": [], "sent_bytes": [], "losses": []},
}  # fmt: skip


def quickstart_table():
    """Return the table of the quickstart's job as it is printed."""
    task = Digits(DigitsSettings())
    task.load()
    steps = task.epochs * (task.samples // task.step_samples(4))
    rank = {**RANK, "metrics": task.evaluate(task.model().eval()), "steps": steps}
    return results_table({name: entry({}, [rank] * 4) for name in COMPARED}).splitlines()


def columns(line):
    return re.split(r"\s{2,}", line.strip())


def test_the_table_is_of_the_form_that_the_quickstart_prints():
    shown, printed = readme.table(), quickstart_table()
    assert columns(shown[0]) == columns(printed[0])
    assert [line.split()[0] for line in shown[2:]] == [line.split()[0] for line in printed[2:]]
    place = columns(shown[0]).index("steps")
    assert {columns(line)[place] for line in shown[2:]} == {columns(printed[2])[place]}


def test_the_table_of_a_run_takes_the_place_of_the_old_one():
    result = {"methods": {"mean": entry({}, [RANK, {**RANK, "sent_bytes": 5_000_000}])}}
    text = readme.README.read_text(encoding="utf-8")
    made = readme.written(text, result)
    (new,) = readme.TABLE.findall(made)
    assert new == results_table(result["methods"]) + "\n"
    assert readme.TABLE.sub("", made) == readme.TABLE.sub("", text)


def test_the_picture_shows_the_table():
    drawn = readme.PICTURE.read_text(encoding="utf-8")
    assert drawn == readme.drawing(readme.table()), "draw it anew: python tests/support/readme.py"
    assert drawn.count("<rect") == 1 + len(readme.table()[2:])


def test_it_can_be_read_in_a_minute():
    assert len(readme.README.read_text(encoding="utf-8").splitlines()) <= 120


def names(tree):
    """Return what a program takes from hpctk, such as hpctk.horovod.Compression."""
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {one for one in found if re.fullmatch(r"hpctk(\.\w+)+", one)}


@pytest.mark.parametrize("diff", DIFFS, ids=str)
def test_a_script_compiles_before_and_after_a_change(diff):
    before, after = documents.sides(diff.text)
    assert "hpctk" not in before
    compile(before, f"{diff}, before", "exec")
    for name in names(compile(after, f"{diff}, after", "exec", ast.PyCF_ONLY_AST)):
        # hpctk.horovod starts MPI, and needs a Horovod.
        if not name.startswith("hpctk.horovod"):
            assert hasattr(hpctk, name.split(".")[1]), name


def test_every_loop_tells_the_loss():
    """Without it the statistics of a step hold NaN, as nobody knows its loss."""
    after = [documents.sides(diff.text)[1] for diff in DIFFS]
    stepping = [text for text in after if "opt.step(" in text and "hvd" not in text]
    assert len(stepping) == 3
    assert all("opt.step(loss=loss)" in text for text in stepping)


def test_under_horovod_hpctk_comes_before_mpi_is_started():
    (after,) = (text for _, text in (documents.sides(one.text) for one in DIFFS) if "hvd.init()" in text)
    assert after.index("import hpctk.horovod") < after.index("hvd.init()")


def offered():
    """Return how many nodes launch/slurm-local starts unless it is told otherwise."""
    script = (ROOT / "launch" / "slurm-local").read_text(encoding="utf-8")
    (nodes,) = re.findall(r"^n_nodes=(\d+)$", script, re.MULTILINE)
    assert re.search(r"^n_cpus=\$\(getconf _NPROCESSORS_ONLN\)$", script, re.MULTILINE)
    return int(nodes)


def asked(words):
    """Return nodes, ranks on each, and CPUs of a rank, that a command line of `hpctk slurm` asks for."""
    parser = argparse.ArgumentParser()
    command_line.add_arguments(parser)
    script = render(command_line.resolved(parser.parse_args([*words[:2], "--site", "/dev/null", *words[2:]])))
    return [
        int(re.search(rf"^#SBATCH --{name}=(\d+)$", script, re.MULTILINE)[1])
        for name in ("nodes", "ntasks-per-node", "cpus-per-task")
    ]


def test_the_jobs_fit_the_slurm_of_a_machine_with_two_cpus():
    (block,) = (one for one in documents.blocks("sh", readme.README) if one.text.startswith("hpctk slurm submit"))
    lines = block.text.splitlines()
    assert len(lines) == 2
    for line in lines:
        nodes, ranks, cpus = asked(shlex.split(line)[2:])
        assert nodes <= offered(), line
        # A node of it has as many CPUs as the machine.
        assert ranks * cpus <= 2, line
