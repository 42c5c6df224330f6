"""A rank that fails in the middle of training: the others end, soon, with an error that says who and where."""

import pytest
from jobs import run_ranks

#: Rank 1 does something else in its fourth step; the others train on.
PROGRAM = """
    import os, signal, sys, time, torch, hpctk
    from hpctk.world import world
    rank = world().rank
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    opt = hpctk.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), hpctk.{method}, model=model, overlap={overlap}
    )

    def misbehave():
        {deed}

    def train():
        for step in range(10**9):
            if rank == 1 and step == 3 and not {after_backward}:
                return misbehave()
            opt.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            if rank == 1 and step == 3:
                return misbehave()
            opt.step()

    train()
    {afterwards}
"""

WAYS = {
    "Mean": {"method": "Mean()", "overlap": False},
    "Mean overlapping": {"method": "Mean()", "overlap": True},
    "LocalSGD": {"method": "LocalSGD(4)", "overlap": False},
}


def crash(tmp_path, way, deed, *python, after_backward=True, afterwards="", timeout_s="60"):
    program = PROGRAM.format(**WAYS[way], deed=deed, after_backward=after_backward, afterwards=afterwards)
    return run_ranks(3, program, tmp_path, *python, HPCTK_TIMEOUT_S=timeout_s)


@pytest.mark.parametrize("way", WAYS)
def test_raising_between_backward_and_step(tmp_path, way):
    ended = crash(tmp_path, way, "raise ValueError('of the user')", "-u")
    assert ended.code != 0
    assert ended.seconds < 20
    assert "ValueError: of the user" in ended.output
    assert "rank 1 of 3" in ended.output
    # Without mpi4py's runner nobody aborts the job: the others hear that rank 1 has left.
    assert "PeerError" in ended.output
    assert "will never come" in ended.output


def test_raising_under_mpi4py(tmp_path):
    ended = crash(tmp_path, "Mean", "raise ValueError('of the user')")
    assert ended.code != 0
    assert ended.seconds < 20
    assert "ValueError: of the user" in ended.output


@pytest.mark.parametrize("way", WAYS)
def test_killed(tmp_path, way):
    ended = crash(tmp_path, way, "os.kill(os.getpid(), signal.SIGKILL)", timeout_s="5")
    assert ended.code != 0
    assert ended.seconds < 25


@pytest.mark.parametrize("way", WAYS)
def test_out_of_data_without_join(tmp_path, way):
    """Rank 1 comes to the end of its program; the others are told at once, not at the deadline."""
    ended = crash(tmp_path, way, "return", after_backward=False)
    assert ended.code != 0
    assert ended.seconds < 20
    where = "a round" if way == "LocalSGD" else "a step"
    assert f"waits in opening {where}, but rank 1 has left the program" in ended.output


def test_out_of_data_and_stuck(tmp_path):
    ended = crash(
        tmp_path, "Mean", "return", after_backward=False, afterwards="time.sleep(1000)", timeout_s="4"
    )
    assert ended.code != 0
    assert ended.seconds < 25
    assert "waited 4 s in opening a step" in ended.output
    assert "rank 1 did not come" in ended.output


def test_out_of_data_and_on_to_the_evaluation(tmp_path):
    """Both sides wait, in different calls: the error names both."""
    ended = crash(
        tmp_path, "LocalSGD", "return", after_backward=False, afterwards="opt.consensus().__enter__()",
        timeout_s="4",
    )  # fmt: skip
    assert ended.code != 0
    assert ended.seconds < 25
    assert "in opening a round" in ended.output
    assert "rank 1 waits in MPI_Allreduce" in ended.output or "waits in opening a round" in ended.output


def test_an_exception_inside_join_is_not_held_up(tmp_path):
    """The rank that fails does not go idle; the others, in join(), hear that it has left."""
    program = """
    import torch, hpctk
    from hpctk.world import world
    rank = world().rank
    model = torch.nn.Linear(3, 1)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model)
    with opt.join():
        for step in range(4 if rank else 2):
            opt.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            if rank == 1 and step == 3:
                raise ValueError("of the user")
            opt.step()
    """
    ended = run_ranks(3, program, tmp_path, "-u", HPCTK_TIMEOUT_S="60")
    assert ended.code != 0
    assert ended.seconds < 20
    assert "ValueError: of the user" in ended.output
    assert "waits in opening a step, but rank 1" in ended.output
