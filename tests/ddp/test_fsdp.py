"""FSDP2 on 2x2 ranks: sharded replicas exchange by a method what a dense all-reduce would average."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from jobs import run, torchrun

JOB = Path(__file__).parent / "sharded_replicas.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank wrote down."""
    folder = tmp_path_factory.mktemp("found")
    ended = run(torchrun(4, str(JOB), str(folder)), timeout_s=240, HPCTK_TIMEOUT_S="60")
    assert ended.code == 0, ended.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def digests(found, *names):
    return {json.dumps(one[name]) for one in found for name in names}


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


def test_under_a_scaler_all_skip_the_same_steps(found):
    """An infinity in one element, on any of the ranks: scales and parameters are the same on all after each step."""
    for name, (seen, _) in found[0]["scaled"].items():
        scales = [scale for _, scale in seen]
        assert any(after < before for before, after in pairwise(scales)), name
        assert any(after > before for before, after in pairwise(scales)), name
        assert all(one["scaled"][name][0] == seen for one in found), name
    for name in found[0]["scaled"]:
        # One module's row, of one shard: a rank hears of the other shard's from the scaler alone.
        assert 0 < sum(one["scaled"][name][1] for one in found) < 4 * 24, name


def test_told_of_the_scaler_what_travels_is_unscaled(found):
    """A wire of float16 comes to the same bits at all scales."""
    for kind, digests_of in found[0]["at scales"].items():
        assert len(set(digests_of)) == 1, kind
        assert all(one["at scales"][kind] == digests_of for one in found), kind


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_parameters_in_half_precision(found, dtype):
    assert len(digests(found, dtype)) == 1
    for one in found:
        dense, ours = one[dtype]
        assert dense == ours
    for name, (wanted, far) in found[0][f"methods in {dtype}"].items():
        assert {one[f"methods in {dtype}"][name][0] for one in found} == {wanted}, name
        # What sends all differs by how often it rounds.
        assert far < (0.01 if name.startswith("all by") else 0.2), name


def test_half_precision_trains_with_float32_residuals(found):
    for first, last, dtypes in (one["half"] for one in found):
        assert last < first
        assert dtypes == ["torch.float32"]


def test_mixed_precision_policies_are_what_torch_makes_of_them(found):
    for one in found:
        assert all(dense == ours for dense, ours in one["policies"].values()), one["policies"]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("both dimensions", "give fully_shard one dimension, mesh=mesh['shard']"),
        ("twice", "has an all-reduce hook already"),
        ("not sharded", "no module of this model went through"),
        ("AdaCons", "AdaCons needs whole gradients"),
        ("AdaCons", "one module's at a time, before the gradients of the others are there"),
        ("SAEF", "SAEF needs whole gradients"),
        ("clip", "Mean(clip=1.0) needs the norm of the whole gradient"),
        ("PowerSGD", "shards travel as flat rows"),
        ("mesh", "need a DeviceMesh of two named dimensions"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(found, what, words):
    assert all(words in one["refused"][what] for one in found), found[0]["refused"][what]
