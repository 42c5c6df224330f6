"""Nothing that is shipped sends its user to a file that only a checkout has."""

import ast
import re

import pytest
from jobs import ROOT

FILES = [path for path in sorted((ROOT / "hpctk").rglob("*.py")) if "templates" not in path.parts]
ONLY_IN_A_CHECKOUT = re.compile(r"\blaunch/(?!\*|cluster\.sh)|\bdocs/[a-z]")


def shown(path):
    """Return the texts of a module that a user may see: all but docstrings, and those of a command, its --help."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        is_help = (
            isinstance(node, ast.Module) and path.parent.name == "cli" and "hpctk " in (ast.get_docstring(node) or "")
        )
        if isinstance(node, documented) and not is_help and ast.get_docstring(node) is not None:
            node.body[0].value.value = ""
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_messages():
    found = [f"{path.name}: {text}" for path in FILES for text in shown(path) if ONLY_IN_A_CHECKOUT.search(text)]
    assert found == []


@pytest.mark.parametrize("path", [*(ROOT / "slurm").glob("*.sbatch"), *(ROOT / "hpctk" / "launch").glob("*.sh")])
def test_scripts(path):
    assert ONLY_IN_A_CHECKOUT.search(path.read_text()) is None
