"""The bundled training jobs by name. A new one is a file beside this one and an entry here."""

from __future__ import annotations

import importlib
from typing import Any

#: Name on the command line: (module here, class, what it is in one line).
TASKS = {
    "regression": ("regression", "Regression", "AdaCons's linear regression: 1000 weights, fresh random data"),
    "digits": ("digits", "Digits", "1797 handwritten digits of 8x8 pixels, bundled; a small MLP"),
    "fashion": ("fashion", "Fashion", "Fashion-MNIST, from a folder or Debian's package; an MLP or a CNN"),
    "lm": ("lm", "LanguageModel", "an LSTM that predicts the next byte of a text; by default of Python's manual"),
}  # fmt: skip


def task_class(name: str) -> Any:
    """Return a task's class by its name on the command line."""
    module, kind, _ = TASKS[name]
    return getattr(importlib.import_module(f"hpctk.tasks.{module}"), kind)
