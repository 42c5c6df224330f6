"""The arithmetic of the advice: prices are those of schedules, bytes are closed forms, and choices follow from them."""

import dataclasses
import json

import pytest

from hpctk.advise import evidence, picture
from hpctk.advise.local_work import ORDINARY, Passes, from_calibration, into_calibration
from hpctk.advise.network import Network
from hpctk.advise.predict import at_scales, exposed, fastest, predict
from hpctk.advise.question import Question, at_rate, bits_per_second
from hpctk.advise.recommend import recommend
from hpctk.collectives.tuning.calibration import Calibration
from hpctk.errors import SettingError
from hpctk.methods import METHODS
from hpctk.schedules import build
from hpctk.schedules.cost.machine import Machine
from hpctk.schedules.cost.prices import price

QUESTION = Question(params=25_000_000, step_s=0.12, ranks=16)


def network(rate):
    return Calibration(at_rate(Machine(), bits_per_second(rate), 1))


def by_name(question=QUESTION, rate="1gbit"):
    return {entry.name: entry for entry in fastest(predict(question, network(rate), ORDINARY))}


def test_prices_are_those_of_the_schedules():
    known = network("1gbit")
    ways = {way.schedule: way for way in Network(known, QUESTION.nodes).sums(10**8)}
    for name in ("ring", "halving_doubling", "binomial", "hierarchical"):
        plan = build(name, "allreduce", 16, nodes=QUESTION.nodes)
        assert ways[name].seconds == price(plan, 10**8, known.machine)
    assert ways["ring"].sent_bytes == pytest.approx(2 * 15 / 16 * 1e8)


def test_measured_times_decide_for_the_ranks_they_were_measured_on():
    known = Calibration(
        layout=(1,) * 16, measured={"mpi": ((8, 1e-4), (10**8, 0.25)), "ring": ((8, 1e-3), (10**8, 0.5))}
    )
    assert Network(known, QUESTION.nodes).sums(10**8)[0].schedule == "mpi"
    assert Network(known, QUESTION.nodes).sums(10**8)[0].seconds == pytest.approx(0.25)
    elsewhere = dataclasses.replace(QUESTION, ranks=8)
    assert "mpi" not in {way.schedule for way in Network(known, elsewhere.nodes).sums(10**8)}


def test_a_step_is_the_sum_of_its_parts():
    for entry in predict(QUESTION, network("1gbit"), ORDINARY):
        assert entry.seconds == pytest.approx(entry.compute_s + entry.local_s + entry.exposed_s)
        assert 0 <= entry.exposed_s <= entry.communication_s
        assert entry.sent_bytes > 0


def test_bytes_follow_the_method():
    found = by_name()
    dense = 2 * 15 / 16 * 1e8
    assert found["DDP, 32 bit"].sent_bytes == pytest.approx(dense)
    assert found["DDP, fp16 hook"].sent_bytes == pytest.approx(dense / 2)
    assert found["LocalSGD(period=16)"].sent_bytes == pytest.approx(dense / 16)
    assert found["EPISODE(clip=1.0, period=16)"].sent_bytes == pytest.approx(dense / 8)
    assert found["SAEF(Sign(), server=Sign())"].sent_bytes == pytest.approx(dense / 32, rel=1e-3)
    assert found["Mean(RandomK(0.01))"].sent_bytes == pytest.approx(dense / 100)
    assert found["SASG(density=0.01)"].compute_s == pytest.approx(2 * QUESTION.step_s)


def test_no_method_is_left_out():
    named = {name.partition("(")[0] for name in by_name()}
    assert set(METHODS) <= named


def test_overlap_hides_no_more_than_it_can():
    assert exposed(QUESTION, 1.0) == pytest.approx(1.0 - 0.06)
    # The last bucket is known only when backward is over.
    assert exposed(QUESTION, 0.01) == pytest.approx(0.01 * 25 * 2**20 / 1e8)
    assert exposed(dataclasses.replace(QUESTION, overlap_share=0.0), 0.5) == pytest.approx(0.5)


def test_no_compression_where_the_network_keeps_up():
    advice = recommend(predict(QUESTION, network("100gbit"), ORDINARY))
    assert advice.choice.name == "DDP, 32 bit"
    assert advice.verdict.startswith("do not compress here")
    assert "DistributedDataParallel(model)" in advice.choice.code


def test_sixteen_bits_where_they_are_enough():
    question = Question(params=25_000_000, step_s=0.4, ranks=4)
    advice = recommend(predict(question, network("2.5gbit"), {key: Passes() for key in ORDINARY}))
    assert advice.choice.change == 1, advice
    assert "16 bits" in advice.verdict


def test_slow_links_want_local_steps_and_nothing_that_has_a_caveat():
    # Where all methods compute as much, bytes decide; PowerSGD sends least of those that exchange in every step.
    question = dataclasses.replace(QUESTION, periods=(16, 1024))
    advice = recommend(predict(question, network("50mbit"), {key: Passes() for key in ORDINARY}))
    assert advice.choice.period == 1024
    assert not advice.choice.caveat
    assert advice.choice.code.startswith("opt = hpctk.DistributedOptimizer(opt, hpctk.")


def test_a_longer_period_must_be_worth_it():
    question = dataclasses.replace(QUESTION, periods=(16, 17))
    assert recommend(predict(question, network("1gbit"), ORDINARY)).choice.period == 16


def test_lists_fill_up_with_ranks():
    curve = at_scales(QUESTION, network("1gbit"), ORDINARY, (8, 64, 512))
    step = {ranks: {e.name: e.seconds for e in entries} for ranks, entries in curve.items()}
    assert step[8]["SAEF(TopK(0.01))"] < step[64]["SAEF(TopK(0.01))"] < step[512]["SAEF(TopK(0.01))"]
    assert step[512]["LocalSGD(period=16)"] == pytest.approx(step[64]["LocalSGD(period=16)"], rel=0.05)
    drawn = picture.lines(curve)
    assert list(drawn)[:2] == ["DDP, 32 bit", "DDP, fp16 hook"]
    assert all(len(seconds) == 3 for seconds in drawn.values())


def test_ranks_of_a_node_share_its_link():
    apart = by_name()["DDP, 32 bit"].communication_s
    together = Calibration(at_rate(Machine(), 1e9, 4))
    shared = dataclasses.replace(QUESTION, per_node=4)
    found = {entry.name: entry for entry in fastest(predict(shared, together, ORDINARY))}
    assert found["DDP, 32 bit"].schedule == "hierarchical"
    # 4 nodes instead of 16: 2 * 3/4 of the bytes pass each link instead of 2 * 15/16, and memory takes some time.
    assert found["DDP, 32 bit"].communication_s == pytest.approx(apart * 0.8, rel=0.1)


def test_every_line_of_code_is_python_and_makes_the_method():
    import torch

    import hpctk

    for entry in fastest(predict(QUESTION, network("1gbit"), ORDINARY)):
        compile(entry.code, entry.name, "exec")
        if entry.code.startswith("opt = "):
            method = entry.code.split("(opt, ", 1)[1].rsplit(", model=model", 1)[0]
            assert type(eval(method, {"hpctk": hpctk, "torch": torch})).__name__ in entry.name


def test_local_work_is_kept_in_the_calibration_file():
    text = into_calibration(Calibration().to_json(), {"top_k": Passes(7.0, 0.5)})
    assert Calibration.from_json(text) == Calibration()
    found = from_calibration(text)
    assert found["top_k"] == Passes(7.0, 0.5)
    assert found["sign"] == ORDINARY["sign"]
    assert Passes(2.0, 8.0).seconds(10**6, period=4) == pytest.approx(4e-3)
    with pytest.raises(SettingError, match="local_work"):
        from_calibration(json.dumps({"local_work": {"top_k": 3}}))


def test_the_nearest_measurement(tmp_path):
    for hosts, rate in ((4, 1e9), (4, 5e7)):
        settings = {"task": "mlp", "hosts": hosts, "rate": f"{rate:g}", "bits_per_second": rate}
        summary = [{"name": "MGRAWA", "to_target_s": 3.0}, {"name": "SASG", "to_target_s": None}]
        document = {"format": evidence.FORMAT, "settings": settings, "params": 10**7, "summary": summary}
        (tmp_path / f"{rate:g}.json").write_text(json.dumps(document))
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    found = evidence.nearest(QUESTION, 1e8, evidence.load(tmp_path))
    assert "at 5e+07" in found.where
    assert "MGRAWA 3.0 s, SASG did not reach it" in found.text
    assert evidence.nearest(QUESTION, 1e8, evidence.load(tmp_path / "none")) is None


def test_nothing_leaves_early_within_a_node():
    found = by_name(dataclasses.replace(QUESTION, ranks=4, per_node=4))
    assert "overlap" not in found["Mean()"].code
    assert "overlap=True" in by_name()["Mean()"].code


def test_local_steps_are_compressed_where_that_makes_a_step_twice_as_short():
    question = dataclasses.replace(QUESTION, periods=(16,), overlap_share=0.0)
    chosen = {rate: recommend(predict(question, network(rate), ORDINARY)).choice for rate in ("1gbit", "20mbit")}
    assert chosen["1gbit"].change < 4, chosen["1gbit"]
    assert chosen["20mbit"].change == 4, chosen["20mbit"]
    assert "compressor=hpctk.ChunkTopK()" in by_name(question)["MGRAWA(period=16, compressor=ChunkTopK())"].code
