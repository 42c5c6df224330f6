"""The variables hpctk reads: defaults, ranges, and errors that name the variable and what it may be."""

import re
from pathlib import Path

import pytest

import hpctk
from hpctk.comm import environment
from hpctk.errors import SettingError


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 600.0), ("", 600.0), ("600", 600.0), ("0.5", 0.5), ("1e3", 1000.0)]
)
def test_timeout(text, seconds):
    assert environment.timeout_s({} if text is None else {"HPCTK_TIMEOUT_S": text}) == seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "1e999", "ten", "5s", " "])
def test_timeout_out_of_range(text):
    with pytest.raises(SettingError) as caught:
        environment.timeout_s({"HPCTK_TIMEOUT_S": text})
    assert f"HPCTK_TIMEOUT_S={text!r}" in str(caught.value)
    assert "above 0" in str(caught.value)


@pytest.mark.parametrize(("text", "answer"), [(None, None), ("", None), ("0", False), ("1", True)])
def test_gpu_aware(text, answer):
    assert environment.gpu_aware({} if text is None else {"HPCTK_GPU_AWARE": text}) is answer


@pytest.mark.parametrize("text", ["yes", "2", " 1", "true", "-1"])
def test_gpu_aware_out_of_range(text):
    with pytest.raises(SettingError, match=re.escape(f"HPCTK_GPU_AWARE={text!r}: need 0")):
        environment.gpu_aware({"HPCTK_GPU_AWARE": text})


def test_complaints_name_every_bad_value():
    complaints = environment.complaints({"HPCTK_TIMEOUT_S": "soon", "HPCTK_GPU_AWARE": "maybe"})
    assert [text.partition("=")[0] for text in complaints] == ["HPCTK_TIMEOUT_S", "HPCTK_GPU_AWARE"]
    assert environment.complaints({"HPCTK_TIMEOUT_S": "5", "OTHER": "soon"}) == []


def test_misspelt_variables_are_found():
    environ = {
        "HPCTK_TIMEOUTS": "5",
        "HPCTK_TIMEOUT_S": "5",
        "HPCTK_A": "",
        "MY_HPCTK_B": "1",
        "hpctk_c": "1",
    }
    assert environment.unknown_variables(environ) == ["HPCTK_A", "HPCTK_TIMEOUTS"]


def test_every_variable_the_package_mentions_is_known():
    # One that is read but not listed would be reported as misspelt by `hpctk doctor`.
    mentioned = {}
    for module in Path(hpctk.__file__).parent.rglob("*.py"):
        for name in re.findall(r"\bHPCTK_[A-Z0-9_]*[A-Z0-9]\b", module.read_text()):
            mentioned.setdefault(name, module.name)
    assert "HPCTK_TIMEOUT_S" in mentioned
    assert {name: where for name, where in mentioned.items() if name not in environment.VARIABLES} == {}
