"""`hpctk train` before any rank meets another: help, and words that make no sense."""

import re
import subprocess

import pytest

from hpctk.cli import main
from hpctk.cli.train import report_command
from hpctk.tasks import TASKS


@pytest.mark.parametrize("task", TASKS)
def test_help_shows_every_option_with_its_default(task, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as leaving:
        main(["train", task, "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--method", "--compressor", "--lr", "--seed", "--time-budget-s", "--checkpoint-minutes"):
        assert re.search(rf"{option} [A-Z]+\s[^[]*\[.+\]", shown), option
    for option in ("--set", "--run", "--resume", "--settings", "--picture"):
        assert option in shown


def test_tasks_have_defaults_of_their_own(capsys):
    for task, epochs in (("digits", 20), ("lm", 3)):
        with pytest.raises(SystemExit):
            main(["train", task, "--help"])
        assert f"passes over the data [{epochs}]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "say what to train: regression, digits, fashion, lm"),
        (["digits", "--epochs", "0"], "epochs=0: need a whole number from 1 to 10000"),
        (["digits", "--resume"], "say of which run by --run DIR"),
        (["digits", "--set", "period"], "need KEY=VALUE"),
        (["digits", "--method", "magic"], "known are adacons"),
        (["fashion", "--model", "vit"], "model='vit': allowed are mlp, cnn"),
        (["lm", "--settings", "no/such.toml"], "no/such.toml: cannot be read"),
    ],
)
def test_wrong_words_are_one_line(words, wanted, capsys):
    assert main(["train", *words]) == 2
    complaint = capsys.readouterr().err
    assert wanted in complaint
    assert complaint.startswith("hpctk train: ")
    assert complaint.count("\n") == 1


def test_unknown_words_are_argparse_s(capsys):
    for words in (["chess"], ["digits", "--epoch-s", "3"], ["digits", "--epochs", "x"]):
        with pytest.raises(SystemExit) as leaving:
            main(["train", *words])
        assert leaving.value.code == 2


def test_all_methods_are_listed(capsys):
    assert main(["train", "--list-methods"]) == 0
    shown = capsys.readouterr().out
    for word in ("adacons", "sasg", "saef", "lgrawa", "celgc", "lsgd", "topk:DENSITY"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", ["plain", "with space", "it's", 'a"b$HOME`c', "-x*"])
def test_the_command_that_is_printed_for_pasting_survives_a_shell(name, tmp_path):
    folder = tmp_path / name
    for method in ("celgc", "mean"):
        (folder / method).mkdir(parents=True)
    seen = {}
    for several in (False, True):
        line = report_command(folder, several=several).replace("hpctk report", "printf '%s\\n'", 1)
        seen[several] = subprocess.run(["sh", "-c", line], capture_output=True, text=True).stdout
    assert seen[False] == f"{folder}\n"
    assert seen[True] == f"--compare\n{folder}/celgc/\n{folder}/mean/\n"
