"""What is done by all ranks that live, or by none: with a World that loses ranks as it is told to."""

import pytest

from hpctk.errors import PeerError, SettingError
from hpctk.methods.core.step_status import StatusExchange
from hpctk.methods.core.survival import Survival, check


class FakeWorld:
    """Three ranks, of which this is rank 1; `outcomes` are what `decide` says, in turn."""

    losses = (PeerError,)

    def __init__(self, outcomes=(), left=(0, 1), why="", broken=True):
        self.rank, self.size = 1, 3
        self.attached = {StatusExchange: 5}
        self.outcomes, self.left, self.why, self.broken = list(outcomes), left, why, broken
        self.asked = []

    def expect_losses(self):
        pass

    def cannot_shrink(self):
        return self.why

    def is_broken(self):
        return self.broken

    def decide(self, *, done):
        self.asked.append(done)
        return self.outcomes.pop(0) if self.outcomes else done

    def shrink(self):
        kept, self.size = list(self.left), len(self.left)
        self.left = self.left[:-1]
        self.rank, self.attached = kept.index(self.rank), {}
        return kept


def test_done_at_once_changes_nothing():
    world, undone = FakeWorld(), []
    survival = Survival(world, pytest.fail)
    assert survival.together(lambda: 7, lambda: lambda: undone.append(1)) == 7
    assert (world.asked, undone, survival.lost) == ([True], [], 0)


def test_what_is_not_done_by_all_is_undone_and_done_again():
    world, events = FakeWorld([False]), []
    survival = Survival(world, lambda kept: events.append(("forget", kept)))
    survival.listen(lambda kept: events.append(("told", kept)))
    attempt = lambda: events.append("attempt") or world.size  # noqa: E731
    assert survival.together(attempt, lambda: lambda: events.append("undo")) == 2
    assert events == ["attempt", "undo", ("forget", [0, 1]), "attempt", ("told", [0, 1])]
    assert survival.lost == 1
    assert world.attached[StatusExchange] == 5


def test_an_attempt_that_fails_counts_as_not_done():
    world = FakeWorld()
    survival = Survival(world, lambda kept: None)
    failures = [PeerError("rank 2 has died")]

    def attempt():
        if failures:
            raise failures.pop()
        return "done"

    assert survival.together(attempt) == "done"
    assert world.asked == [False, True]


def test_numbers_of_two_losses_in_one_piece_of_work_are_put_together():
    world, told = FakeWorld([False, False], left=(1, 2)), []
    survival = Survival(world, lambda kept: None)
    survival.listen(told.append)
    world.left = (1, 2)
    shrink = iter([[1, 2], [1]])

    def shrunk():
        kept = next(shrink)
        world.size, world.rank = len(kept), 0
        world.attached = {}
        return kept

    world.shrink = shrunk
    survival.together(lambda: None)
    assert told == [[2]]
    assert survival.lost == 2


def test_an_error_of_another_kind_is_raised_at_once():
    world = FakeWorld(broken=False)
    survival = Survival(world, pytest.fail)

    def attempt():
        raise PeerError("opening failed on rank 0: no such file")

    with pytest.raises(PeerError, match="no such file"):
        survival.together(attempt)
    assert world.asked == []
    assert survival.together(lambda: 1) == 1


def test_nobody_lost_is_an_error():
    survival = Survival(FakeWorld([False], left=(0, 1, 2)), pytest.fail)
    with pytest.raises(PeerError, match="given up"):
        survival.together(lambda: None)


def test_work_inside_work_is_decided_on_once():
    world = FakeWorld()
    survival = Survival(world, pytest.fail)
    assert survival.together(lambda: survival.together(lambda: 3)) == 3
    assert world.asked == [True]


def test_another_optimizer_of_the_same_ranks_forgets_too():
    world, forgotten = FakeWorld([False]), []
    first, second = Survival(world, forgotten.append), Survival(world, forgotten.append)
    first.together(lambda: None)
    assert forgotten == [[0, 1], [0, 1]]
    assert second.lost == 1


@pytest.mark.parametrize(
    ("choice", "why", "message"), [("retry", "", "need one of"), ("shrink", "no.", "shrink': no.")]
)
def test_choices(choice, why, message):
    with pytest.raises(SettingError, match=message):
        check(FakeWorld(why=why), choice)


def test_ending_the_job_needs_nothing():
    check(FakeWorld(why="no."), "raise")
