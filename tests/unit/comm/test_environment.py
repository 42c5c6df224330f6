"""The variables hpctk reads: defaults, ranges, and errors that name the variable and what it may be."""

import re
from pathlib import Path

import pytest

import hpctk
from hpctk.comm import environment
from hpctk.errors import SettingError
from hpctk.settings import settings_of
from hpctk.telemetry.settings import StatsSettings


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 600.0), ("", 600.0), ("600", 600.0), ("0.5", 0.5), ("1e3", 1000.0)]
)
def test_timeout(text, seconds):
    assert environment.read("HPCTK_TIMEOUT_S", {} if text is None else {"HPCTK_TIMEOUT_S": text}) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "1e999", "ten", "5s", " "])
def test_timeout_out_of_range(text):
    with pytest.raises(SettingError) as caught:
        environment.read("HPCTK_TIMEOUT_S", {"HPCTK_TIMEOUT_S": text})
    assert f"HPCTK_TIMEOUT_S={text!r}" in str(caught.value)
    assert "above 0" in str(caught.value)


@pytest.mark.parametrize(("text", "answer"), [(None, None), ("", None), ("0", "0"), ("1", "1")])
def test_gpu_aware(text, answer):
    assert environment.read("HPCTK_GPU_AWARE", {} if text is None else {"HPCTK_GPU_AWARE": text}) == answer


@pytest.mark.parametrize("text", ["yes", "2", " 1", "true", "-1"])
def test_gpu_aware_out_of_range(text):
    with pytest.raises(SettingError, match=re.escape(f"HPCTK_GPU_AWARE={text!r}: allowed are 0, 1")):
        environment.read("HPCTK_GPU_AWARE", {"HPCTK_GPU_AWARE": text})


def test_complaints_name_every_bad_value():
    complaints = environment.complaints({"HPCTK_TIMEOUT_S": "soon", "HPCTK_GPU_AWARE": "maybe"})
    assert [text.partition("=")[0] for text in complaints] == ["HPCTK_TIMEOUT_S", "HPCTK_GPU_AWARE"]
    assert environment.complaints({"HPCTK_TIMEOUT_S": "5", "OTHER": "soon"}) == []
    assert environment.complaints({"HPCTK_STATS_EVENTS": "-1", "HPCTK_PROGRESS": "fancy"}) == [
        "HPCTK_STATS_EVENTS='-1': need a whole number, 0 or more",
        "HPCTK_PROGRESS='fancy': allowed are bar, lines, none",
    ]


def test_defaults_of_statistics_are_those_of_their_settings():
    declared = settings_of(StatsSettings)
    assert environment.VARIABLES["HPCTK_STATS_EVENTS"].default == declared["events"].default
    assert environment.VARIABLES["HPCTK_STATS_FLUSH_S"].default == declared["flush_s"].default


def test_misspelt_variables_are_found():
    environ = {"HPCTK_TIMEOUTS": "5", "HPCTK_TIMEOUT_S": "5", "HPCTK_A": "", "MY_HPCTK_B": "1", "hpctk_c": "1"}
    assert environment.unknown_variables(environ) == ["HPCTK_A", "HPCTK_TIMEOUTS"]


def test_every_variable_the_package_mentions_is_known():
    # One that is read but not listed would be reported as misspelt by `hpctk doctor`.
    mentioned = {}
    for module in Path(hpctk.__file__).parent.rglob("*.py"):
        for name in re.findall(r"\bHPCTK_[A-Z0-9_]*[A-Z0-9]\b", module.read_text()):
            mentioned.setdefault(name, module.name)
    assert "HPCTK_TIMEOUT_S" in mentioned
    assert {name: where for name, where in mentioned.items() if name not in environment.VARIABLES} == {}
