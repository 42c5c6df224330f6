"""A collective under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctk.errors import HpctkError


class Handle:
    """A collective under way: do something else, then `wait()`, once, for its result.

    `is_done` returns whether the communication is over, and lets it make progress; `finish` waits for it, does what is
    left and returns the result.
    """

    def __init__(self, operation: str, is_done: Callable[[], bool], finish: Callable[[], Any]) -> None:
        self._operation, self._is_done, self._finish = operation, is_done, finish
        self._waited = False

    def done(self) -> bool:
        """Return whether the communication is over; lets it make progress."""
        return self._waited or self._is_done()

    def wait(self) -> Any:
        """Return the result once it is there. Raises HpctkError when called twice."""
        if self._waited:
            raise HpctkError(f"this handle of {self._operation} has been waited for already: keep its result")
        self._waited = True
        return self._finish()
