"""Ten thousand steps of every method on two ranks: memory does not grow."""

import sys

import pytest
from jobs import mpirun, run

PROGRAM = """
import gc, sys
import torch, hpctk
from hpctk.comm.world import world

here = world()
STEPS, WARM = 10_000, 2_000
METHODS = {
    "AdaCons": lambda: hpctk.AdaCons(layerwise=True),
    "SASG": lambda: hpctk.SASG(density=0.1, max_delay=3, reduce="mean"),
    "SAEF": lambda: hpctk.SAEF(hpctk.TopK(0.1), average_every=50),
    "SAEF two-way": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    "MGRAWA": lambda: hpctk.MGRAWA(period=4),
    "LGRAWA": lambda: hpctk.LGRAWA(period=4),
    "MGRAWA asynchronous": lambda: hpctk.MGRAWA(period=4, asynchronous=True),
    "CELGC": lambda: hpctk.CELGC(clip=0.1, period=4),
    "Mean": hpctk.Mean,
    "Mean TopK": lambda: hpctk.Mean(hpctk.TopK(0.1)),
    "Mean QSGD": lambda: hpctk.Mean(hpctk.QSGD(4)),
    "Mean PowerSGD": lambda: hpctk.Mean(hpctk.PowerSGD(1)),
    "LocalSGD": lambda: hpctk.LocalSGD(period=4),
    "EASGD": hpctk.EASGD,
    "LSGD": hpctk.LSGD,
}

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

name = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
base = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5)
opt = hpctk.DistributedOptimizer(base, METHODS[name](), model=model)
x = torch.randn(8, 20, generator=torch.Generator().manual_seed(here.rank))

def closure():
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss

with opt.join():
    for step in range(STEPS):
        opt.step(closure)
        if step == WARM:
            gc.collect()
            before = resident()
    gc.collect()
    grown = resident() - before
print(f"rank {here.rank}: {name} grew by {grown} bytes in {STEPS - WARM} steps", flush=True)
assert grown < 2**20, f"{name}: memory grew by {grown} bytes"
"""

NAMES = [line.split('"')[1] for line in PROGRAM.splitlines() if line.startswith('    "')]


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow(tmp_path, name):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    ended = run(mpirun(2, sys.executable, "-m", "mpi4py", str(script), name), timeout_s=600)
    assert ended.code == 0, ended.output
    assert ended.output.count("grew by") == 2
    print(ended.output)
