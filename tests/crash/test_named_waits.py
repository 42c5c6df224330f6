"""A rank that waits in vain says what its user called, not only which operation of hpctk's own that came to."""

import pytest
from jobs import run_ranks, run_without_launcher

#: Rank 0 calls; rank 1 comes late, or is late in the middle of it.
PROGRAM = """
    import sys, time, torch, hpctk
    from hpctk.collectives.consensus import Part
    {start}
    rank = hpctk.comm.world.world({comm}).rank
    model = torch.nn.Linear(4, 2)
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), hpctk.LocalSGD(8), model=model, comm={comm}
    )

    def stay_away(*_):
        time.sleep(1000)

    if rank == 1:
        {deed}
    {call}
"""
COLLECTIVE = "hpctk.ops.adacons_aggregate([torch.ones(9)], hpctk.ops.ConsensusState(), comm={comm})"
EVALUATION = "opt.averaged_model().__enter__()"
GLOO = "import torch.distributed as dist; dist.init_process_group('gloo')"


@pytest.mark.parametrize(
    ("call", "deed", "named"),
    [
        (COLLECTIVE, "stay_away()", "adacons_aggregate (handshake on adacons_aggregate)"),
        pytest.param(
            COLLECTIVE,
            "Part.gather = stay_away",
            "adacons_aggregate (ring allgather of 9 elements)",
            marks=pytest.mark.full,
        ),
        pytest.param(EVALUATION, "stay_away()", "averaged_model()", marks=pytest.mark.full),
    ],
    ids=["at its beginning", "in its middle", "of a model"],
)
def test_a_deadline_names_what_was_called(tmp_path, call, deed, named):
    program = PROGRAM.format(start="", comm=None, call=call.format(comm=None), deed=deed)
    ended = run_ranks(2, program, tmp_path, timeout_s=120, HPCTK_TIMEOUT_S="6")
    assert ended.code != 0
    assert f"rank 0 of 2 waited 6 s in {named}; rank 1 did not come" in ended.output


def test_a_deadline_without_mpi_names_what_was_called(tmp_path):
    group = "dist.group.WORLD"
    program = PROGRAM.format(start=GLOO, comm=group, call=COLLECTIVE.format(comm=group), deed="stay_away()")
    ended = run_without_launcher(2, program, tmp_path, awaited=0, timeout_s=120, HPCTK_TIMEOUT_S="6")
    assert ended.code != 0
    assert (
        "rank 0 of 2 waited 6 s in adacons_aggregate (handshake on adacons_aggregate); rank 1 did not come"
        in ended.output
    )
