"""Python programs run under `python -m mpi4py`, so that one rank's exception ends the job.

Under plain `python` a rank that raises leaves the others waiting for it. Importing mpi4py first also
starts MPI with THREAD_MULTIPLE, which Horovod beside mpi4py needs. In a job that is to outlive ranks
they run under `python -m hpctk.comm.mpi.run`, which does the same and ends jobs as Open MPI can take it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_INTERPRETER = re.compile(r"(python|pypy)(\d+(\.\d+)*t?)?")
RUNNER, TOLERANT = "mpi4py", "hpctk.comm.mpi.run"


def is_interpreter(program: str) -> bool:
    """Return whether a program is Python itself."""
    return _INTERPRETER.fullmatch(os.path.basename(program)) is not None


def through_mpi4py(program: Sequence[str], runner: str = RUNNER) -> list[str]:
    """Return the words with `-m mpi4py` (or another runner) where a Python program begins; others as they are."""
    words = list(program)
    if not words:
        return words
    folder, name = os.path.split(words[0])
    if is_interpreter(name):
        return _insert(words, runner)
    if name.endswith(".py"):
        return ["python", "-m", runner, *words]
    # The script that pip makes for `python -m hpctk`; `hpctk run` ends the job by itself.
    if name == "hpctk" and words[1:2] != ["run"]:
        return [os.path.join(folder, "python"), "-m", runner, "-m", "hpctk", *words[1:]]
    return words


def _insert(words: list[str], runner: str) -> list[str]:
    """Put the runner behind the interpreter's own options, unless what follows ends jobs itself."""
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-" or not word.startswith("-"):
            return [*words[:at], "-m", runner, *words[at:]]
        # Letters may be joined: -um MODULE, -Wignore, -OOc CODE.
        joined = re.fullmatch("-([^-cmWX]*)([cmWX])(.*)", word, re.DOTALL)
        flags, letter, value = joined.groups() if joined else ("", "", "")
        if letter in ("c", "m"):
            program = [value, *words[at + 1 :]] if value else words[at + 1 :]
            ends_jobs = program[:2] == ["hpctk", "run"] or (
                program[:1] and (program[0].split(".")[0] == RUNNER or program[0] == TOLERANT)
            )
            if not program or (letter == "m" and ends_jobs):
                return words
            before = [f"-{flags}"] if flags else []
            return [*words[:at], *before, "-m", runner, f"-{letter}{value}", *words[at + 1 :]]
        takes_next = word == "--check-hash-based-pycs" or (joined and not value)
        at += 2 if takes_next else 1
    return words
