"""Horovod is built when it is first needed: by launch/horovodrun, in an environment that launch/setup made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

#: Files that launch/setup leaves in an environment: what it was made from and for which MPI, and what about Horovod.
STAMP, STATE = "hpctk-setup", "hpctk-horovod"
LEFT_OUT = "left out"


def build(project: str, venv: Path, environ: Mapping[str, str]) -> None:
    """Build Horovod where launch/setup knows how to, and was not told to do without. What it says is on stderr."""
    words = setup_words(venv)
    if words is None:
        return
    main = str(venv).removesuffix("-openmpi4") if "--openmpi4" in words else str(venv)
    print("launch/horovodrun: no Horovod here yet", file=sys.stderr, flush=True)
    subprocess.run(
        [f"{project}/launch/setup", *words],
        env={**environ, "HPCTK_VENV": os.path.abspath(main)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        check=False,
    )


def setup_words(venv: Path) -> list[str] | None:
    """Return the options of launch/setup that add Horovod to an environment, None where it is not to be."""
    made_for = _lines(venv / STAMP)[1:2]
    if _lines(venv / STATE) == [LEFT_OUT] or made_for not in (["openmpi"], ["openmpi4"]):
        return None
    return ["--with-horovod"] if made_for == ["openmpi"] else ["--openmpi4", "--with-horovod"]


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []
