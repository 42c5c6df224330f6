"""HPCTK_AUTO=learn: what calls took corrects what a calibration says."""

import time

import numpy as np
import pytest
import torch

import hpctk
from hpctk.collectives import allreduce
from hpctk.collectives.engine.engine import engine_of
from hpctk.collectives.tuning import auto, learning
from hpctk.collectives.tuning.calibration import Calibration, keep, read
from hpctk.schedules.core.registry import names

N = 1000
LATE_S = 0.05


@pytest.fixture
def wrong(world, mpi_tmp_path, monkeypatch):
    """Return the file of a calibration that takes binomial, which is slow here, for the fastest."""
    path = mpi_tmp_path / "calibration.json"
    measured = dict.fromkeys(("mpi", *names("allreduce")), ((8, 1.0), (10**6, 2.0)))
    measured["binomial"] = ((8, 1e-9), (10**6, 1e-8))
    text = Calibration(layout=tuple(map(len, world.nodes)), measured=measured).to_json()
    world.run_on_root("writing", lambda: keep(path, text))
    monkeypatch.setenv("HPCTK_CALIBRATION", str(path))
    monkeypatch.delitem(world.attached, auto.Choice, raising=False)
    # Others have left calls under way: then nothing is known of how long one takes.
    monkeypatch.setattr(engine_of(world), "overlaps", False)
    start = allreduce.start_in_place

    def slowly(here, tensor, dtype, op, schedule, *rest, **settings):
        if schedule == "binomial":
            time.sleep(LATE_S)
        return start(here, tensor, dtype, op, schedule, *rest, **settings)

    monkeypatch.setattr(allreduce, "start_in_place", slowly)
    yield path
    monkeypatch.undo()
    world.attached.pop(auto.Choice, None)


def mean_of(world, n=N):
    result = hpctk.allreduce(torch.full((n,), float(world.rank)))
    np.testing.assert_allclose(result.numpy(), (world.size - 1) / 2)


def test_a_wrong_price_is_corrected_by_what_calls_took(world, wrong, monkeypatch):
    monkeypatch.setenv("HPCTK_AUTO", "learn")
    counter = engine_of(world).counter
    assert auto.choose(world, "reduce_scatter", 4 * N) in names("reduce_scatter")
    tried = [*learning.candidates(world)] if world.size > 1 else []
    for _ in range(learning.TRIALS * len(tried)):
        if world.rank == world.size - 1:
            # The others wait for this one; that is none of the schedule's time.
            time.sleep(LATE_S / 10)
        mean_of(world)
    calls = counter.calls
    mean_of(world)
    assert counter.calls == calls + 1
    chosen = auto.choose(world, "allreduce", 4 * N)
    assert (chosen == "binomial") == (world.size == 1)
    world.agree("choices", [("chosen", chosen)])
    # What was learned is of sizes like this one only.
    assert auto.choose(world, "allreduce", 64 * N) == "binomial"
    # The next run chooses by it, and tries nothing.
    monkeypatch.setenv("HPCTK_AUTO", "fixed")
    monkeypatch.delitem(world.attached, auto.Choice)
    assert auto.choose(world, "allreduce", 4 * N) == chosen
    if world.size > 1:
        place = " ".join(["mpi", *(str(len(ranks)) for ranks in world.nodes)])
        times = Calibration.from_json(read(wrong)).learned[place][(4 * N).bit_length()]
        assert set(times) == set(tried)
        assert times["binomial"] >= LATE_S > times["mpi"]


def test_nothing_changes_unless_asked_for(world, wrong):
    before = read(wrong)
    for _ in range(4):
        mean_of(world)
        assert auto.choose(world, "allreduce", 4 * N) == "binomial"
    world.barrier("reading the file")
    assert read(wrong) == before


def test_what_a_checkpoint_keeps_is_not_learned_again(world, wrong, monkeypatch):
    monkeypatch.setenv("HPCTK_AUTO", "learn")
    kept = {"calibration": Calibration().to_json(), "chosen": [["allreduce", 4 * N, "ring"]]}
    auto.resolve(world, kept)
    assert auto.trial(world, 4 * N) is None
    assert auto.choose(world, "allreduce", 4 * N) == "ring"
    assert (auto.trial(world, 64 * N) is None) == (world.size == 1)
