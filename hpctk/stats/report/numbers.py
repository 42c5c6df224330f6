"""Numbers and texts from statistics files as people read them. What makes no sense is shown as "?"."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable

UNKNOWN = "?"
_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15), ("EB", 1e18))
_SECONDS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))
_LONG = (("min", 60.0), ("h", 3600.0), ("d", 86400.0))


def digits(value: float | None) -> str:
    """Return three significant digits, without an exponent where that is short enough."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    size = abs(value)
    if size >= 999.5:
        return f"{value:.0f}" if size < 1e7 else f"{value:.2e}"
    return f"{value:.3g}" if size >= 1e-4 or size == 0 else f"{value:.2g}"


def bytes_text(n: float | None) -> str:
    """Return a number of bytes: 1.5 MB."""
    if n is None or not math.isfinite(n):
        return UNKNOWN
    unit, factor = next(((u, f) for u, f in _BYTES if abs(n) < 999.5 * f), _BYTES[-1])
    return f"{n:.0f} B" if unit == "B" else f"{digits(n / factor)} {unit}"


def seconds_text(seconds: float | None) -> str:
    """Return a time: 12.3 ms, 4.5 h."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    size = abs(seconds)
    if size < 999.5:
        unit, factor = next((u, f) for u, f in _SECONDS if size < 999.5 * f)
    else:
        unit, factor = next(((u, f) for u, f in _LONG if size < 99.5 * f), _LONG[-1])
    return f"{digits(seconds / factor)} {unit}"


def rate_text(bytes_per_s: float | None) -> str:
    """Return a bandwidth: 1.2 GB/s."""
    text = bytes_text(bytes_per_s)
    return text if text == UNKNOWN else f"{text}/s"


def percent(share: float | None) -> str:
    """Return a share: 41 %."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    size = abs(share) * 100
    if 0 < size < 0.01:
        return "<0.01 %"
    decimals = 0 if size >= 9.95 or size == 0 else 1 if size >= 0.995 else 2
    return f"{share * 100:.{decimals}f} %"


def count(n: float | None) -> str:
    """Return a number of things: 1234567."""
    if n is None or not math.isfinite(n):
        return UNKNOWN
    return f"{n:.0f}" if abs(n) < 1e12 else f"{n:.2e}"


def times(factor: float | None) -> str:
    """Return a factor: 39x."""
    return UNKNOWN if factor is None or not math.isfinite(factor) else f"{digits(factor)}x"


def plural(n: int, one: str, many: str = "") -> str:
    """Return a number with its noun: 1 rank, 4 ranks."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def printable(text: object, most: int = 200) -> str:
    """Return a text from a file that a terminal can show: no control characters, no line breaks, not too long."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    shown = "".join(
        " " if one.isspace() else "?" if unicodedata.category(one)[0] == "C" else one for one in str(text)[: most + 1]
    )
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters; what is left out of its middle is a ~."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return text[: width - 1 - tail] + "~" + (text[-tail:] if tail else "")


def rank_list(ranks: Iterable[int], most: int = 8) -> str:
    """Return ranks as people write them: 0-3, 7, 9 and 12 more."""
    runs: list[list[int]] = []
    total = 0
    for rank in sorted(ranks):
        total += 1
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:most]]
    left = total - sum(b - a + 1 for a, b in runs[:most])
    return ", ".join(shown) + (f" and {left} more" if left else "")
