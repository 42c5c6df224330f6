"""torchrun and no MPI: every method trains, attached to DDP or on the bare model."""

import json
from pathlib import Path

import pytest
from jobs import run, torchrun

JOB = Path(__file__).parent / "every_method.py"
RANKS = 2
GRADIENT_METHODS = [
    "Mean", "Mean Threshold",
    *(f"Mean {name}" for name in ("Identity", "Half", "TopK", "RandomK", "Sign", "QSGD", "PowerSGD", "ChunkTopK")),
    "AdaCons", "AdaCons layerwise", "EF21",
]  # fmt: skip
OTHER_METHODS = [
    "SASG", "SAEF", "SAEF Threshold", "SAEF one-bit",
    "MGRAWA", "LGRAWA", "MGRAWA asynchronous", "CELGC", "LocalSGD", "EASGD", "LSGD",
    "EPISODE", "SA-PEF", "DiLoCo", "DiLoCo streaming", "SparseLoCo", "CELGC TopK",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank wrote down."""
    folder = tmp_path_factory.mktemp("found")
    ended = run(torchrun(RANKS, str(JOB), str(folder)), timeout_s=150, HPCTK_TIMEOUT_S="60", TMPDIR=str(folder))
    assert ended.code == 0, ended.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(
    "name", [*GRADIENT_METHODS, *OTHER_METHODS, *(f"{name} attached" for name in GRADIENT_METHODS)]
)
def test_method(found, name):
    first, second = (one[name] for one in found)
    assert first["digest"] == second["digest"], "the ranks must come to the same model"
    assert first["steps"] >= 5


def test_a_checkpoint_resumes_bit_for_bit(found):
    assert found[0]["resumed"]["digest"] == found[1]["resumed"]["digest"] == found[0]["SAEF"]["digest"]


def test_attached_is_the_same_as_on_the_bare_model(found):
    # At 2 ranks sums have one order; AdaCons adds up inner products in the order of the buckets.
    for name in GRADIENT_METHODS:
        if not name.startswith("AdaCons"):
            assert found[0][f"{name} attached"]["digest"] == found[0][name]["digest"], name


def test_no_mpi_was_loaded(found):
    assert not any(one["libmpi"] for one in found)


def test_errors_say_what_to_call(found):
    assert "torch.distributed.init_process_group('gloo')" in found[0]["before init_process_group"]
    assert "torchrun" in found[0]["without a communicator"]
    assert "hpctk.ddp.DistributedOptimizer" in found[0]["without a communicator"]
