"""docs/settings.md says of every setting what its declaration says."""

import inspect
import re
from pathlib import Path

import pytest
from settings_page import PAGE, page

import hpctk
from hpctk.methods import METHODS

METHODS_PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()


def test_the_page_is_what_the_declarations_say():
    assert PAGE.read_text() == page(), "write it anew: python tests/support/settings_page.py"


@pytest.mark.parametrize("name", [name for name in METHODS if name != "LGRAWA"])
def test_the_table_of_methods_shows_their_signatures(name):
    shown = re.search(rf"^\| `{name}(\(.*?\))` \|", METHODS_PAGE, re.MULTILINE)[1]
    signature = inspect.signature(getattr(hpctk, name))
    plain = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in signature.parameters.values()
        # Earlier names are keywords alone.
        if one.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    wanted = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    assert shown.replace('"', "'").replace("0.9**8", str(0.9**8)) == wanted
