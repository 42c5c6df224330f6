"""Python programs run under `python -m mpi4py`, so that one rank's exception ends the job.

Under plain `python` a rank that raises leaves the others waiting for it. Importing mpi4py first also
starts MPI with THREAD_MULTIPLE, which Horovod beside mpi4py needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_INTERPRETER = re.compile(r"(python|pypy)(\d+(\.\d+)*t?)?")
_RUNNER = ["-m", "mpi4py"]


def through_mpi4py(program: Sequence[str]) -> list[str]:
    """Return the words with `-m mpi4py` where a Python program begins; other programs as they are."""
    words = list(program)
    if not words:
        return words
    folder, name = os.path.split(words[0])
    if _INTERPRETER.fullmatch(name):
        return _insert(words)
    if name.endswith(".py"):
        return ["python", *_RUNNER, *words]
    # The script that pip makes for `python -m hpctk`; `hpctk run` ends the job by itself.
    if name == "hpctk" and words[1:2] != ["run"]:
        return [os.path.join(folder, "python"), *_RUNNER, "-m", "hpctk", *words[1:]]
    return words


def _insert(words: list[str]) -> list[str]:
    """Put `-m mpi4py` behind the interpreter's own options."""
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-" or not word.startswith("-"):
            return [*words[:at], *_RUNNER, *words[at:]]
        if word.startswith("--"):
            at += 2 if word == "--check-hash-based-pycs" else 1
            continue
        # Letters may be joined: -um MODULE, -Wignore, -OOc CODE.
        n_values = 0
        for i, letter in enumerate(word[1:], start=1):
            if letter in "cm":
                return _insert_before(words, at, i)
            if letter in "WX":
                n_values = int(i == len(word) - 1)
                break
        at += 1 + n_values
    return words


def _insert_before(words: list[str], at: int, i: int) -> list[str]:
    """Put `-m mpi4py` before the -m or -c that is letter `i` of word `at`."""
    word = words[at]
    joined = word[i + 1 :]
    rest = ([joined] if joined else []) + words[at + 1 :]
    if not rest:
        return words
    ends_jobs = rest[0].split(".")[0] == "mpi4py" or rest[:2] == ["hpctk", "run"]
    if word[i] == "m" and ends_jobs:
        return words
    before = [f"-{word[1:i]}"] if i > 1 else []
    return [*words[:at], *before, *_RUNNER, f"-{word[i:]}", *words[at + 1 :]]
