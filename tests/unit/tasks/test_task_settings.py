"""Settings of training jobs: layers, files, and errors that say what is allowed."""

import dataclasses

import pytest

from hpctk.cli.core.task_options import overrides
from hpctk.errors import SettingError
from hpctk.settings import settings_of
from hpctk.tasks import TASKS, task_class
from hpctk.tasks.core import recipes
from hpctk.tasks.core.run_folder import RunFolder
from hpctk.tasks.core.settings import differences, read, resolve, toml
from hpctk.tasks.digits import DigitsSettings
from hpctk.tasks.fashion import FashionSettings
from hpctk.tasks.regression import RegressionSettings


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"epochs": 0}, "epochs=0: need a whole number from 1 to 10000"),
        ({"epochs": 2.5}, "epochs=2.5: need a whole number"),
        ({"epochs": True}, "epochs=True: need a whole number"),
        ({"batch": "many"}, "batch='many': need a whole number"),
        ({"lr": float("nan")}, "lr=nan: need a number from 0 to 100"),
        ({"lr": "fast"}, "lr='fast': need a number"),
        ({"momentum": 1.5}, "momentum=1.5: need a number from 0 to 1"),
        ({"seed": -1}, "seed=-1: need a whole number from 0 to 2147483647"),
        ({"time_budget_s": 0.0}, "time_budget_s=0.0: need a number from 0.001 to"),
        ({"checkpoint_steps": 0}, "checkpoint_steps=0: need a whole number from 1 to"),
        ({"method_settings": 3}, "method_settings=3: need a table"),
        ({"method": None}, "method=None: need a text"),
        ({"data": 7}, "data=7: need a text"),
        ({"model": "transformer"}, "model='transformer': allowed are mlp, cnn"),
    ],
)
def test_out_of_range(given, wanted):
    with pytest.raises(SettingError) as caught:
        FashionSettings(**given)
    assert wanted in str(caught.value)


def test_a_whole_number_serves_as_a_float():
    assert repr(DigitsSettings(lr=1).lr) == "1.0"


def test_later_layers_win_and_method_settings_are_merged():
    settings = resolve(
        DigitsSettings,
        {"lr": 0.2, "seed": 5, "method_settings": {"period": 4, "pull": 0.1}},
        {"seed": 6, "method_settings": {"pull": 0.3}},
        {"method_settings": {}},
    )
    assert (settings.lr, settings.seed, settings.epochs) == (0.2, 6, 20)
    assert settings.method_settings == {"period": 4, "pull": 0.3}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("epoch = 3", "no setting 'epoch' for digits: known are task, method, method_settings, compressor"),
        ("epochs = 0", "epochs=0: need a whole number from 1 to 10000"),
        ("task = 'lm'", "task='lm', but the command line says digits"),
        ("epochs == 3", "is not TOML"),
        ("data = 'x'", "no setting 'data' for digits"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, wanted):
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(SettingError) as caught:
        read(path, DigitsSettings)
    assert str(caught.value).startswith(f"{path}: ")
    assert wanted in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingError, match="no.toml: cannot be read .No such file"):
        read(tmp_path / "no.toml", DigitsSettings)
    (tmp_path / "picture.toml").write_bytes(b"\x89PNG\xff")
    with pytest.raises(SettingError, match="it is no text"):
        read(tmp_path / "picture.toml", DigitsSettings)


@pytest.mark.parametrize("task", TASKS)
def test_what_was_saved_is_read_again(tmp_path, task):
    kind = task_class(task).settings_class
    tricky = 'a "quoted"\\ name\n with \x7f \U0001f600 ü'
    settings = kind(
        method="mgrawa",
        method_settings={"period": 8, "pull": 1e-05, "asynchronous": True, "norms": tricky},
        compressor=tricky,
        lr=1e-7,
        time_budget_s=3,
    )
    path = tmp_path / "settings.toml"
    path.write_text(toml(settings, "a remark"))
    assert kind(**read(path, kind)) == settings


def test_differences_name_what_changed_and_forgive_what_does_not_matter():
    saved = {"lr": 0.2, "checkpoint_steps": 5}
    assert differences(saved, DigitsSettings(lr=0.2, time_budget_s=9, checkpoint_minutes=1)) == []
    assert differences(saved, DigitsSettings(lr=0.2, epochs=3)) == ["epochs was 20, not 3"]


def test_a_run_is_never_overwritten(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.begin(DigitsSettings(epochs=3), "first", resume=True)
    before = (tmp_path / "run" / "settings.toml").read_text()
    with pytest.raises(SettingError, match="holds a run already: --resume goes on with it, another --run"):
        folder.begin(DigitsSettings(epochs=3), "again", resume=False)
    with pytest.raises(SettingError, match="other settings: epochs was 3, not 4"):
        folder.begin(DigitsSettings(epochs=4), "again", resume=True)
    assert (tmp_path / "run" / "settings.toml").read_text() == before
    assert folder.begin(DigitsSettings(epochs=3), "again", resume=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["settings.toml"]


def test_results_are_whole_and_plain_json(tmp_path):
    folder = RunFolder(tmp_path / "run").of_method("mean:topk:0.01", several=True)
    assert folder.result() is None
    folder.write_result({"loss": float("inf"), "curve": [1.5, float("nan")]})
    assert folder.result() == {"loss": None, "curve": [1.5, None]}
    assert [path.name for path in (tmp_path / "run" / "mean-topk-0.01").iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"method": "adam"}, "method='adam': known are adacons, sasg, saef"),
        ({"method": "mean,mean"}, "mean is there twice"),
        ({"method": "saef:sign"}, "only mean takes a compressor so"),
        (
            {"method": "mgrawa", "method_settings": {"perod": 3}},
            "mgrawa has no setting 'perod': did you mean period? known are period",
        ),
        ({"method": "mgrawa", "method_settings": {"period": 0}}, "period=0: need a whole number"),
        ({"method": "adacons", "compressor": "sign"}, "adacons has no setting 'compressor'"),
        ({"method": "sasg", "compressor": "sign"}, "an upload lists elements; take TopK or ChunkTopK"),
        ({"method": "mean", "compressor": "zip"}, "compressor='zip': known are identity, half"),
        ({"method": "all", "compressor": "sign"}, "compressor: give one method with it"),
        ({"method": "mean,saef", "method_settings": {"feedback": False}}, "feedback: give one method with it"),
    ],
)
def test_wrong_methods(given, wanted):
    with pytest.raises(SettingError) as caught:
        for recipe in recipes.recipes(DigitsSettings(**given), {}):
            recipe.make()
    assert wanted in str(caught.value)


def test_methods_get_what_was_asked_for():
    (one,) = recipes.recipes(DigitsSettings(method="saef", compressor="topk:0.5"), {})
    assert one.make().compressor.density == 0.5
    names = [one.name for one in recipes.recipes(DigitsSettings(method="all"), {})]
    assert names == ["mean", "adacons", "sasg", "saef", "mgrawa", "lgrawa", "celgc"]
    suited = task_class("regression").recipes
    (adacons,) = recipes.recipes(RegressionSettings(method="adacons"), suited)
    assert adacons.make().scale == "unit"


def test_overrides_are_numbers_where_they_look_like_them():
    texts = ["period=8", "pull=0.5", "asynchronous=true", "server=none", "norms=a=b"]
    assert overrides(texts) == {
        "period": 8, "pull": 0.5, "asynchronous": True, "server": "none", "norms": "a=b"
    }  # fmt: skip
    for text in ("period", "=8"):
        with pytest.raises(SettingError, match="need KEY=VALUE"):
            overrides([text])


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_says_what_it_means(task):
    kind = task_class(task).settings_class
    declared = settings_of(kind)
    assert list(declared) == [field.name for field in dataclasses.fields(kind)]
    assert all(len(one.meaning) > 5 for one in declared.values())
