"""The template for packages of others, installed away from the checkout: found by name, trained with, tested."""

import json
import os
import shutil
import sys

import pytest
from jobs import ROOT, mpirun, run

HPCTK = ("-m", "mpi4py", "-m", "hpctk")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a PYTHONPATH on which the package is found: built from a copy, for a build leaves folders behind."""
    source, target = tmp_path_factory.mktemp("source") / "extension", tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "examples" / "extension", source)
    ended = run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
            "--target", str(target), str(source),
        ],
        150,
    )  # fmt: skip
    assert ended.code == 0, ended.output
    return os.pathsep.join([str(target), str(ROOT), os.environ.get("PYTHONPATH", "")])


def test_it_trains_by_its_name(installed, tmp_path):
    result = tmp_path / "result.json"
    words = [
        "train", "digits", "--method", "localclip", "--set", "norm=0.5", "--schedule", "star", "--epochs", "2",
        "--json", str(result),
    ]  # fmt: skip
    ended = run(mpirun(2, sys.executable, *HPCTK, *words), 150, PYTHONPATH=installed)
    assert ended.code == 0, ended.output
    trained = json.loads(result.read_text())["methods"]["localclip"]
    assert trained["complete"]
    assert trained["settings"] == {"method": "LocalClip", "norm": 0.5}


def test_all_three_are_listed_and_understood(installed):
    program = (
        "from hpctk.cli import main\n"
        "for words in (['train', '--list-methods'], ['schedule', 'list'],\n"
        "              ['train', 'digits', '--method', 'mean:threshold:0.02', '--check']):\n"
        "    assert main(words) == 0\n"
    )
    ended = run([sys.executable, "-c", program], 100, PYTHONPATH=installed)
    assert ended.code == 0, ended.output
    assert "localclip  averaging of gradients that every rank has clipped by itself" in ended.output
    assert "norm: a finite number above 0 [1]; largest norm of a rank's gradient" in ended.output
    assert "threshold[:LEAST]" in ended.output
    assert "rank 0 adds everything up and hands it out" in ended.output
    assert "the settings make sense" in ended.output


def test_the_kit_finds_nothing(installed):
    program = (
        "from hpctk.testing import check_method, check_schedule\n"
        "from hpctk_example.star import STAR\n"
        "check_schedule(STAR, range(1, 9))\n"
        "check_method('localclip', norm=0.5, steps=12)\n"
    )
    ended = run([sys.executable, "-c", program], 150, PYTHONPATH=installed)
    assert ended.code == 0, ended.output


def test_the_kit_says_what_is_wrong(tmp_path):
    """Every rank keeps its own gradient: the models drift apart."""
    (tmp_path / "selfish.py").write_text(
        "from dataclasses import dataclass\n"
        "from hpctk.extend import GradientMethod, GradientRun\n"
        "class SelfishRun(GradientRun):\n"
        "    def exchange(self, gradients):\n"
        "        pass\n"
        "@dataclass(frozen=True)\n"
        "class Selfish(GradientMethod):\n"
        "    summary = 'no exchange'\n"
        "    def begin(self, replica):\n"
        "        return SelfishRun(replica)\n"
    )
    program = "from hpctk.testing import check_method\ncheck_method('selfish:Selfish', steps=12)\n"
    ended = run([sys.executable, "-c", program], 100, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert ended.code == 1
    assert "selfish:Selfish on 2 ranks: what is shared after step 0 differs from rank to rank" in ended.output
