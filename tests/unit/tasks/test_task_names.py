"""Misspelt names of methods, their settings and schedules: found without torch, with the name that was meant."""

import dataclasses
import subprocess
import sys

import pytest
from heavy_imports import BLOCKER, INSPECTION
from jobs import clean_environment

from hpctk.cli import launcher
from hpctk.compressors import by_name
from hpctk.errors import SettingError
from hpctk.methods import METHODS, method_class
from hpctk.tasks.core import recipes
from hpctk.tasks.core.settings import DigitsSettings


@pytest.mark.parametrize("method", METHODS)
def test_settings_are_read_from_the_source_as_python_has_them(method):
    known = [field.name for field in dataclasses.fields(method_class(method))]
    assert recipes.method_settings(method.lower()) == known


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"method": "saeff"}, "method='saeff': did you mean saef? known are adacons"),
        ({"method": "mean,mgrava"}, "method='mgrava': did you mean mgrawa?"),
        ({"method": "SASG"}, "method='SASG': did you mean sasg?"),
        ({"method": "magic"}, "method='magic': known are adacons"),
        ({"method": "mean,all"}, "and all by itself"),
        ({"schedule": "rign"}, "schedule='rign': did you mean ring? known are ring"),
        ({"schedule": "atuo"}, "did you mean auto?"),
        (
            {"method": "lgrawa", "method_settings": {"perod": 3}},
            "lgrawa has no setting 'perod': did you mean period? known are period, pull",
        ),
        ({"method_settings": {"server": "sign"}}, "mean has no setting 'server': known are compressor"),
    ],
    ids=str,
)
def test_a_wrong_name(given, wanted):
    with pytest.raises(SettingError) as error:
        recipes.check(DigitsSettings(**given))
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "all"},
        {"method": "mean:topk:0.01, celgc"},
        {"method": "saef", "method_settings": {"server": "sign"}},
        {"schedule": "hierarchical"},
        {"schedule": "auto"},
        {"schedule": "mpi"},
    ],
    ids=str,
)
def test_right_names(given):
    recipes.check(DigitsSettings(**given))


def test_a_compressor_that_was_meant():
    with pytest.raises(SettingError, match=r"compressor='topkk:0\.1': did you mean topk\?"):
        by_name("topkk:0.1")


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--method", "saeff"], 2, "did you mean saef?"),
        (["--method", "celgc", "--set", "clipp=1"], 2, "did you mean clip?"),
        (["--schedule", "rign"], 2, "did you mean ring?"),
        (["--epochs", "0"], 2, "epochs=0: need a whole number"),
        (["--epochs", "x"], 2, "invalid int value"),
        (["--help"], 0, "passes over the data [20]"),
    ],
    ids=str,
)
def test_nothing_heavy_is_imported_to_find_it(words, code, shown):
    program = f"""
try:
    runpy.run_module("hpctk", run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    assert leaving.code == {code}, leaving.code
{INSPECTION}"""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER + program, "train", "digits", *words],
        capture_output=True, text=True, env=clean_environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("light\n")
    assert shown in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, 0),
        ({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0"}, 3),
        ({"PMI_RANK": "2"}, 2),
        ({"PMIX_RANK": "4", "SLURM_PROCID": "4"}, 4),
        ({"SLURM_PROCID": "1"}, 1),
        ({"PMI_RANK": "none"}, 0),
    ],
    ids=str,
)
def test_the_rank_before_mpi_is_started(environ, rank):
    assert launcher.rank(environ) == rank
