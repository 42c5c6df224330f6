"""A process forked off a rank comes to its end: the ranks train on as if nothing had happened."""

import textwrap

import pytest
from jobs import run, run_ranks, torchrun

import hpctk

#: Rank 0 forks off one child after another while both ranks train; `finish` says how they all end.
PROGRAM = """
    import os, sys, torch, hpctk
    import torch.distributed as dist

    def start():
        {start}

    start()
    model = torch.nn.Linear(4, 2)
    opt = {optimizer}(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model, stats={stats!r})

    def step():
        opt.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        opt.step()

    def finish(deed):
        print("flushed by a child")
        if deed == "raises":
            raise ValueError("the child's own")
        if deed != "returns":
            sys.exit(deed)

    rank = hpctk.comm.world.world({comm}).rank
    for deed in (0, 3, None, "a reason", "raises", "returns"):
        step()
        child = os.fork() if rank == 0 else None
        if child == 0:
            finish(deed)
            break
        step()
        if child:
            print("child:", deed, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        step()
        # In one piece: both ranks write to one pipe.
        os.write(1, b"trained: %d\\n" % opt.stats.steps)
"""

MPI_JOB = {"start": "pass", "optimizer": "hpctk.DistributedOptimizer", "comm": ""}
GLOO_JOB = {
    "start": "dist.init_process_group('gloo')",
    "optimizer": "hpctk.ddp.DistributedOptimizer",
    "comm": "dist.group.WORLD",
}
STATUSES = ["0 0", "3 3", "None 0", "a reason 1", "raises 1", "returns 0"]


def check(output):
    assert [x.removeprefix("child: ") for x in output.splitlines() if x.startswith("child:")] == STATUSES
    assert output.count("trained: 13") == 2
    assert output.count("flushed by a child") == len(STATUSES)
    assert "forked off rank 0 of 2" in output


@pytest.mark.parametrize(
    "python",
    [
        ("-m", "mpi4py"),
        pytest.param(("-m", "hpctk", "run"), marks=pytest.mark.full),
        pytest.param(("-u",), marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_children_of_an_mpi_rank_end(tmp_path, python):
    program = PROGRAM.format(**MPI_JOB, stats=str(tmp_path / "run"))
    ended = run_ranks(2, program, tmp_path, *python, timeout_s=120, HPCTK_TIMEOUT_S="40")
    assert ended.code == 0, ended.output
    check(ended.output)
    ranks = hpctk.stats.load(tmp_path / "run").recordings[0].ranks.values()
    assert [rank.attributes["state"] for rank in ranks] == ["closed", "closed"]
    assert [len(rank.table("steps")["step"]) for rank in ranks] == [13, 13]


def test_children_of_a_rank_without_mpi_end(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM.format(**GLOO_JOB, stats=None)))
    ended = run(torchrun(2, str(script)), timeout_s=120, HPCTK_TIMEOUT_S="40")
    assert ended.code == 0, ended.output
    check(ended.output)
