"""How work is cut into parts and shared by threads."""

import multiprocessing
import threading
from itertools import pairwise

import pytest

from hpctk.kernels import threads
from hpctk.kernels.threads import WORTH_A_THREAD, share, spans


@pytest.mark.parametrize("align", [1, 8, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, WORTH_A_THREAD, 2 * WORTH_A_THREAD, 7 * WORTH_A_THREAD + 5, 10**9 + 1])
def test_parts_cover_everything_once(n, count, align):
    parts = spans(n, count, align=align)
    assert 1 <= len(parts) <= count
    assert parts[0][0] == 0
    assert parts[-1][1] == n
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(start % align == 0 for start, _ in parts)


def test_small_arrays_are_one_part_and_large_ones_as_torch_says(monkeypatch):
    monkeypatch.setattr(threads, "default_threads", lambda: 3)
    assert len(spans(WORTH_A_THREAD)) == 1
    assert len(spans(10 * WORTH_A_THREAD)) == 3


def test_torch_says_how_many(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert threads.default_threads() == 5


def test_at_least_one_thread():
    with pytest.raises(ValueError, match="threads=0: at least 1"):
        spans(10 * WORTH_A_THREAD, 0)


def test_results_come_in_order_and_the_first_call_runs_here():
    def work(number):
        return number, threading.current_thread() is threading.main_thread()

    assert share(work, [(3,)]) == [(3, True)]
    assert share(work, [(3,), (1,), (2,)]) == [(3, True), (1, False), (2, False)]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_in_any_thread_is_raised_when_all_have_ended(bad):
    ended = []

    def work(number):
        if number == bad:
            raise KeyError(number)
        threading.Event().wait(0.02)
        ended.append(number)

    with pytest.raises(KeyError):
        share(work, [(0,), (1,), (2,)])
    assert len(ended) == 2


def _share_in_a_child(results):
    results.put(share(abs, [(-1,), (-2,)]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    assert share(abs, [(-1,), (-2,)]) == [1, 2]
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    child = fork.Process(target=_share_in_a_child, args=(results,), daemon=True)
    child.start()
    assert results.get(timeout=20) == [1, 2]
    child.join(20)
