"""Calibrations as data: interpolation, choice, and files that are not what they should be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctk.collectives.tuning.calibration import OUT_OF_PLACE, Calibration, factor_at, interpolate
from hpctk.errors import SettingError
from hpctk.schedules import build
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import price

POINTS = ((8, 1e-5), (1000, 1e-4), (1_000_000, 1e-2))


@pytest.mark.parametrize(
    ("nbytes", "seconds"), [(0, 1e-5), (8, 1e-5), (1000, 1e-4), (1_000_000, 1e-2), (2_000_000, 2e-2)]
)
def test_interpolation_meets_the_points_and_goes_on_in_proportion(nbytes, seconds):
    assert interpolate(POINTS, nbytes) == pytest.approx(seconds)


@given(st.integers(0, 10**8), st.integers(0, 10**8))
def test_more_bytes_never_take_less_time(a, b):
    lo, hi = sorted((a, b))
    assert interpolate(POINTS, lo) <= interpolate(POINTS, hi) * (1 + 1e-12)


def test_measured_times_decide_for_the_measured_number_of_ranks_only():
    measured = {"binomial": ((8, 1e-9), (10**8, 1e-8)), "ring": ((8, 1.0), (10**8, 10.0))}
    known = Calibration(layout=(1, 1, 1, 1), measured=measured)
    nodes = [[rank] for rank in range(8)]
    assert known.best("allreduce", 4, 10**7, nodes[:4]) == "binomial"
    assert known.best("allreduce", 8, 10**8, nodes) != "binomial"


def test_factors_correct_the_price():
    nodes = [[rank] for rank in range(4)]
    plan = build("ring", "allreduce", 4)
    known = Calibration(factors={"ring": ((10**6, 2.0),)})
    assert known.seconds(plan, 10**7) == pytest.approx(2 * price(plan, 10**7, Machine()))
    prices = {name: known.seconds(build(name, "allreduce", 4), 10**7) for name in ("ring", "rotation")}
    assert known.best("allreduce", 4, 10**7, nodes) != "ring" or prices["ring"] <= prices["rotation"]


@pytest.mark.parametrize(("nbytes", "factor"), [(1, 2.0), (10**6, 2.0), (10**7, 1.5), (10**8, 1.0), (10**9, 1.0)])
def test_factors_between_and_beyond_the_measured_sizes(nbytes, factor):
    assert factor_at(((10**6, 2.0), (10**8, 1.0)), nbytes) == pytest.approx(factor)


def test_round_trip():
    known = Calibration(
        Machine(byte_s=1e-8), {"ring": ((10**6, 1.1), (10**7, 0.9))}, (2, 1), {"ring": POINTS, "mpi": POINTS}
    ).with_learned("mpi 2 1", 12, {"ring": 1e-3, "mpi": 2e-3})
    assert Calibration.from_json(known.to_json()) == known


def test_files_of_earlier_versions_are_read():
    document = json.loads(Calibration().to_json())
    del document["learned"], document["machine"]["sends"], document["machine"]["part_sends"]
    assert Calibration.from_json(json.dumps(document)) == Calibration()


def test_what_was_learned_decides_where_it_was_learned_and_for_like_sizes():
    nodes, measured = [range(2), range(2, 4)], {"ring": ((8, 1e-6), (10**8, 1e-3)), "mpi": ((8, 1.0), (10**8, 10.0))}
    known = Calibration(layout=(2, 2), measured=measured).with_learned(
        "mpi 2 2", (10**6).bit_length(), {"mpi": 1e-3, "ring": 1.0, "hierarchical": 2e-3}
    )
    assert known.best("allreduce", 4, 10**6, nodes, blocks=True) == "mpi"
    assert known.best("allreduce", 4, 600_000, nodes, blocks=True) == "mpi"
    # Another size, another library, another layout; a call that returns at once cannot block.
    assert known.best("allreduce", 4, 4 * 10**6, nodes, blocks=True) == "ring"
    assert known.best("allreduce", 4, 10**6, nodes, library="torch") == "ring"
    assert known.best("allreduce", 2, 10**6, [[0], [1]], blocks=True) != "mpi"
    assert known.best("iallreduce", 4, 10**6, nodes, blocks=True) == "hierarchical"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="x"), "format"),
        (lambda d: d.update(version=99), "version 99"),
        (lambda d: d.pop("factors"), "factors"),
        (lambda d: d["machine"].update(byte_s=-1), "byte_s"),
        (lambda d: d.update(measured={"ring": [[1]]}), "ValueError"),
        (lambda d: d.update(measured=7), "AttributeError"),
        (lambda d: d.update(learned={"mpi 2": {"x": {}}}), "ValueError"),
    ],
)
def test_damaged_files(change, words):
    document = json.loads(Calibration().to_json())
    change(document)
    with pytest.raises(SettingError, match=words):
        Calibration.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7"])
def test_not_even_a_calibration(text):
    with pytest.raises(SettingError, match="hpctk calibrate"):
        Calibration.from_json(text)


def test_only_what_can_be_run_as_it_was_measured_is_chosen():
    one_node = [range(2)]
    measured = {
        "mpi": ((8, 1e-6), (10**8, 0.05)),
        "shared_memory": ((8, 1e-4), (10**8, 0.02)),
        "ring": ((8, 1e-3), (10**8, 0.1)),
    }
    known = Calibration(layout=(2,), measured=measured)
    assert known.best("allreduce", 2, 10**8, one_node, shares_memory=True, blocks=True) == "shared_memory"
    # The same file on ranks that torch.distributed joins, or that find no memory to share.
    assert known.best("allreduce", 2, 10**8, one_node) == "mpi"
    # What was measured of MPI's own was a call that blocks.
    assert known.best("iallreduce", 2, 10**8, one_node, blocks=True) == "ring"
    assert known.best("iallreduce", 2, 8, one_node, blocks=True) == "mpi"


def test_out_of_place_shared_memory_needs_no_copy_but_what_was_measured_decides():
    known, one_node = Calibration(), ((0, 1),)
    assert known.best("allreduce", 2, 2**20, one_node, shares_memory=True, blocks=True) == "mpi"
    assert known.best(OUT_OF_PLACE, 2, 2**20, one_node, shares_memory=True, blocks=True) == "shared_memory"
    assert known.best(OUT_OF_PLACE, 2, 2**10, ((0,), (1,))) == "mpi"
    times = {"mpi": ((2**20, 1e-3),), "shared_memory": ((2**20, 2e-3),)}
    measured = Calibration(layout=(2,), measured=times)
    assert measured.best(OUT_OF_PLACE, 2, 2**20, one_node, shares_memory=True, blocks=True) == "mpi"


def test_uncalibrated_on_one_node_messages_of_python_are_not_chosen_where_mpi_blocks():
    known, one_node = Calibration(), [range(2)]
    for nbytes in (8, 4096, 2**18, 2**22, 10**8):
        assert known.best("allreduce", 2, nbytes, one_node, shares_memory=True, blocks=True) in ("mpi", "shared_memory")
    assert known.best("allreduce", 2, 10**8, one_node, shares_memory=True, blocks=True) == "shared_memory"
    # Polled, MPI's own is for a few bytes only.
    assert known.best("allreduce", 2, 2**18, one_node, shares_memory=True) == "shared_memory"
