"""The known name that a misspelt one most likely stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(word: str, known: Iterable[str]) -> str:
    """Return "did you mean NAME? " for the known name nearest to a word, nothing where none is near."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f"did you mean {by_lower[found[0]]}? " if found else ""
