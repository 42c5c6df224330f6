"""README.md as the tests read it; `python tests/support/readme.py RUN` writes its first table anew from a finished run.

The run is that of `./launch/quickstart --fresh`: runs/quickstart.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hpctk.cli.core.table import results_table

README = Path(__file__).parents[2] / "README.md"
#: The block that begins with the head of a table of results.
TABLE = re.compile(r"(?<=```\n)method .*?\n(?=picture: )", re.DOTALL)


def table() -> list[str]:
    """Return the lines of the table of results."""
    (found,) = TABLE.findall(README.read_text(encoding="utf-8"))
    return found.splitlines()


def blocks(language: str = "") -> list[str]:
    """Return the fenced blocks of one language, or of none."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for known, text in fences if known == language]


def sides(diff: str) -> tuple[str, str]:
    """Return the text before a change, and the text after it."""
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    return tuple("\n".join(text for sign, text in lines if sign != other) for other in "+-")


def written(text: str, result: dict) -> str:
    """Return the text of README with the table of a result.json."""
    made, count = TABLE.subn(lambda _: results_table(result["methods"]) + "\n", text)
    if count != 1:
        raise SystemExit(f"{README}: {count} tables of results, need one")
    return made


if __name__ == "__main__":
    saved = json.loads((Path(sys.argv[1]) / "result.json").read_text(encoding="utf-8"))
    README.write_text(written(README.read_text(encoding="utf-8"), saved), encoding="utf-8")
