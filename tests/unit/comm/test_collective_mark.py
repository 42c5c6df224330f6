"""The mark of collective functions: its sentence, and with HPCTK_STRICT=1 the comparison of calls."""

import pytest
from jobs import run_ranks

import hpctk
from hpctk.comm import collective

PROGRAM = """
    import numpy, torch, hpctk
    from hpctk.collectives.dense_mean import dense_mean
    from hpctk.collectives.engine.gather_rows import gather_rows
    from hpctk.comm.world import world
    here, tensor = world(), torch.ones(3)
    assert float(hpctk.allreduce(torch.ones(()), op="sum")) == here.size
    {calls[0]} if here.rank == 0 else {calls[1]}
"""
ELSEWHERE = {
    "gather_rows, rank 1 in a call of dense_mean": (
        "gather_rows(here, numpy.ones(3))",
        "dense_mean(here, dict(one=tensor))",
    ),
    "allreduce, rank 1 in a call of broadcast": ("hpctk.allreduce(tensor)", "hpctk.ops.broadcast(tensor)"),
}


@pytest.mark.parametrize(
    "said", [next(iter(ELSEWHERE)), *(pytest.param(o, marks=pytest.mark.full) for o in list(ELSEWHERE)[1:])]
)
def test_a_strict_job_says_who_is_elsewhere(tmp_path, said):
    ended = run_ranks(2, PROGRAM.format(calls=ELSEWHERE[said]), tmp_path, HPCTK_STRICT="1")
    assert ended.code != 0
    assert "MismatchError" in ended.output
    assert f"rank 0 is in a call of {said}" in ended.output


def test_the_sentence_is_in_the_docstring():
    for function in (hpctk.allreduce, hpctk.ops.iallgather, hpctk.DistributedOptimizer.synchronize):
        first, sentence = function.__doc__.split("\n\n")[:2]
        assert sentence == collective.SENTENCE
        assert first.endswith(".")


def test_without_strict_calls_are_not_wrapped():
    assert not hasattr(hpctk.allreduce, "__wrapped__")
