"""The methods by name. A new one is a file beside this one, an entry here, a test, and a row in docs/methods.md."""

from __future__ import annotations

import importlib
from typing import Any

#: Public name: the module it lives in. The five methods, what followed them, then the baselines.
METHODS = {
    "AdaCons": "adacons",
    "SASG": "sasg",
    "SAEF": "saef",
    "MGRAWA": "grawa",
    "LGRAWA": "grawa",
    "CELGC": "celgc",
    "EPISODE": "episode",
    "EF21": "ef21",
    "DiLoCo": "diloco",
    "SparseLoCo": "sparse_loco",
    "Mean": "mean",
    "LocalSGD": "local_sgd",
    "EASGD": "easgd",
    "LSGD": "lsgd",
}


def method_class(name: str) -> Any:
    """Return a method's class by its public name."""
    return getattr(importlib.import_module(f"hpctk.methods.{METHODS[name]}"), name)
