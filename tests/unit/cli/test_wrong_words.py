"""Typical mistakes, each answered by one line that says what was meant, or what to type instead."""

import errno
import os
import subprocess
import sys

import pytest
from jobs import clean_environment

from hpctk import cli


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no run\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def answer(words, capsys):
    """Return the line that a command says, which is all that it says, and the exit status."""
    try:
        status = cli.main(words)
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err, status


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--versoin", "--versoin; did you mean --version?"),
        ("trian digits", "'trian': did you mean train?"),
        ("train digts", "'digts': did you mean digits?"),
        ("train digits --epohs 3", "--epohs 3; did you mean --epochs?"),
        ("train digits --epochs=many", "--epochs: invalid int value: 'many'"),
        ("train digits --epochs 1 --json nowhere/x.json", "nowhere is no folder that can be written to"),
        ("train digits --epochs 1 --picture nowhere/x.png", "nowhere is no folder that can be written to"),
        ("doctor --jsn", "--jsn; did you mean --json?"),
        ("schedule show rng", "schedule='rng': did you mean ring?"),
        ("schedule shw ring", "'shw': did you mean show?"),
        ("slurm rendr mpi", "'rendr': did you mean render?"),
        ("slurm render mpj", "'mpj': did you mean mpi?"),
        ("setup horovd", "'horovd': did you mean horovod?"),
        ("setup", "required: horovod"),
        ("report nowhere", "nowhere: no such file or folder"),
        ("report empty", "hpctk train --run DIR and HPCTK_STATS=DIR write some"),
        ("run nowhere.py", "nowhere.py: no such file"),
        ("run -m nowhere", "-m nowhere: no such module here; a file is run by hpctk run SCRIPT"),
        ("run -m nowhere.train --epochs 3", "-m nowhere.train: no such module here"),
        ("run -m train.py", "-m train.py: no such module here"),
        ("mpirun -n two true", "-n two: need a number of ranks, such as -n 4"),
        ("mpirun -n 0 true", "-n 0: need a number of ranks, such as -n 4"),
        ("horovodrun -np 2 python nowhere.py", "nowhere.py: no such file in "),
        ("horovodrun -np 2", "which program? Such as: hpctk horovodrun -np 4 python train.py"),
        ("mpirun -n 2", "which program? Such as: hpctk mpirun -n 4 python train.py"),
        ("mpirun -n 2 python nowhere.py", "nowhere.py: no such file in "),
        ("mpirun --with-ft -n 2 python nowhere.py", "nowhere.py: no such file in "),
        ("mpirun -n 2 hpctk run nowhere.py", "nowhere.py: no such file in "),
        ("mpirun -n 2 python", "python: which script?"),
        ("mpirun -n 2 python3 -", "python3: which script?"),
        ("mpirun --with-ft -n 0 true", "-n 0: need a number of ranks, such as -n 4"),
        ("mpirun -n 2 nowhere --epochs 3", "nowhere: no such program; a script runs by: hpctk mpirun -n 4 python"),
        ("train digits --method saeff", "method='saeff': did you mean saef?"),
        ("train digits --method saef --set densty=0.1", "saef has no setting 'densty': known are compressor,"),
        ("train digits --compressor topk:2", "need a number above 0, at most 1"),
        ("train digits --settings nowhere.toml", "nowhere.toml: cannot be read"),
        ("quickstart --ranks none", "--ranks 'none': a number of ranks, such as 4"),
        ("quickstart --ranks 0", "--ranks '0': a number of ranks, such as 4"),
        ("quickstart -n 2", "-n: the number of ranks is --ranks N"),
        ("quickstart --run elsewhere", "--run: the run is in runs/quickstart; for others use hpctk train digits"),
    ],
)
def test_one_line(folder, capsys, words, told):
    line, status = answer(words.split(), capsys)
    assert told in line
    assert status == 2


def test_a_run_that_cannot_be_written(folder, capsys):
    line, status = answer(["train", "digits", "--epochs", "1", "--run", "text"], capsys)
    assert "--run text: cannot be written (" in line
    assert "give another folder" in line
    assert status == 2


#: Root may look at any path but one that is too long.
LONG = "x" * 300


def test_a_run_that_cannot_be_looked_at(folder, capsys):
    line, status = answer(["train", "digits", "--epochs", "1", "--run", LONG], capsys)
    assert "cannot be written (File name too long): give another folder" in line
    assert status == 2


def test_a_file_that_is_forbidden(folder, monkeypatch, capsys):
    def refused(options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/kept/x.html")

    monkeypatch.setattr("hpctk.cli.schedule.run", refused)
    line, status = answer(["schedule", "list"], capsys)
    assert line == "hpctk schedule: /kept/x.html: Permission denied; give another path\n"
    assert status == 2


def test_a_quickstart_where_nothing_can_be_written(folder, capsys):
    (folder / "runs").write_text("no folder")
    line, status = answer(["quickstart"], capsys)
    assert "runs/quickstart.lock: cannot be written (" in line
    assert "start it in a folder of yours" in line
    assert status == 2


def test_a_misspelt_name_of_the_package():
    done = subprocess.run(
        [sys.executable, "-c", "import hpctk; hpctk.SAEFF"], env=clean_environment(), capture_output=True, text=True
    )
    assert "module 'hpctk' has no attribute 'SAEFF'. Did you mean: 'SAEF'?" in done.stderr


PLAIN = """
import torch, hpctk
model = torch.nn.Linear(2, 1)
hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model)
"""


def test_plain_python_instead_of_mpirun():
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "Start more with `hpctk mpirun -n 4 python train.py`" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpctk.cli.schedule.run", interrupted)
    assert cli.main(["schedule", "list"]) == 130
    assert capsys.readouterr().err == "\nhpctk schedule: stopped\n"


def test_ctrl_c_of_a_rank_is_for_mpi4py(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("hpctk.cli.schedule.run", interrupted)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(KeyboardInterrupt):
        cli.main(["schedule", "list"])
