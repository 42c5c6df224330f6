"""`hpctk cluster`: emulated hosts with slow links on this machine. What it does is in launch/cluster.sh.

A shell script, because all it does is to call ip, tc and mount. It gets its words as they were typed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files

from hpctk.errors import SettingError


def main(name: str, words: Sequence[str]) -> int:
    """Become the script, with the programs of this environment. Raise SettingError if there is no bash."""
    bash = shutil.which("bash")
    if bash is None:
        raise SettingError("no bash here: it is a bash script")
    with as_file(files("hpctk.launch") / f"{name}.sh") as script:
        os.execve(bash, [bash, str(script), *words], {**os.environ, "HPCTK_VENV": os.path.abspath(sys.prefix)})
