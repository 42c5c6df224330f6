"""What other packages offer is found by name, and what is wrong with it is said with the package's name."""

import logging
from importlib.metadata import EntryPoint

import pytest

from hpctk import compressors, methods, plugins
from hpctk.errors import SettingError
from hpctk.methods.local_sgd import LocalSGD
from hpctk.schedules import build
from hpctk.schedules.core import registry
from hpctk.tasks.core import recipes
from hpctk.tasks.core.settings import DigitsSettings


@pytest.fixture
def offer(monkeypatch):
    """Let packages offer things by (group, name, value)."""
    offered = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: [one for one in offered if one.group == group])

    def add(group, name, value):
        offered.append(EntryPoint(name, value, group))
        plugins._offered.cache_clear()

    plugins._offered.cache_clear()
    plugins._warn_once.cache_clear()
    yield add
    plugins._offered.cache_clear()


def test_a_method_is_found_by_its_name(offer):
    offer("hpctk.methods", "theirs", "hpctk.methods.local_sgd:LocalSGD")
    assert methods.names()[-1] == "theirs"
    assert methods.by_name("theirs") is LocalSGD
    recipes.check(DigitsSettings(method="theirs", method_settings={"period": 3}))
    (recipe,) = recipes.recipes(DigitsSettings(method="theirs", method_settings={"period": 3}), {})
    assert recipe.make() == LocalSGD(3)
    (recipe,) = recipes.recipes(DigitsSettings(method="theirs", method_settings={"perod": 3}), {})
    with pytest.raises(SettingError, match="theirs has no setting 'perod': did you mean period"):
        recipe.make()


def test_a_misspelt_name_of_theirs_is_found(offer):
    offer("hpctk.methods", "localclip", "nowhere:Nothing")
    with pytest.raises(SettingError, match=r"method='localclp': did you mean localclip\?"):
        recipes.check(DigitsSettings(method="localclp"))


def test_a_package_that_cannot_be_imported_is_named(offer):
    offer("hpctk.methods", "broken", "no_such_package:Method")
    assert "broken" in methods.names(), "a name is known without the package being imported"
    with pytest.raises(SettingError, match=r"'broken' of .* cannot be loaded from no_such_package:Method: ModuleNot"):
        methods.by_name("broken")


@pytest.mark.parametrize(
    ("group", "use", "need"),
    [
        ("hpctk.methods", methods.by_name, r"hpctk\.extend\.GradientMethod"),
        ("hpctk.compressors", compressors.by_name, r"hpctk\.extend\.Compressor"),
        ("hpctk.schedules", lambda name: build(name, "allreduce", 2), r"hpctk\.schedules\.Schedule"),
    ],
)
def test_something_else_is_refused(group, use, need, offer):
    offer(group, "odd", "math:sqrt")
    with pytest.raises(SettingError, match=rf"'odd' of .*math:sqrt.*need .*{need}"):
        use("odd")


def test_two_packages_with_one_name_are_refused(offer):
    offer("hpctk.methods", "twice", "hpctk.methods.local_sgd:LocalSGD")
    offer("hpctk.methods", "twice", "hpctk.methods.local_sgd:LocalSGD")
    assert methods.by_name("twice") is LocalSGD, "the same thing found in two places on the path is one thing"
    offer("hpctk.methods", "twice", "hpctk.methods.mean:Mean")
    with pytest.raises(SettingError, match="'twice' is offered by"):
        methods.by_name("twice")


def test_names_of_hpctk_are_not_taken_over(offer, caplog):
    offer("hpctk.methods", "mean", "hpctk.methods.local_sgd:LocalSGD")
    offer("hpctk.schedules", "auto", "math:sqrt")
    offer("hpctk.compressors", "TopK2", "math:sqrt")
    with caplog.at_level(logging.WARNING):
        assert methods.names() == list(methods.PUBLIC)
        assert registry.offered() == []
        assert [form.partition(":")[0].partition("[")[0] for form in compressors.forms()] == [*compressors.COMPRESSORS]
    assert [text for text in caplog.messages if "'mean', which is hpctk's own" in text]
    assert [text for text in caplog.messages if "'TopK2': need a word in lower case" in text]


def test_a_schedule_is_built_where_it_is_named_and_never_chosen(offer):
    offer("hpctk.schedules", "theirs", "hpctk.schedules.core.registry:SCHEDULES")
    assert "theirs" not in registry.names("allreduce", with_nodes=True)
    recipes.check(DigitsSettings(schedule="theirs"))
    with pytest.raises(SettingError, match="known are ring, .*theirs"):
        build("thiers", "allreduce", 2)


def test_a_compressor_is_written_as_ours_are(offer):
    offer("hpctk.compressors", "theirs", "hpctk.compressors.top_k:TopK")
    assert "theirs:DENSITY" in compressors.forms()
    assert compressors.by_name("theirs:0.25").density == 0.25
