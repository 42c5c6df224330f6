"""Decisions in shared memory: the same answer on all ranks, whoever dies meanwhile."""

import random
import threading
import time

import pytest

from hpctk.comm.shared_decisions import SharedDecisions
from hpctk.comm.shared_window import COUNTERS, DONE, NOT_DONE


class Memory:
    """Counters of some ranks, numbered from 10 on as in a World of more, and who is known to be dead."""

    def __init__(self, size):
        self.counters = [[0] * size for _ in COUNTERS]
        self.ranks = range(10, 10 + size)
        self.dead = set()

    def window(self, position):
        return Window(self, position)


class Window:
    def __init__(self, memory, position):
        self._memory, self._position = memory, position

    def reached(self, which, value):
        return min(self._memory.counters[which]) >= value

    def behind(self, which, value):
        return [rank for rank, n in zip(self._memory.ranks, self._memory.counters[which], strict=True) if n < value]

    def furthest(self, which):
        return max(self._memory.counters[which])

    def advance(self, which, value):
        self._memory.counters[which][self._position] = value


def decisions(memory, position):
    return SharedDecisions(memory.window(position), lambda: memory.dead)


def decided(memory, answers, then=lambda: None, numbers=1):
    """Return what each rank decides that answers, True or False; the others, None, are not there."""
    found = [None] * len(answers)

    def rank(position):
        mine = decisions(memory, position)
        for number in range(numbers):
            found[position] = mine.decide(done=answers[position] or number < numbers - 1)

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i, a in enumerate(answers) if a is not None]
    for thread in threads:
        thread.start()
    then()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def test_yes_needs_all():
    memory = Memory(3)
    assert decided(memory, [True, True, True]) == [True, True, True]
    assert decided(memory, [True, True, True], numbers=50) == [True, True, True]


def test_a_no_is_heard_by_all():
    assert decided(Memory(3), [True, False, True]) == [False, False, False]
    assert decided(Memory(3), [True, False, True], numbers=7) == [False, False, False]


@pytest.mark.parametrize("said", [True, False])
def test_what_counts_of_a_dead_rank_is_what_it_has_said(said):
    memory = Memory(3)

    def die():
        time.sleep(0.02)
        if said:
            memory.window(1).advance(DONE, 1)
        memory.dead.add(11)

    assert decided(memory, [True, None, True], die) == [said, None, said]


def test_who_waits_is_not_misled_by_a_no_to_the_next_one():
    """All have said yes to the first one, and a rank that has seen that says no to the second, before another looks."""
    memory = Memory(2)
    late = memory.window(0)
    memory.window(1).advance(DONE, 1)
    real, looks = late.reached, []

    def reached(which, value):
        # The other one's counters are seen only after a while.
        looks.append(value)
        if len(looks) < 9:
            return False
        memory.window(1).advance(NOT_DONE, 2)
        return real(which, value)

    late.reached = reached
    assert SharedDecisions(late, lambda: {11}).decide(done=True) is True


@pytest.mark.parametrize("seed", range(20))
def test_nobody_says_yes_where_another_says_no(seed):
    """Ranks die at any moment, and are known to be dead a while later."""
    draws = random.Random(seed)
    memory, found, size = Memory(4), {}, 4
    dies_at = {draws.randrange(size): draws.randrange(1, 40)}

    def rank(position):
        mine = decisions(memory, position)
        for number in range(1, 41):
            if dies_at.get(position) == number:
                if draws.random() < 0.5:
                    memory.window(position).advance(DONE, number)
                time.sleep(draws.random() * 3e-3)
                memory.dead.add(10 + position)
                return
            found[position, number] = mine.decide(done=True)
            if not found[position, number]:
                return

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for number in range(1, 41):
        assert len({said for (_, n), said in found.items() if n == number}) <= 1
    # The one that died kept the others from all that came after, and from nothing before.
    (last,) = dies_at.values()
    assert {n for (_, n), said in found.items() if not said} <= {last, last + 1}
    assert all(found[i, n] for i in range(size) if i not in dies_at for n in range(1, last))
