"""HPCTK_STRICT=1: ranks that make different collective calls are told who is where, at the call."""

import pytest
import torch

import hpctk
from hpctk.collectives.compressed_mean import dense_mean
from hpctk.collectives.engine.gather_rows import gather_rows
from hpctk.comm import collective
from hpctk.errors import MismatchError


@pytest.fixture
def strict(world, monkeypatch):
    if world.size == 1:
        pytest.skip("one rank cannot disagree")
    monkeypatch.setenv("HPCTK_STRICT", "1")
    collective.is_strict.cache_clear()
    yield
    monkeypatch.undo()
    collective.is_strict.cache_clear()


def test_calls_without_an_agreement_of_their_own(world, strict):
    mine = torch.ones(3)
    with pytest.raises(
        MismatchError, match="rank 0 is in a call of gather_rows, rank 1 in a call of dense_mean"
    ):
        if world.rank == 0:
            gather_rows(world, mine.double().numpy())
        else:
            dense_mean(world, {"mine": mine})


def test_public_calls(world, strict):
    with pytest.raises(
        MismatchError, match="rank 0 is in a call of allreduce, rank 1 in a call of broadcast"
    ):
        (hpctk.allreduce if world.rank == 0 else hpctk.ops.broadcast)(torch.ones(3))


def test_what_agrees_works(world, strict):
    assert float(hpctk.allreduce(torch.ones(()), op="sum")) == world.size


def test_the_sentence_is_in_the_docstring():
    for function in (hpctk.allreduce, hpctk.ops.iallgather, hpctk.DistributedOptimizer.synchronize):
        first, sentence = function.__doc__.split("\n\n")[:2]
        assert sentence == collective.SENTENCE
        assert first.endswith(".")
