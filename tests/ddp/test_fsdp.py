"""FSDP2 on 2x2 ranks: sharded replicas exchange by a method what a dense all-reduce would average."""

import json
from pathlib import Path

import pytest
from jobs import run, torchrun

JOB = Path(__file__).parent / "sharded_replicas.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank wrote down."""
    folder = tmp_path_factory.mktemp("found")
    ended = run(torchrun(4, str(JOB), str(folder)), timeout_s=150, HPCTK_TIMEOUT_S="60")
    assert ended.code == 0, ended.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def digests(found, *names):
    return {one[name] for one in found for name in names}


def test_mean_is_what_torch_computes_over_both_dimensions(found):
    # Two replicas: their sum has one order.
    assert len(digests(found, "dense", "mean")) == 1


def test_every_compressor_leaves_all_replicas_alike(found):
    for name, (wanted, far) in found[0]["methods"].items():
        assert {one["methods"][name][0] for one in found} == {wanted}, name
        # What sends all is the dense mean up to a rounding; what does not is near it.
        assert far < (1e-6 if name.startswith("all by") else 0.2), name


def test_it_trains_with_fewer_bytes(found):
    assert all(last < first for first, last in (one["losses"] for one in found))
    dense_bytes = 4 * (6 * 16 + 16 + 16 * 5 + 5) / 2
    assert all(0 < one["sent"] < 20 * dense_bytes / 2 for one in found)


def test_residuals_are_in_the_state_of_each_rank(found):
    assert len(digests(found, "straight", "resumed")) == 1


def test_a_bad_gradient_on_one_rank_is_an_infinity_on_all_replicas(found):
    # Its step is skipped by all, and nothing lasts of it.
    assert len(digests(found, "with a bad step", "without it")) == 1
    assert all(one["skipped"] > 0 for one in found)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("both dimensions", "give fully_shard one dimension, mesh=mesh['shard']"),
        ("twice", "has an all-reduce hook already"),
        ("not sharded", "no module of this model went through"),
        ("AdaCons", "AdaCons needs whole gradients"),
        ("SAEF", "SAEF needs whole gradients"),
        ("clip", "Mean(clip=1.0) needs the norm of the whole gradient"),
        ("PowerSGD", "shards travel as flat rows"),
        ("mesh", "need a DeviceMesh of two named dimensions"),
        ("half", "need float32 or float64 (half precision by MixedPrecisionPolicy("),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(found, what, words):
    assert all(words in one["refused"][what] for one in found), found[0]["refused"][what]
