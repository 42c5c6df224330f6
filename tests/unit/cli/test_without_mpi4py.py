"""hpctk where mpi4py is not installed: what needs none works, what needs one says what to install."""

import subprocess
import sys

import pytest
from jobs import clean_environment

WITHOUT = "import sys; sys.modules['mpi4py'] = None\n"
COMMAND = WITHOUT + "from hpctk.cli import main; sys.exit(main())"
INSTALL = 'pip install "hpctk[mpi]"'


def python(program, *words, cwd=None):
    return subprocess.run(
        [sys.executable, "-c", program, *words], env=clean_environment(), cwd=cwd, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


def test_the_package_and_its_way_in_for_torchrun():
    done = python(WITHOUT + "import hpctk, hpctk.ddp; print(hpctk.ddp.DistributedOptimizer.__name__)")
    assert done.stdout == "DistributedOptimizer\n", done.stderr


@pytest.mark.parametrize(
    "words", ["--help", "schedule list", "train digits --check", "slurm render ddp -- python x.py"]
)
def test_what_needs_none(words):
    done = python(COMMAND, *words.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words",
    ["train digits --epochs 1", "calibrate", "run -m json.tool", "quickstart", "mpirun -n 2 python -m json.tool"],
)
def test_what_needs_one_says_so_in_one_line(words, tmp_path):
    done = python(COMMAND, *words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"hpctk {words.split()[0]}: ")
    assert INSTALL in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_mpi4py_that_finds_no_library():
    words = ["-m", "hpctk", "train", "digits", "--epochs", "1"]
    environ = clean_environment(MPI4PY_LIBMPI="/no/such/libmpi.so")
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert INSTALL in done.stderr
