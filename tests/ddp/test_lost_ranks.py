"""Ranks of torch.distributed that nobody looks after: one fails, the other ends soon and says who and where."""

import pytest
from jobs import run_without_launcher

PROGRAM = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import hpctk

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    if {attach}:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)
        hpctk.ddp.attach(wrapped, hpctk.Mean())
    else:
        wrapped = model
        opt = hpctk.ddp.DistributedOptimizer(opt, hpctk.SAEF(hpctk.TopK(0.1)), model=model)

    def misbehave():
        {deed}

    for step in range(10):
        if step == 3 and dist.get_rank() == {culprit}:
            misbehave()
        opt.zero_grad()
        wrapped(torch.randn(8, 300)).square().mean().backward()
        opt.step()
"""


def crash(tmp_path, *, attach, deed, culprit, timeout_s):
    program = PROGRAM.format(attach=attach, deed=deed, culprit=culprit)
    return run_without_launcher(2, program, tmp_path, 1 - culprit, timeout_s=90, HPCTK_TIMEOUT_S=timeout_s)


@pytest.mark.parametrize(
    ("attach", "culprit"), [(True, 1), (False, 0)], ids=["attached", "optimizer, the rank with the store"]
)
def test_killed(tmp_path, attach, culprit):
    # The deadline is far beyond what the job is given.
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    ended = crash(tmp_path, attach=attach, deed=kill, culprit=culprit, timeout_s="600")
    assert ended.code not in (0, None)
    assert f"rank {1 - culprit} of 2" in ended.output
    assert f"rank {culprit} has ended and will never come" in ended.output


def test_never_arriving(tmp_path):
    ended = crash(tmp_path, attach=True, deed="time.sleep(1000)", culprit=1, timeout_s="4")
    assert ended.code not in (0, None)
    assert "rank 0 of 2 waited 4 s in" in ended.output
    assert "rank 1 did not come" in ended.output
    assert "rank 1 (pid" in ended.output
    assert "in misbehave" in ended.output


def test_never_starting_to_use_hpctk(tmp_path):
    ended = run_without_launcher(
        2,
        """
        import time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(1000)
        from hpctk.comm.world import world
        world(dist.group.WORLD)
        """,
        tmp_path,
        0,
        HPCTK_TIMEOUT_S="3",
    )
    assert ended.code not in (0, None)
    assert "rank 0 of 2 waited for all ranks to start using hpctk" in ended.output
    assert "HPCTK_TIMEOUT_S" in ended.output
