"""Ranks that do not share a step, where going on is impossible: a named error on all ranks, no signal, no waiting."""

import pytest
from jobs import run_ranks

#: Rank 0 makes one step more than the others.
MISSING = """
    import sys
    import torch
    import hpctk
    from hpctk.comm.world import world
    here = world()
    model = torch.nn.Linear(300, 20)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = hpctk.DistributedOptimizer(base, hpctk.{method}, model=model)
    for _ in range(3 + (here.rank == 0)):
        opt.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        opt.step()
    with opt.averaged_model():
        here.barrier("comparing accuracies")
"""

#: Two models of the same shapes, stepped in opposite orders while buckets are under way.
OVERLAPPED = """
    import torch
    import hpctk
    from hpctk.comm.world import world
    here = world()
    pair = []
    for _ in range(2):
        model = torch.nn.Linear(300, 20)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        pair.append((model, hpctk.DistributedOptimizer(base, hpctk.AdaCons(), model=model, overlap=True)))
    for model, opt in pair if here.rank == 0 else pair[::-1]:
        model(torch.ones(2, 300)).sum().backward()
        opt.step()
"""


@pytest.mark.parametrize(("method", "ranks"), [("SAEF(hpctk.TopK(0.3))", 2), ("MGRAWA(period=1)", 3)])
def test_a_missing_step(tmp_path, method, ranks):
    ended = run_ranks(ranks, MISSING.format(method=method), tmp_path, HPCTK_TIMEOUT_S="15")
    assert ended.code != 0
    assert "Signal" not in ended.output
    assert "MismatchError" in ended.output
    kind = "round" if "period" in method else "step"
    assert f"rank 0 is in opening a {kind}, rank 1 in" in ended.output


def test_buckets_of_two_models_in_different_orders(tmp_path):
    ended = run_ranks(2, OVERLAPPED, tmp_path, HPCTK_TIMEOUT_S="15")
    assert ended.code != 0
    assert "Signal" not in ended.output
    assert "the optimizer is number 1 on rank 0 and number 2 on rank 1" in ended.output
