"""A few threads that work on the parts of an array; kernels release the GIL, so threads do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

Result = TypeVar("Result")

#: Parts smaller than this many elements are not worth waking a thread for.
WORTH_A_THREAD = 1 << 17

_pool: ThreadPoolExecutor | None = None


def _forget() -> None:
    global _pool
    _pool = None


# A forked child inherits the pool without its threads, and would wait for them for ever.
os.register_at_fork(after_in_child=_forget)


def default_threads() -> int:
    """Return how many threads torch uses: ranks that share a machine have already been told."""
    import torch

    return torch.get_num_threads()


def spans(n: int, threads: int | None = None, *, align: int = 1) -> list[tuple[int, int]]:
    """Return (start, stop) of the parts of n elements, one per thread; one part where n is small.

    Every start is a multiple of `align`.
    """
    wanted = 1 if n < 2 * WORTH_A_THREAD else default_threads() if threads is None else threads
    if wanted < 1:
        raise ValueError(f"threads={threads}: at least 1")
    parts = max(1, min(wanted, n // WORTH_A_THREAD))
    edges = [n * part // parts // align * align for part in range(parts)] + [n]
    return list(pairwise(edges))


def share(work: Callable[..., Result], calls: Sequence[tuple[Any, ...]]) -> list[Result]:
    """Return `work(*call)` for each call, in order; the first runs here, the others in threads beside it."""
    global _pool
    if len(calls) == 1:
        return [work(*calls[0])]
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=max(8, os.cpu_count() or 1), thread_name_prefix="hpctk-kernel")
    others = [_pool.submit(work, *call) for call in calls[1:]]
    try:
        first = work(*calls[0])
    finally:
        # Nobody may go on writing into arrays that the caller has given up.
        for other in others:
            other.exception()
    return [first, *(other.result() for other in others)]
