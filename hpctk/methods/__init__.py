"""The methods by name. A new one is a file beside this one, an entry here, a test, and a row in docs/methods.md.

Other packages bring theirs by the entry point `hpctk.methods`: docs/extend.md.
"""

from __future__ import annotations

import importlib
from typing import Any

from hpctk import plugins

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


#: On the command line methods are in lower case.
PUBLIC = {name.lower(): name for name in METHODS}


def names() -> list[str]:
    """Return the names of all methods on a command line, those of other packages last. Imports none of them."""
    return [*PUBLIC, *plugins.names(plugins.METHODS, PUBLIC)]


def by_name(name: str) -> Any:
    """Return a method's class by its name on a command line, one of `names`.

    Raise SettingError where another package's cannot be loaded, or is none.
    """
    if name in PUBLIC:
        return method_class(PUBLIC[name])
    from hpctk.methods.core.method import GradientMethod, LocalStepMethod

    found = plugins.load(plugins.METHODS, name)
    if not (isinstance(found, type) and issubclass(found, GradientMethod | LocalStepMethod)):
        raise plugins.refuse(
            plugins.METHODS,
            name,
            found,
            "a class that derives from hpctk.extend.GradientMethod or hpctk.extend.LocalStepMethod",
        )
    return found
