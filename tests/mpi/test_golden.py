"""Every method comes to the bits that are recorded in tests/support/golden, by MPI and by torch.distributed.

A failure here means that training comes to something else than before. See support/golden/__init__.py for when, and
only when, digests are recorded anew.
"""

import pytest
from golden import digests
from golden.cases import CASES, EVERY, pairs
from golden.ways import train

OVER_MPI, OVER_TORCH = pairs("mpi"), pairs("torch", "ddp")


@pytest.mark.parametrize("name", OVER_MPI)
def test_over_mpi(comm, shared_folder, name):
    way, case = OVER_MPI[name]
    digests.check(way, case, train(way, case, shared_folder / name), comm)


@pytest.mark.parametrize("name", OVER_TORCH)
def test_over_torch(comm, process_group, shared_folder, name):
    way, case = OVER_TORCH[name]
    digests.check(way, case, train(way, case, shared_folder / name), comm)


def test_everything_is_recorded():
    """No case without digests, no digests without their case: nothing is left out by a slip."""
    recorded = digests.read()
    wanted = {way: {name for name in CASES if way in CASES[name].ways} for way in EVERY}
    assert set(recorded) == {"1", "2", "3"}
    for ranks, ways in recorded.items():
        assert {way: set(kept["cases"]) for way, kept in ways.items()} == wanted, f"{ranks} ranks"


def test_a_changed_bit_is_told():
    was = "aa bb cc dd 1.5 2.5"
    same = {"same_machine": True, "dtype": "float64"}
    assert digests.difference(was, was, **same) == ""
    assert digests.difference(was, "aa bb cX dd 1.5 2.5", **same) == "state"
    assert digests.difference("aa bb cc dd", "aX bb cc dd", same_machine=False, dtype="float64") == "parameters"


def test_on_another_machine_roundings_pass_and_changes_do_not():
    was = "aa bb cc dd 1.5 2.5"
    other = {"same_machine": False, "dtype": "float64"}
    assert digests.difference(was, "xx xx xx dd 1.5000000000000002 2.5", **other) == ""
    assert "parameters" in digests.difference(was, "xx xx xx dd 1.50000001 2.5", **other)
    assert digests.difference(was, "xx xx xx xx 1.5 2.5", **other) == "counts"
