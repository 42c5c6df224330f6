"""A rank that fails in the middle of training: the others end, soon, with an error that says who and where."""

import time

import pytest
from jobs import run_ranks

#: Rank 1 does something else in its fourth step; rank 0 trains on.
PROGRAM = """
    import os, pathlib, signal, sys, time, torch, hpctk
    from hpctk.optimizer import DistributedOptimizer
    from mpi4py import MPI
    # Ranks may take long to start where there are few cores: that is not what is tested.
    MPI.COMM_WORLD.Barrier()
    rank = MPI.COMM_WORLD.rank
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    opt = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), hpctk.{method}, model=model, overlap={overlap}
    )

    def misbehave():
        pathlib.Path({stamp!r}).touch()
        {deed}

    def train(steps=10**9):
        for step in range(steps):
            if rank == 1 and step == 3 and not {after_backward}:
                return misbehave()
            opt.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            if rank == 1 and step == 3:
                return misbehave()
            opt.step()

    {main}
"""

WAYS = {
    "Mean": {"method": "Mean()", "overlap": False},
    "Mean overlapping": {"method": "Mean()", "overlap": True},
    "LocalSGD": {"method": "LocalSGD(4)", "overlap": False},
}


def crash(tmp_path, way, deed, *python, after_backward=True, main="train()", timeout_s="60"):
    """Return the output of a job that must fail, and its seconds since the deed."""
    stamp = tmp_path / "deed"
    program = PROGRAM.format(**WAYS[way], deed=deed, after_backward=after_backward, main=main, stamp=str(stamp))
    ended = run_ranks(2, program, tmp_path, *python, timeout_s=150, HPCTK_TIMEOUT_S=timeout_s)
    assert ended.code != 0
    return ended.output, time.time() - stamp.stat().st_mtime


@pytest.mark.parametrize("way", ["Mean overlapping", pytest.param("LocalSGD", marks=pytest.mark.full)])
def test_raising_between_backward_and_step(tmp_path, way):
    """Without mpi4py's runner nobody aborts the job: rank 0 hears that rank 1 has left."""
    output, seconds = crash(tmp_path, way, "raise ValueError('of the user')", "-u")
    assert seconds < 15
    assert "rank 1 of 2" in output
    assert "ValueError: of the user" in output
    assert "PeerError" in output
    assert "will never come" in output


def test_killed(tmp_path):
    _, seconds = crash(tmp_path, "Mean overlapping", "os.kill(os.getpid(), signal.SIGKILL)", timeout_s="5")
    assert seconds < 20


@pytest.mark.parametrize("way", ["Mean", pytest.param("LocalSGD", marks=pytest.mark.full)])
def test_out_of_data_without_join(tmp_path, way):
    """Rank 1 comes to the end of its program; the other is told at once, not at the deadline."""
    output, seconds = crash(tmp_path, way, "return", after_backward=False)
    assert seconds < 15
    where = "a round" if way == "LocalSGD" else "a step"
    assert f"waits in opening {where}, but rank 1 has left the program" in output


def test_out_of_data_and_stuck(tmp_path):
    output, seconds = crash(tmp_path, "Mean", "time.sleep(1000)", after_backward=False, timeout_s="4")
    assert seconds < 20
    assert "waited 4 s in opening a step" in output
    assert "rank 1 did not come" in output
    assert "in misbehave" in output


def test_out_of_data_and_on_to_the_evaluation(tmp_path):
    """Both are in different calls: the error names both, on both, at once."""
    output, seconds = crash(
        tmp_path, "LocalSGD", "opt.averaged_model().__enter__()", after_backward=False, timeout_s="4"
    )
    assert seconds < 20
    assert "rank 0 is in opening a round, rank 1 in averaged_model()" in output


def test_an_exception_inside_join_is_not_held_up(tmp_path):
    """The rank that fails does not go idle; the other, out of data in join(), hears that it has left."""
    join = "with opt.join(): train(9 if rank else 2)"
    output, seconds = crash(tmp_path, "Mean", "raise ValueError('of the user')", "-u", main=join)
    assert seconds < 15
    assert "ValueError: of the user" in output
    assert "rank 0 of 2 waits in opening a step, but rank 1" in output
