"""Jobs of the tests start without torch's compiler, which they do not need and whose import takes a second or two.

Python runs this file at its start where the folder is in PYTHONPATH. torch imports its compiler at the first step of
an optimizer, only to tell it which functions are none of its business. Here a module stands in that is told so; for
anything else it takes the compiler in, as ever.

With QUICK_START_LEAN in the environment they start in half the time: without numba, whose kernels have a form in
numpy that comes to the same bits, and without what torch knows of tensors that have no values.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

COMPILER = "torch._dynamo"


class StandIn(ModuleType):
    """Knows what an optimizer calls."""

    @staticmethod
    def graph_break(msg=""):
        """Do nothing: nothing is compiled."""

    @staticmethod
    def disable(fn=None, recursive=True, **_):
        """Return the function as it is."""
        return fn if fn is not None else lambda fn: fn

    def __getattr__(self, name):
        # Somebody only looks at all modules; but __path__ means that a module inside is imported.
        if not self.__dict__.get("ready") or (name.startswith("__") and name != "__path__"):
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER], sys.modules["torch"]._dynamo
        return getattr(importlib.import_module(COMPILER), name)


class Finder:
    """Finds the stand-in, once."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != COMPILER:
            return None
        sys.meta_path.remove(cls)
        return ModuleSpec(name, cls)

    @staticmethod
    def create_module(spec):
        return StandIn(spec.name)

    @staticmethod
    def exec_module(module):
        """Let it stand in from now on."""
        module.ready = True


class Meta:
    """Finds an empty module for what tensors without values need."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch._meta_registrations":
            return None
        sys.meta_path.remove(cls)
        return ModuleSpec(name, cls)

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        """Import the one thing of it that a Generator waits for."""
        importlib.import_module("torch._prims.rng_prims")


sys.meta_path.insert(0, Finder)
if "QUICK_START_LEAN" in os.environ:
    sys.modules["numba"] = None
    sys.meta_path.insert(0, Meta)
