"""A rank that dies in the middle of a collective: the job ends and somebody names it."""

import pytest
from jobs import run_ranks

PROGRAM = """
    import os, signal, sys, time, torch, hpctk
    from hpctk.comm.world import world
    here = world()
    tensor = torch.ones(4_000_000)
    for step in range(1000):
        handle = hpctk.ops.iallreduce(tensor, schedule="{schedule}")
        if here.rank == 2 and step == 3:
            {deed}
        handle.wait()
"""


# A plain "mpi" as an id would be taken for the marker of that name.
@pytest.mark.parametrize(
    "schedule",
    [
        "ring",
        pytest.param("rotation", marks=pytest.mark.full),
        pytest.param("shared_memory", marks=pytest.mark.full),
        # In test_blocking_calls.py, too.
        pytest.param("mpi", marks=pytest.mark.full),
    ],
    ids="by {}".format,
)
def test_killed_in_mid_collective(tmp_path, schedule):
    program = PROGRAM.format(schedule=schedule, deed="os.kill(os.getpid(), signal.SIGKILL)")
    # It ends within a minute, or run_ranks fails: how fast depends on how busy the machine is.
    ended = run_ranks(3, program, tmp_path, HPCTK_TIMEOUT_S="5")
    assert ended.code != 0
    # Open MPI's launcher speaks of rank 2, MPICH's of its process; or a waiting rank does.
    assert "rank 2" in ended.output or "KILLED BY SIGNAL: 9" in ended.output.upper() or "RANK 2" in ended.output.upper()


@pytest.mark.parametrize(
    "schedule", ["ring", pytest.param("halving_doubling", marks=pytest.mark.full), "shared_memory"]
)
def test_stuck_in_mid_collective(tmp_path, schedule):
    ended = run_ranks(3, PROGRAM.format(schedule=schedule, deed="time.sleep(1000)"), tmp_path, HPCTK_TIMEOUT_S="4")
    assert ended.code != 0
    assert f"{schedule} allreduce of 4000000 elements" in ended.output
    assert "rank 2 did not come" in ended.output
