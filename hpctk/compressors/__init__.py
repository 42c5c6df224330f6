"""Compressors: how a tensor is written down in fewer bytes.

A new one is a file beside this one, and an entry in `COMPRESSORS`. The text after a colon on a command line is its
first setting, unless that has to be given by name. Other packages bring theirs by the entry point
`hpctk.compressors`: docs/extend.md.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from hpctk import plugins
from hpctk.compressors.chunk_top_k import ChunkTopK
from hpctk.compressors.core.compressor import Compressor, Residuals
from hpctk.compressors.core.packet import Packet
from hpctk.compressors.half import Half
from hpctk.compressors.identity import Identity
from hpctk.compressors.power_sgd import PowerSGD
from hpctk.compressors.qsgd import QSGD
from hpctk.compressors.random_k import RandomK
from hpctk.compressors.sign import Sign
from hpctk.compressors.top_k import TopK
from hpctk.errors import SettingError
from hpctk.nearest import hint
from hpctk.settings import REQUIRED, Setting, settings_of

#: Compressors by their name on a command line.
COMPRESSORS: dict[str, type[Compressor]] = {
    "identity": Identity,
    "half": Half,
    "topk": TopK,
    "chunktopk": ChunkTopK,
    "randomk": RandomK,
    "sign": Sign,
    "qsgd": QSGD,
    "powersgd": PowerSGD,
}

#: What a setting that is a compressor allows, in words.
A_COMPRESSOR = "a compressor such as hpctk.TopK(0.01)"

__all__ = [
    "A_COMPRESSOR",
    "COMPRESSORS",
    "QSGD",
    "ChunkTopK",
    "Compressor",
    "Half",
    "Identity",
    "Packet",
    "PowerSGD",
    "RandomK",
    "Residuals",
    "Sign",
    "TopK",
    "by_name",
    "forms",
]


def by_name(text: str) -> Compressor:
    """Return the compressor that a command line names: "topk:0.01", "sign", "half:bfloat16".

    Raises
    ------
    SettingError
        For an unknown name, or a value that is missing, superfluous or out of range.
    """
    name, colon, value = text.partition(":")
    if name not in COMPRESSORS and name not in _offered():
        known = [*COMPRESSORS, *_offered()]
        raise SettingError(f"compressor={text!r}: {hint(name, known)}known are {', '.join(forms())}")
    make, (argument, about) = _class(name), _argument(name)
    if not colon and (about is None or about.default is not REQUIRED):
        return make()
    if about is None or not value:
        raise SettingError(f"compressor={text!r}: allowed is {_form(name)}")
    try:
        return make(**{argument: about.parse(argument, value)})
    except SettingError as error:
        raise SettingError(f"compressor={text!r}: allowed is {_form(name)} ({error})") from None


def forms() -> list[str]:
    """Return how each compressor is written on a command line, optional parts in brackets."""
    return [_form(name) for name in (*COMPRESSORS, *_offered())]


def _offered() -> list[str]:
    """Return the names of the compressors that other packages bring. Imports none of them."""
    return plugins.names(plugins.COMPRESSORS, COMPRESSORS)


def _class(name: str) -> type[Compressor]:
    if name in COMPRESSORS:
        return COMPRESSORS[name]
    found = plugins.load(plugins.COMPRESSORS, name)
    if not (isinstance(found, type) and issubclass(found, Compressor) and is_dataclass(found)):
        raise plugins.refuse(plugins.COMPRESSORS, name, found, "a dataclass that derives from hpctk.extend.Compressor")
    return found


def _form(name: str) -> str:
    argument, about = _argument(name)
    if about is None:
        return name
    shown = "|".join(about.choices) or argument.upper()
    return f"{name}:{shown}" if about.default is REQUIRED else f"{name}[:{shown}]"


def _argument(name: str) -> tuple[str, Setting | None]:
    """Return the setting that may follow the name and a colon; None where there is none."""
    positional = [field.name for field in fields(_class(name)) if not field.kw_only]
    return next(((one, settings_of(_class(name))[one]) for one in positional), ("", None))
