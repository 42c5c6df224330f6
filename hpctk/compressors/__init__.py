"""Compressors: how a tensor is written down in fewer bytes.

A new one is a file beside this one, an entry in `COMPRESSORS`, and a line in `_ARGUMENT` if the text
after the colon on a command line is to mean something.
"""

from __future__ import annotations

from collections.abc import Callable

from hpctk.compressors.core.compressor import Compressor
from hpctk.compressors.core.packet import Packet
from hpctk.compressors.core.residuals import Residuals
from hpctk.compressors.half import Half
from hpctk.compressors.identity import Identity
from hpctk.compressors.power_sgd import PowerSGD
from hpctk.compressors.qsgd import QSGD
from hpctk.compressors.random_k import RandomK
from hpctk.compressors.sign import Sign
from hpctk.compressors.top_k import TopK
from hpctk.errors import SettingError
from hpctk.nearest import hint

#: Compressors by their name on a command line.
COMPRESSORS: dict[str, type[Compressor]] = {
    "identity": Identity,
    "half": Half,
    "topk": TopK,
    "randomk": RandomK,
    "sign": Sign,
    "qsgd": QSGD,
    "powersgd": PowerSGD,
}

#: What may follow the name and a colon: how it is read and shown, and whether it must be there.
_ARGUMENT: dict[str, tuple[Callable[[str], object], str, bool]] = {
    "half": (str, "float16|bfloat16", False),
    "topk": (float, "DENSITY", True),
    "randomk": (float, "DENSITY", True),
    "qsgd": (int, "BITS", False),
    "powersgd": (int, "RANK", False),
}

__all__ = [
    "COMPRESSORS",
    "QSGD",
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
    if name not in COMPRESSORS:
        raise SettingError(f"compressor={text!r}: {hint(name, COMPRESSORS)}known are {', '.join(forms())}")
    make: Callable[..., Compressor] = COMPRESSORS[name]
    parse, _, required = _ARGUMENT.get(name, (None, "", False))
    if not colon and not required:
        return make()
    try:
        if parse is None or not value:
            raise ValueError(value)
        return make(parse(value))
    except ValueError as error:
        reason = f" ({error})" if isinstance(error, SettingError) else ""
        raise SettingError(f"compressor={text!r}: allowed is {_form(name)}{reason}") from None


def forms() -> list[str]:
    """Return how each compressor is written on a command line, optional parts in brackets."""
    return [_form(name) for name in COMPRESSORS]


def _form(name: str) -> str:
    if name not in _ARGUMENT:
        return name
    _, shown, required = _ARGUMENT[name]
    return f"{name}:{shown}" if required else f"{name}[:{shown}]"
