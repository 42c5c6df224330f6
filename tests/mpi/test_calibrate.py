"""Calibration on real ranks, and what `auto` makes of it."""

import json

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives.tuning import auto, calibrate
from hpctk.collectives.tuning.calibration import Calibration
from hpctk.errors import SettingError
from hpctk.schedules.core.registry import names


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


@pytest.mark.parametrize(("slow", "chosen"), [((), 983040), (("ring",), 61440), (("halving_doubling",), 61440)])
def test_long_messages_are_chosen_where_no_schedule_loses_by_them(world, monkeypatch, slow, chosen):
    def took(here, run):
        plan, long = run.args[0].name, run.keywords["segment_bytes"] > 100_000
        return 1.0 if not long else 2.0 if plan in slow else 1e5 / run.keywords["segment_bytes"]

    monkeypatch.setattr(calibrate, "timed", took)
    assert calibrate.best_segment(world) == (chosen if world.size > 1 else 61440)


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
