"""`hpctk advise`, as a user types it."""

import json

import pytest

from hpctk.cli import main

JOB = ["--params", "25e6", "--step-seconds", "0.12", "--ranks", "16"]


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch, tmp_path):
    monkeypatch.setenv("HPCTK_CALIBRATION", str(tmp_path / "none.json"))


def output(capsys, *words):
    assert main(["advise", *words]) == 0
    return capsys.readouterr().out


def test_table_recommendation_and_what_is_not_known(capsys):
    text = output(capsys, *JOB, "--rate", "1gbit")
    assert text.startswith("25,000,000 parameters (100 MB), 120 ms a step alone, 16 ranks")
    for word in ("DDP, fp16 hook", "SAEF(TopK(0.01))", "MGRAWA(period=16)", "\nTake: ", "because", "convergence"):
        assert word in text
    assert "do not compress here" in output(capsys, *JOB, "--rate", "100gbit")


def test_what_is_said_beside_the_table_fits_a_terminal(capsys):
    text = output(capsys, *JOB, "--rate", "1gbit")
    said = text[: text.index("\nmethod ")] + text[text.index("\nTake: ") :]
    assert "Measured nearest to this" in said
    # All but the code, which is to be pasted.
    assert [line for line in said.splitlines() if len(line) > 80 and not line.startswith("    ")] == []


def test_the_shell_of_an_allocation_is_no_rank(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert "Take: " in output(capsys, *JOB, "--rate", "1gbit")


def test_json_has_every_schedule(capsys):
    found = json.loads(output(capsys, *JOB, "--rate", "1gbit", "--scale", "8,64", "--json"))
    means = [entry for entry in found["predictions"] if entry["name"] == "Mean()"]
    assert {"ring", "halving_doubling", "rotation"} <= {entry["schedule"] for entry in means}
    assert [row["ranks"] for row in found["scale"]] == [8, 64]
    assert found["recommended"]["code"]
    assert found["unknown"]


def test_the_curve_is_drawn(capsys, tmp_path):
    target = tmp_path / "scale.png"
    text = output(capsys, *JOB, "--rate", "1gbit", "--scale", "8,64,512", "--plot", str(target))
    assert "a step on ... ranks" in text
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_calibration_file_is_asked(capsys, tmp_path):
    from hpctk.collectives.tuning.calibration import Calibration
    from hpctk.schedules.cost.machine import Machine

    slow = tmp_path / "slow.json"
    slow.write_text(Calibration(Machine(byte_s=1e-6)).to_json())
    found = json.loads(output(capsys, *JOB, "--calibration", str(slow), "--json"))
    dense = next(entry for entry in found["predictions"] if entry["name"] == "DDP, 32 bit")
    assert dense["seconds"] > 180


SCRIPT = """
import os, sys, time, torch
assert sys.argv[1:] == ["--epochs", "1"]
assert "PRTE_LAUNCHED" not in os.environ
small = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
model = torch.nn.Linear(10, 100)
opt = torch.optim.AdamW(model.parameters())
for _ in range(1000):
    model(torch.ones(1, 10)).sum().backward()
    time.sleep(0.01)
    small.step()
    opt.step()
print("not reached")
"""


def test_a_script_is_timed(capfd, tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # As where rank 0 of a job starts it: the script must not take itself for a rank.
    monkeypatch.setenv("PRTE_LAUNCHED", "1")
    assert main(["advise", "--script", str(script), "--rate", "1gbit", "--json", "--", "--epochs", "1"]) == 0
    said = capfd.readouterr()
    question = json.loads(said.out)["question"]
    assert question["params"] == 1100
    assert question["step_s"] > 0.01
    assert "not reached" not in said.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "need --params N and --step-seconds S, or --script FILE"),
        ("--params 25e6", "need --params N and --step-seconds S"),
        ("--params 0 --step-seconds 1", "--params 0: need 1 or more"),
        ("--params 1.5 --step-seconds 1", "--params 1.5: need a whole number"),
        ("--params nan --step-seconds 1", "--params nan: need a whole number"),
        ("--params 1e6 --step-seconds -1", "--step-seconds -1.0: need seconds above 0"),
        ("--params 1e6 --step-seconds 1 --ranks 0", "--ranks 0: need 1 to"),
        ("--params 1e6 --step-seconds 1 --rate fast", "--rate fast: need a number and"),
        ("--params 1e6 --step-seconds 1 --rate 1e3", "--rate 1e3: need a number and"),
        ("--params 1e6 --step-seconds 1 --scale 8,x", "--scale 8,x: need numbers"),
        ("--params 1e6 --step-seconds 1 --scale 0", "--scale 0: need 1 to"),
        ("--params 1e6 --step-seconds 1 --plot x.png", "--plot draws what --scale"),
        ("--params 1e6 --step-seconds 1 --optimizer lion", "--optimizer lion: need sgd or adam"),
        ("--params 1e6 --step-seconds 1 --periods 0", "--periods 0: need 1 or more"),
        ("--params 1e6 --step-seconds 1 --densities 2", "--densities 2.0: need parts above 0"),
        ("--params 1e6 --step-seconds 1 --calibration nowhere.json", "--calibration nowhere.json: no such file"),
        ("--params 1e6 --step-seconds 1 --output x.json", "start it with hpctk mpirun"),
        ("--params 1e6 --step-seconds 1 --latency -1", "--latency -1: need seconds"),
        ("--params 1e6 --step-seconds 1 more", "words after -- are for --script"),
        ("--script nowhere.py", "--script nowhere.py: no such file"),
        ("--parms 1e6", "did you mean --params?"),
    ],
)
def test_wrong_words_are_answered_in_one_line(capsys, words, told):
    try:
        status = main(["advise", *words.split()])
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert told in said.err


def test_a_script_that_does_not_train(capfd, tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("print('hello')\n")
    assert main(["advise", "--script", str(script)]) == 2
    assert "no step of a torch optimizer was seen, and hpctk's own do not count" in capfd.readouterr().err
    script.write_text("raise ValueError('no data')\n")
    assert main(["advise", "--script", str(script)]) == 2
    assert "ended with status 1; its message is above" in capfd.readouterr().err
