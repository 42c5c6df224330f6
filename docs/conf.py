"""How the documentation is built: `./launch/test lint` does, or `python -m sphinx -W docs FOLDER`. Needs no network."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hpctk import __version__

project = "hpctk"
author = "the hpctk developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"hpctk {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# What has no language is output, or a drawing.
highlight_language = "none"
# A name in single quotes is code in docstrings, too.
default_role = "code"
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
# Links to headings, as on any page of Markdown: page.md#heading.
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
# Neither is needed to read about them, and importing them would start MPI.
autodoc_mock_imports = ["horovod", "mpi4py"]


def formulas(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Show what stands indented in a module's docstring as it is: formulas and examples. In place."""
    if what != "module":
        return
    shown: list[str] = []
    inside = False
    for line in lines:
        if line.strip():
            indented = line.startswith("    ")
            if indented and not inside:
                shown += ["::", ""]
            inside = indented
        shown.append(line)
    lines[:] = shown


def patterns(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep the star of a pattern such as *.bias from beginning emphasis. In place."""
    lines[:] = [re.sub(r"(?<![\w`*\\])\*(?=\.\w)", r"\\*", line) for line in lines]


def setup(app: Any) -> None:
    """Let Sphinx call what is above."""
    for change in (formulas, patterns):
        app.connect("autodoc-process-docstring", change)
