"""How many modules a gradient passes: the way from step() to the wire and back is to stay one that can be read."""

import sys

import pytest
import torch

import hpctk

MOST = 25


@pytest.mark.mpi(min_size=2)
def test_a_step_of_saef_passes_few_modules():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = hpctk.DistributedOptimizer(base, hpctk.SAEF(hpctk.TopK(0.01)), model=model)
    passed = set()

    def note(frame, event, argument):
        passed.add(frame.f_globals.get("__name__", ""))

    # The first steps make room, and compile.
    for step in range(4):
        opt.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        if step == 3:
            earlier = sys.getprofile()
            sys.setprofile(note)
        try:
            opt.step()
        finally:
            if step == 3:
                sys.setprofile(earlier)
    ours = sorted(name for name in passed if name.partition(".")[0] == "hpctk")
    assert "hpctk.collectives.sparse_allreduce" in ours
    assert len(ours) <= MOST, ours
