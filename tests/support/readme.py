"""README.md as the tests read it; `python tests/support/readme.py RUN` writes its table and picture anew from a run.

The run is that of `./launch/quickstart --fresh`: runs/quickstart. Without one the picture is drawn from the table.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hpctk.cli.core.table import results_table

README = Path(__file__).parents[2] / "README.md"
PICTURE = README.parent / "docs" / "sent.svg"
#: The block that begins with the head of a table of results.
TABLE = re.compile(r"(?<=```\n)method .*?\n(?=picture: )", re.DOTALL)


#: Sizes of the picture in pixels: a row, where bars begin, the longest of them, all. Not wide: phones make it smaller.
ROW, LEFT, LONGEST, WIDTH = 28, 88, 270, 520


def table() -> list[str]:
    """Return the lines of the table of results, without what is said beneath it."""
    (found,) = TABLE.findall(README.read_text(encoding="utf-8"))
    return [line for line in found.splitlines() if not line.startswith("predicted: ")]


def drawing(lines: list[str]) -> str:
    """Return what the table says of bytes and accuracy as bars, in SVG."""
    head, *rows = (re.split(r"\s{2,}", line.strip()) for line in [lines[0], *lines[2:]])
    shown = [(row[0], float(row[head.index("sent per rank")].split()[0]), row[head.index("accuracy")]) for row in rows]
    units = {row[head.index("sent per rank")].split()[1] for row in rows}
    if units != {"MB"}:
        raise SystemExit(f"{README}: bytes in {units}, the picture needs MB")
    (steps,) = {row[head.index("steps")] for row in rows}
    most, height = max(sent for _, sent, _ in shown), ROW * len(shown) + 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img" font-family="system-ui, sans-serif" font-size="15" fill="#1b1f24">',
        "<title>Megabytes that each rank sent in the quickstart, by method</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="16" y="28" font-weight="600">Sent per rank in {steps} steps; accuracy on held-out digits</text>',
    ]  # fmt: skip
    for i, (name, sent, accuracy) in enumerate(shown):
        top, width = 46 + i * ROW, round(LONGEST * sent / most, 1)
        color = "#8a94a0" if name == "mean" else "#2f6fde"
        parts += [
            f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{width}" height="20" rx="3" fill="{color}"/>',
            f'<text x="{LEFT + width + 8}" y="{top + 15}">{sent:g} MB</text>',
            f'<text x="{WIDTH - 16}" y="{top + 15}" text-anchor="end">{accuracy}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def written(text: str, result: dict) -> str:
    """Return the text of README with the table of a result.json."""
    made, count = TABLE.subn(lambda _: results_table(result["methods"]) + "\n", text)
    if count != 1:
        raise SystemExit(f"{README}: {count} tables of results, need one")
    return made


if __name__ == "__main__":
    if len(sys.argv) > 1:
        saved = json.loads((Path(sys.argv[1]) / "result.json").read_text(encoding="utf-8"))
        README.write_text(written(README.read_text(encoding="utf-8"), saved), encoding="utf-8")
    PICTURE.write_text(drawing(table()), encoding="utf-8")
