"""How kernels are compiled: once per machine, and without holding the interpreter's lock.

A kernel calls no compiled function of another file: numba's cache watches one source file per
kernel, and would keep running the old version of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return `function` compiled by numba at its first call, kept on disk, run without the GIL.

    Never `parallel=True`: numba's own threads and MPI do not mix; `threads.share` cuts the work.
    """
    try:
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: a container, a full quota.
        # Compiling anew in every process is slow, not wrong.
        return cast(Function, numba.njit(nogil=True)(function))
