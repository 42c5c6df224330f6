"""Calibration on real ranks, and what `auto` makes of it."""

import json

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.tuning import auto, calibrate
from hpctk.collectives.tuning.calibration import Calibration
from hpctk.errors import SettingError
from hpctk.schedules import build
from hpctk.schedules.core.registry import names
from hpctk.schedules.cost.machine import Machine


@pytest.fixture
def restored(world):
    before = auto.calibration(world)
    yield
    auto.use(world, before)


def test_all_ranks_measure_the_same(world, restored, monkeypatch):
    monkeypatch.setattr(calibrate, "SIZES", (8, 4096, 262144))
    found = calibrate.calibrate(world)
    world.agree("calibration", [("text", found.to_json())])
    shared = {"shared_memory"} if world.shares_memory else set()
    assert set(found.measured) == {"mpi", *shared, *names("allreduce", with_nodes=True)}
    assert all(seconds >= 0 for points in found.measured.values() for _, seconds in points)
    assert Calibration.from_json(found.to_json()) == found


@pytest.mark.parametrize(("enough_s", "rounds"), [(0.0, 2), (1e9, 6)])
def test_what_takes_long_is_repeated_once(world, monkeypatch, enough_s, rounds):
    monkeypatch.setattr(calibrate, "ENOUGH_S", enough_s)
    calls = []
    monkeypatch.setattr(calibrate, "timed", lambda here, run, count=1: calls.append(run) or 0.5)
    plans = [build(name, "allreduce", world.size) for name in ("ring", "binomial")]
    found = calibrate.measure(world, plans, 64, {"segment_bytes": 4096, "sends": 8})
    assert set(found.values()) == {0.5}
    assert len(calls) == rounds * len(found)


@pytest.mark.parametrize(
    ("slow", "longest", "most"), [((), 983040, 64), (("ring",), 61440, 24), (("halving_doubling",), 61440, 24)]
)
def test_the_engine_is_set_to_what_no_schedule_loses_by(world, monkeypatch, slow, longest, most):
    def took(here, run):
        plan, given = run.args[0].name, run.keywords
        gain = 61440 / given["segment_bytes"] if "flight" not in given else 24 / given["flight"]
        return 1.0 if gain >= 1 else 2.0 if plan in slow else gain

    monkeypatch.setattr(calibrate, "timed", took)
    found = calibrate.engine_figures(world)
    assert (found["segment_bytes"], found["sends"]) == ((longest, most) if world.size > 1 else (61440, 24))


def test_the_calibrated_number_of_sends_is_under_way(world, restored):
    if world.size == 1:
        return
    auto.use(world, Calibration(Machine(sends=3)))
    n, under_way = 100 * 61440, []
    run = engine_of(world).start(build("ring", "allreduce", world.size), InPlace(np.ones(n, np.uint8), 1, "uint8"))
    while not run.done:
        under_way.append(len(run._sending.items))
        engine_of(world).progress()
    # One more where what stands first in the plan must not wait.
    assert 1 < max(under_way) <= 4


def test_auto_takes_what_was_measured_fastest(world, restored):
    fast, slow = ((8, 1e-6), (10**6, 1e-3)), ((8, 1e-3), (10**6, 1.0))
    for winner in ("rotation", "halving_doubling", "mpi"):
        measured = {name: fast if name == winner else slow for name in ("mpi", *names("allreduce"))}
        auto.use(world, Calibration(layout=(world.size,), measured=measured))
        assert auto.choose(world, "allreduce", 4000) == winner
        result = hpctk.allreduce(torch.full((1000,), float(world.rank)))
        np.testing.assert_allclose(result.numpy(), (world.size - 1) / 2)


def test_auto_prices_other_numbers_of_ranks(world, restored):
    auto.use(world, Calibration(layout=(world.size + 1,), measured={"binomial": ((8, 1e-9),)}))
    assert auto.choose(world, "allreduce", 50_000_000) != "binomial"
    assert auto.choose(world, "allreduce", 8) == "mpi"


def test_damaged_file_is_an_error_on_every_rank(world, mpi_tmp_path, monkeypatch):
    path = mpi_tmp_path / "calibration.json"
    world.run_on_root("writing", lambda: path.write_text(json.dumps({"format": "other"})) and None)
    monkeypatch.setenv("HPCTK_CALIBRATION", str(path))
    monkeypatch.delitem(world.attached, auto.Choice, raising=False)
    with pytest.raises(SettingError, match="run `hpctk calibrate`"):
        hpctk.allreduce(torch.ones(3))
