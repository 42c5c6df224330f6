"""One declaration of a setting gives its checks, its messages, its texts and its docstring."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import hpctk
from hpctk.cli import main
from hpctk.comm.environment import VARIABLES
from hpctk.compressors import COMPRESSORS, by_name
from hpctk.compressors.core.compressor import Compressor
from hpctk.errors import SettingError
from hpctk.methods import METHODS
from hpctk.settings import check, documented, read_toml, required, rows, setting, settings_of


@documented
@dataclass(frozen=True)
class Sample:
    """Settings of all kinds."""

    share: float = field(metadata=required("how much", above=0, at_most=1))
    rate: float | None = setting(None, "how fast", at_least=0, shown="as asked")
    memory: float = setting(0.5, "how long", at_least=0, below=1)
    longest: float = setting(math.inf, "how far", at_least=0, at_most=math.inf)
    steps: int = setting(3, "how often", at_least=1)
    bits: int = setting(4, "how fine", at_least=2, at_most=8)
    order: str = setting("sum", "in which way", choices=("sum", "mean"))
    loud: bool = setting(False, "whether to tell")
    names: Sequence[str] = setting((), "which ones")
    probe: Callable[[], Any] | None = setting(None, "what to call")
    table: dict[str, int] = setting({}, "of numbers")
    even: int = setting(2, "in pairs", allowed="an even number", is_allowed=lambda n: n % 2 == 0)
    free: int = 7

    def __post_init__(self):
        check(self)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 0}, "share=0: need a number above 0, at most 1"),
        ({"share": math.nan}, "share=nan: need a number above 0, at most 1"),
        ({"share": None}, "share=None: need a number above 0, at most 1"),
        ({"rate": -1}, "rate=-1: need a finite number, 0 or more, or none"),
        ({"rate": math.inf}, "rate=inf: need a finite number, 0 or more, or none"),
        ({"rate": 10**400}, f"rate={10**400}: need a finite number, 0 or more, or none"),
        ({"memory": 1}, "memory=1: need a number from 0 to below 1"),
        ({"longest": math.nan}, "longest=nan: need a number, 0 or more"),
        ({"steps": True}, "steps=True: need a whole number, 1 or more"),
        ({"steps": 1.0}, "steps=1.0: need a whole number, 1 or more"),
        ({"bits": 9}, "bits=9: need a whole number from 2 to 8"),
        ({"order": "max"}, "order='max': allowed are sum, mean"),
        ({"order": ["sum"]}, "order=['sum']: allowed are sum, mean"),
        ({"loud": 1}, "loud=1: need true or false"),
        ({"names": "abc"}, "names='abc': need a list of texts"),
        ({"names": ["a", 1]}, "names=['a', 1]: need a list of texts"),
        ({"names": 3}, "names=3: need a list of texts"),
        ({"probe": 3}, "probe=3: need a function, or none"),
        ({"table": []}, "table=[]: need a table"),
        ({"even": 3}, "even=3: need an even number"),
        ({"even": "3"}, "even='3': need an even number"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_named_with_what_is(given, message):
    with pytest.raises(SettingError) as caught:
        Sample(**{"share": 0.5, **given})
    assert str(caught.value) == message


def test_values_come_back_as_their_types_want_them():
    values = check(Sample(share=1, longest=math.inf, names=["a", "b"], probe=print, free="anything"))
    assert repr(values["share"]) == "1.0"
    assert values["names"] == ("a", "b")
    assert "free" not in values


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("share", "1", 1.0), ("share", "1e-3", 0.001), ("rate", "None", None), ("steps", "12", 12),
        ("order", "mean", "mean"), ("loud", "True", True), ("loud", "false", False), ("longest", "inf", math.inf),
    ],
)  # fmt: skip
def test_texts_are_read_by_type(name, text, value):
    read = settings_of(Sample)[name].parse(name, text)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("share", "2"), ("share", "much"), ("share", "none"), ("steps", "1.5"), ("steps", ""), ("loud", "yes")],
)  # fmt: skip
def test_texts_that_mean_nothing(name, text):
    with pytest.raises(SettingError, match=f"^{name}='?{text}'?: "):
        settings_of(Sample)[name].parse(name, text)


def test_docstrings_and_tables_tell_the_same():
    table = {row[0]: row[1:] for row in rows(settings_of(Sample))}
    assert table["share"] == ("a number above 0, at most 1", "", "how much")
    assert table["rate"] == ("a finite number, 0 or more", "as asked", "how fast")
    assert table["loud"] == ("true or false", "false", "whether to tell")
    assert table["names"][1] == table["table"][1] == "none"
    text = inspect.getdoc(Sample)
    assert text.startswith("Settings of all kinds.\n\nParameters\n----------\nshare : a number above 0, at most 1\n")
    assert "bits : a whole number from 2 to 8, by default 4\n    How fine.\n" in text


@pytest.mark.parametrize("name", [*METHODS, *(kind.__name__ for kind in COMPRESSORS.values())])
def test_every_argument_of_methods_and_compressors_is_a_setting(name):
    kind = getattr(hpctk, name)
    declared = settings_of(kind)
    parameters = inspect.signature(kind).parameters.values()
    # Earlier names of methods' settings are keywords alone.
    earlier = {"feedback"} & {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert list(declared) == [one.name for one in parameters if one.name not in earlier]
    assert all(len(one.meaning) > 5 for one in declared.values())
    assert all(f"\n{setting} : " in inspect.getdoc(kind) for setting in declared)


def test_compressors_are_read_from_texts_where_methods_want_one():
    about = settings_of(hpctk.SAEF)
    assert repr(about["server"].parse("server", "topk:0.5")) == "TopK(0.5)"
    assert about["server"].parse("server", "none") is None
    with pytest.raises(SettingError, match=r"^compressor='topk:2': allowed is topk:DENSITY \(density='2': need"):
        about["compressor"].parse("compressor", "topk:2")


class Halved(Compressor):
    """A user's own compressor, with a constructor as everyone writes it."""

    combines = "summed"

    def __init__(self, factor, *, exclude=()):
        super().__init__(exclude=exclude)
        self.factor = factor

    def _encode(self, flat, shape, name, stamp):
        return flat * self.factor

    def _decode(self, packet):
        return packet.data.clone()


def test_a_compressor_may_have_a_constructor_of_its_own():
    assert Halved(0.5, exclude=["*.bias"]).settings() == {
        "compressor": "Halved", "factor": 0.5, "exclude": ["*.bias"],
    }  # fmt: skip
    with pytest.raises(SettingError, match="exclude='bias': need a list of texts"):
        Halved(0.5, exclude="bias")


def test_compressors_are_not_equal_by_their_settings():
    # Each keeps a state of its own.
    one, two = by_name("qsgd"), by_name("qsgd")
    assert one != two
    assert len({one, two}) == 2


def test_help_lists_every_variable(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name, about in VARIABLES.items():
        assert f"  {name}\n      {about.meaning} [{about.default_text}]\n" in text


def test_a_file_that_is_no_toml(tmp_path):
    (tmp_path / "a.toml").write_text("a == 1")
    with pytest.raises(SettingError, match=r"a\.toml: is not TOML"):
        read_toml(tmp_path / "a.toml")
