"""The mark of functions that all ranks must call, in the same order.

It writes that sentence into the docstring. With HPCTK_STRICT=1 the ranks also compare names at every such call: where
they are in different ones, all raise a MismatchError that says which rank is where. That costs a small message each
time; without it a mistake of this kind is noticed at the next agreement, or at the deadline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from hpctk.comm import environment
from hpctk.comm.world import World, world

P = ParamSpec("P")
R = TypeVar("R")

SENTENCE = "Collective over the communicator: every rank calls it, in the same order."


def collective(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function whose ranks are those of an argument: a World, something with a `world`, or `comm=`."""
    # Decided once: a call that is not compared must not cost anything.
    marked = compared(function) if environment.read("HPCTK_STRICT") == "1" else function
    marked.__doc__ = with_sentence(function.__doc__ or "")
    return marked


def compared(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that compares its name on all ranks before it does what `function` does."""
    name = function.__qualname__

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        ranks_of(args, kwargs).minimum([], f"a call of {name}")
        return function(*args, **kwargs)

    return checked


def with_sentence(text: str) -> str:
    """Return a docstring with the sentence after its first paragraph."""
    first, rule, rest = inspect.cleandoc(text).partition("\n\n")
    return f"{first}\n\n{SENTENCE}{rule}{rest}"


def ranks_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> World:
    """Return the ranks that a call is about; those of COMM_WORLD where it does not say."""
    for argument in args:
        found = argument if isinstance(argument, World) else getattr(argument, "world", None)
        if isinstance(found, World):
            return found
    return world(kwargs.get("comm"))
