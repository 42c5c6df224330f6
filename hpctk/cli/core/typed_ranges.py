"""Ranges as they are typed: steps 100:120, ranks 0,8-11."""

from __future__ import annotations

import re

from hpctk.errors import SettingError


def steps_of(typed: str | None) -> tuple[int | None, int | None]:
    """Return the first step and the one after the last, None where it is left open."""
    if typed is None:
        return None, None
    found = re.fullmatch(r"(\d{0,15}):(\d{0,15})", typed)
    if not found:
        raise SettingError(f"--steps {typed}: allowed is A:B, whole numbers of which either may be left out")
    first, last = (int(text) if text else None for text in found.groups())
    if first is not None and last is not None and last <= first:
        raise SettingError(f"--steps {typed}: there is no step from {first} to before {last}")
    return first, last


def ranks_of(typed: str | None) -> frozenset[int] | None:
    """Return the ranks of a list such as 0,8-11; None for none given."""
    if typed is None:
        return None
    ranks: set[int] = set()
    for part in typed.split(","):
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise SettingError(f"--ranks {typed}: allowed are ranks and ranges with commas between: 0,8-11")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
