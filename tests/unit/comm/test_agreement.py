"""Agreements between ranks, all of them in this process: a thread for each, the real code in every one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctk.comm.agreement import Agreement, first_difference
from hpctk.errors import MismatchError, PeerError, SettingError, TensorError
from hpctk.telemetry.recorder import Recorders

MEETING_S = 20


class ThreadRank(Agreement):
    """One rank of a group of threads. Fails if the ranks do not make the same collective call."""

    def __init__(self, rank, size, barrier, table):
        self.rank, self.size, self.recorders = rank, size, Recorders()
        self._barrier, self._table = barrier, table

    def _exchange(self, call, data):
        self._table[self.rank] = (call, data)
        self._barrier.wait(MEETING_S)
        everyone = list(self._table)
        self._barrier.wait(MEETING_S)
        assert {call for call, _ in everyone} == {call}, everyone
        return [data for _, data in everyone]

    def _minimum(self, values, operation):
        assert all(-(2**63) <= value < 2**63 for value in values)
        # The operation is not compared here: that ranks are in different ones, the agreement itself must notice.
        return [min(column) for column in zip(*self._exchange(("minimum", len(values)), values), strict=True)]

    def _broadcast(self, data, root, operation):
        data[:] = self._exchange(("broadcast", len(data), root, operation), bytes(data))[root]


def on_ranks(size, work):
    """Return what `work(rank)` returned or raised on each of `size` ranks that run at once."""
    barrier, table = threading.Barrier(size), [None] * size

    def one(rank):
        try:
            return work(ThreadRank(rank, size, barrier, table))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def the_same_error(outcomes, kind):
    """Return the text of the error that every rank raised."""
    assert all(type(outcome) is kind for outcome in outcomes), outcomes
    texts = {str(outcome) for outcome in outcomes}
    assert len(texts) == 1, texts
    return texts.pop()


ITEMS = st.lists(st.tuples(st.text(max_size=3), st.one_of(st.integers(), st.text(max_size=3))), max_size=4)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), ITEMS)
def test_equal_items_never_differ(size, items):
    assert on_ranks(size, lambda rank: rank.agree("settings", list(items))) == [None] * size


@settings(max_examples=100, deadline=None)
@given(ITEMS, ITEMS, st.lists(st.booleans(), min_size=1, max_size=4))
def test_different_items_are_the_same_error_everywhere(ours, theirs, odd):
    as_text = [(key, str(value)) for key, value in ours], [(key, str(value)) for key, value in theirs]
    assume(as_text[0] != as_text[1])
    assume(len(set(odd)) == 2)
    outcomes = on_ranks(len(odd), lambda rank: rank.agree("settings", theirs if odd[rank.rank] else ours))
    first_odd = next(rank for rank, is_odd in enumerate(odd) if is_odd != odd[0])
    text = the_same_error(outcomes, MismatchError)
    assert text.startswith(f"settings: rank {first_odd} disagrees with rank 0: ")


def test_values_are_compared_by_their_text():
    values = [(3, 4), "(3, 4)", (3, 4)]
    assert on_ranks(3, lambda rank: rank.agree("shape", [("shape", values[rank.rank])])) == [None] * 3


def test_the_order_of_items_matters():
    items = [("a", 1), ("b", 2)]
    outcomes = on_ranks(2, lambda rank: rank.agree("names", items[:: 1 - 2 * rank.rank]))
    assert "item 0 is 'a' on rank 0 and 'b' on rank 1" in the_same_error(outcomes, MismatchError)


def test_the_lowest_odd_rank_is_named_though_all_differ():
    outcomes = on_ranks(4, lambda rank: rank.agree("settings", [("lr", rank.rank)]))
    text = the_same_error(outcomes, MismatchError)
    assert "rank 1 disagrees with rank 0: lr is 0 on rank 0 and 1 on rank 1." in text


PAIRS = st.lists(st.tuples(st.text(max_size=2), st.text(max_size=2)).map(list), max_size=4)


@settings(max_examples=300, deadline=None)
@given(PAIRS, PAIRS, PAIRS)
def test_first_difference_names_the_first_difference(common, ours, theirs):
    assume(ours[:1] != theirs[:1])
    text = first_difference(common + ours, common + theirs, rank=7)
    if ours and theirs and ours[0][0] == theirs[0][0]:
        assert text == f"{ours[0][0]} is {ours[0][1]} on rank 0 and {theirs[0][1]} on rank 7"
    elif ours and theirs:
        assert text == f"item {len(common)} is {ours[0][0]!r} on rank 0 and {theirs[0][0]!r} on rank 7"
    else:
        assert f"rank 0 has {len(common + ours)} items and rank 7 has {len(common + theirs)}" in text
        only = f"{ours[0][0]!r} is only on rank 0" if ours else f"{theirs[0][0]!r} is only on rank 7"
        assert text.endswith(only)


@pytest.mark.parametrize("culprits", [{0}, {2}, {1, 2}, {0, 1, 2, 3}])
def test_an_error_on_some_ranks_is_raised_on_all(culprits):
    def work(rank):
        with rank.shared_errors("opening the log"):
            if rank.rank in culprits:
                raise FileNotFoundError(f"no file on {rank.rank}")

    outcomes = on_ranks(4, work)
    first = min(culprits)
    wanted = f"opening the log failed on rank {first}: FileNotFoundError: no file on {first}"
    assert the_same_error(outcomes, PeerError) == wanted
    # Where it happened, the error itself is the cause: its traceback is not lost.
    assert {rank for rank, error in enumerate(outcomes) if error.__cause__ is not None} == culprits


def test_without_an_error_there_is_nothing_to_share():
    def work(rank):
        with rank.shared_errors("opening the log"):
            return rank.rank

    assert on_ranks(3, work) == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError(), "ValueError"),
        (KeyError("lr"), "KeyError: 'lr'"),
        (OSError(2, "No such file", "x.h5"), "FileNotFoundError: [Errno 2] No such file: 'x.h5'"),
        (ValueError("größer"), "ValueError: größer"),
        # A file name that is not UTF-8, as os.listdir gives it: telling it must not fail on one rank.
        (ValueError("bad name: x\udcff.h5"), "ValueError: bad name: x\\udcff.h5"),
    ],
)
def test_how_errors_are_told(error, shown):
    def share(rank):
        with rank.shared_errors("it"):
            if rank.rank == 1:
                raise error

    def fail():
        raise error

    assert the_same_error(on_ranks(2, share), PeerError) == f"it failed on rank 1: {shown}"
    on_root = on_ranks(2, lambda rank: rank.run_on_root("it", fail, root=1))
    assert the_same_error(on_root, PeerError) == f"it failed on rank 1: {shown}"


def test_ranks_stay_in_step_after_an_error():
    def work(rank):
        for culprit in range(rank.size):
            with pytest.raises(PeerError, match=f"rank {culprit}"), rank.shared_errors("trying"):
                assert rank.rank != culprit
        rank.agree("what comes next", [("a", 1)])
        return "in step"

    assert on_ranks(3, work) == ["in step"] * 3


@pytest.mark.parametrize("root", [0, 2])
def test_run_on_root(root):
    ran = []

    def work(rank):
        def function():
            ran.append(rank.rank)
            return {"shape": (3, 4), "none": None, "text": "größer", 5: 0.1}

        return rank.run_on_root("reading", function, root=root)

    # As JSON makes it, on root too: a tuple there and lists elsewhere would be a bug that waits.
    wanted = {"shape": [3, 4], "none": None, "text": "größer", "5": 0.1}
    assert on_ranks(3, work) == [wanted] * 3
    assert ran == [root]


@pytest.mark.parametrize(
    "result", [{1, 2}, b"bytes", object(), {("a", "b"): 1}], ids=["a set", "bytes", "an object", "a key of two"]
)
def test_run_on_root_refuses_what_json_cannot_say(result):
    outcomes = on_ranks(3, lambda rank: rank.run_on_root("reading", lambda: result))
    assert "reading failed on rank 0: TypeError" in the_same_error(outcomes, PeerError)


def test_gathered_texts_are_in_rank_order():
    gathered = on_ranks(3, lambda rank: rank.gather_texts(f"größe {rank.rank}" * rank.rank, "gathering"))
    assert gathered == [["", "größe 1", "größe 2größe 2"]] * 3


@pytest.mark.parametrize("values", [0, 1, 12, 13, 40])
def test_minimum_of_any_number_of_values(values):
    outcomes = on_ranks(3, lambda rank: rank.minimum([rank.rank * (-1) ** i for i in range(values)], "it"))
    assert outcomes == [[-2 * (i % 2) for i in range(values)]] * 3


CALLS = {
    "reading": lambda rank: rank.run_on_root("reading", lambda: 1),
    "handshake on a step": lambda rank: rank.agree("a step", [("lr", 0.1)]),
    "opening a step": lambda rank: rank.minimum(list(range(30)), "opening a step"),
    "opening the log": lambda rank: rank.shared_errors("opening the log")(lambda: None)(),
    "a barrier": lambda rank: rank.minimum([], "a barrier"),
}


@pytest.mark.parametrize("ours", CALLS)
@pytest.mark.parametrize("theirs", CALLS)
def test_ranks_in_different_calls_all_notice(ours, theirs):
    def work(rank):
        return CALLS[ours if rank.rank != 1 else theirs](rank)

    outcomes = on_ranks(3, work)
    if ours == theirs:
        assert not any(isinstance(outcome, Exception) for outcome in outcomes)
    else:
        said = the_same_error(outcomes, MismatchError)
        assert f"rank 0 is in {ours}, rank 1 in {theirs}." in said


def test_different_numbers_of_values_are_noticed():
    outcomes = on_ranks(2, lambda rank: rank.minimum([0] * (3 + 20 * rank.rank), "it"))
    assert "different numbers of values in it" in the_same_error(outcomes, MismatchError)


@pytest.mark.parametrize("kind", [SettingError, TensorError, MismatchError])
def test_a_wrong_argument_is_the_same_kind_of_error_on_all_ranks(kind):
    def share(rank):
        with rank.shared_errors("making it"):
            if rank.rank == 1:
                raise kind("lr=-1: need a positive number")

    assert the_same_error(on_ranks(2, share), kind) == "making it failed on rank 1: lr=-1: need a positive number"
