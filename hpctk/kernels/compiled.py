"""How kernels are compiled: once per machine, and without holding the interpreter's lock.

A kernel calls no compiled function of another file: numba's cache watches one source file per
kernel, and would keep running the old version of the other.

Without numba, and with one that does not fit the numpy or Python here, `plain` has the same in numpy. All that is
imported of numba is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:
    #: Why kernels are not compiled, None where they are.
    missing: ImportError | None
    numba: Any
    #: What kernels take of numba.
    carray: Any
    intrinsic: Any
    ir: Any
    types: Any
else:
    missing = None
    try:
        import numba
        from llvmlite import ir
        from numba import types
        from numba.extending import intrinsic
        from numba.np.numpy_support import carray
    except ImportError as error:
        missing = error
        carray = ir = types = None

        def intrinsic(function):
            """Return the function as it is: only compiled code calls it."""
            return function


__all__ = ["carray", "compiled", "intrinsic", "ir", "missing", "types"]


def compiled(function: Function) -> Function:
    """Return `function` compiled by numba at its first call, kept on disk, run without the GIL.

    Never `parallel=True`: numba's own threads and MPI do not mix; `threads.share` cuts the work. Without numba the
    function of the same name in `plain`.
    """
    if missing is not None:
        return _plain(function)
    try:
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: a container, a full quota.
        # Compiling anew in every process is slow, not wrong.
        return cast(Function, numba.njit(nogil=True)(function))


def _plain(function: Function) -> Function:
    module = f"{__package__}.plain.{function.__module__.rpartition('.')[2]}"

    @wraps(function)
    def call(*arguments: Any) -> Any:
        # Found at the call: plain modules read the constants of the module that is being imported here.
        with np.errstate(all="ignore"):
            return getattr(import_module(module), function.__name__)(*arguments)

    return cast(Function, call)
