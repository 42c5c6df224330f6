"""docs/hdf5-format.md says of every column and attribute what schema.py says."""

import re
from pathlib import Path

import pytest

from hpctk.stats import merged
from hpctk.telemetry import schema

PAGE = (Path(__file__).parents[3] / "docs" / "hdf5-format.md").read_text()
KINDS = {"<i8": "int64", "<f8": "float64"}


def described(section):
    """Return the tables under a heading: name, type, units and meaning."""
    text = PAGE.split(f"\n### {section}\n", 1)[1]
    text = re.split(r"\n##+ ", text, maxsplit=1)[0]
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize(
    ("section", "columns"),
    [
        *((name, table.columns) for name, table in schema.TABLES.items()),
        ("ranks", merged.RANKS.columns),
        ("Attributes", schema.ATTRIBUTES),
    ],
)
def test_every_column_is_on_the_page(section, columns):
    wanted = {}
    for column in columns:
        kind = KINDS.get(column.kind) or f"text {column.kind[1:]}".strip()
        wanted[column.name] = [kind, column.units or "-", column.long_name]
    assert described(section) == wanted


def test_the_version_is_on_the_page():
    assert f'`schema` is "{schema.NAME}", `schema_version` {schema.VERSION}.' in PAGE
    assert f'`schema` is "{merged.NAME}", `schema_version` {merged.VERSION}.' in PAGE
