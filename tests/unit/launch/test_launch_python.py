"""Where `-m mpi4py` goes in the command line of a Python program."""

import shlex

import pytest

from hpctk.launch.command_line import MPIRUN, CommandLine
from hpctk.launch.python_program import through_mpi4py


@pytest.mark.parametrize(
    ("typed", "made"),
    [
        ("python train.py --epochs 3", "python -m mpi4py train.py --epochs 3"),
        ("python3 train.py", "python3 -m mpi4py train.py"),
        ("/v/bin/python3.11 train.py", "/v/bin/python3.11 -m mpi4py train.py"),
        ("python -u -X faulthandler -W error train.py", "python -u -X faulthandler -W error -m mpi4py train.py"),
        ("python -uBWerror train.py", "python -uBWerror -m mpi4py train.py"),
        ("python -OXdev train.py -c 1", "python -OXdev -m mpi4py train.py -c 1"),
        ("python --check-hash-based-pycs always a.py", "python --check-hash-based-pycs always -m mpi4py a.py"),
        ("python -m mypackage.train -m x", "python -m mpi4py -m mypackage.train -m x"),
        ("python -mmypackage x", "python -m mpi4py -mmypackage x"),
        ("python -um mypackage x", "python -u -m mpi4py -m mypackage x"),
        ("python -c 'print(1)' -m mpi4py", "python -m mpi4py -c 'print(1)' -m mpi4py"),
        ("python -m hpctk train digits", "python -m mpi4py -m hpctk train digits"),
        ("python - x", "python -m mpi4py - x"),
        ("train.py x", "python -m mpi4py train.py x"),
        ("./my/train.py", "python -m mpi4py ./my/train.py"),
        ("hpctk train digits", "python -m mpi4py -m hpctk train digits"),
        ("/v/bin/hpctk train digits", "/v/bin/python -m mpi4py -m hpctk train digits"),
    ],
)
def test_python_goes_through_mpi4py(typed, made):
    assert shlex.join(through_mpi4py(shlex.split(typed))) == made


def test_ranks_that_may_be_lost_end_jobs_in_turn():
    made = CommandLine(["--with-ft", "ulfm", "-n", "2", "train.py", "x"], MPIRUN).words(plain=False)
    assert made == ["--with-ft", "ulfm", "-n", "2", "python", "-m", "hpctk.comm.mpi.run", "train.py", "x"]


@pytest.mark.parametrize(
    "typed",
    [
        # These end the job themselves.
        "python -m mpi4py train.py",
        "python -u -m mpi4py -m mypackage",
        "python -um mpi4py train.py",
        "python -mmpi4py train.py",
        "python -m mpi4py.futures train.py",
        "python -m hpctk.comm.mpi.run train.py",
        "python -m hpctk run train.py",
        "hpctk run train.py",
        # No program.
        "python",
        "python -V",
        "python -X",
        "python -m",
        # Not Python.
        "./train",
        "bash -c 'python train.py'",
        "env A=b python train.py",
        "pythonic train.py",
        "numactl -N 0 python train.py",
        "",
    ],
)
def test_all_else_is_left_alone(typed):
    words = shlex.split(typed)
    assert through_mpi4py(words) == words
