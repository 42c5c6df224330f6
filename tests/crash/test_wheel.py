"""The wheel holds what the package needs besides its modules."""

import subprocess
import sys
import zipfile

import pytest
from jobs import ROOT, clean_environment

from hpctk.slurm.options import KINDS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build it from a copy: a build leaves folders beside what it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
    packed = subprocess.run(
        ["tar", "--null", "-T-", "--ignore-failed-read", "-cf-"],
        cwd=ROOT, input=files, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    subprocess.run(["tar", "-xf-"], cwd=source, input=packed.stdout, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", target, source]
    subprocess.run(command, check=True, env=clean_environment(), timeout=200)
    (made,) = target.glob("*.whl")
    return made


def test_templates_and_data_are_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"hpctk/templates/{kind}.sbatch" for kind in KINDS} <= names
    assert {"hpctk/data/digits.h5", "hpctk/py.typed"} <= names
    assert {"hpctk/stats/report/page.css", "hpctk/stats/report/page.js"} <= names


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
