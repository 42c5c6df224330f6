"""What methods compute is measured on real ranks, and all ranks come to the same figures."""

import json

from hpctk.advise import measure
from hpctk.advise.local_work import ORDINARY, from_calibration, into_calibration
from hpctk.collectives.tuning.calibration import Calibration


def test_all_ranks_measure_the_same(world, monkeypatch):
    monkeypatch.setattr(measure, "SHAPE", (50, 20))
    heard = []
    found = measure.measure(world, heard.append, elements=2000)
    assert set(found) == {*measure.EVERY_STEP, *measure.IN_ROUNDS} <= set(ORDINARY)
    assert len(heard) == len(found)
    assert all(passes.step_ns >= 0 and passes.round_ns >= 0 for passes in found.values())
    # A step of a thousand parameters takes microseconds, not nothing.
    assert found["top_k"].step_ns > 0
    text = into_calibration(Calibration().to_json(), found)
    world.agree("local work", [("text", json.loads(text)["local_work"])])
    assert from_calibration(text)["sasg"] == found["sasg"]
