"""Feeding a large tensor needs at most one more copy of it, and the packet."""

import json
import subprocess
import sys

import pytest
from jobs import clean_environment

#: In a process of its own: nobody else's memory, and a peak that can be reset.
PROGRAM = """
import ctypes, json, sys
import torch
from hpctk.compressors import by_name

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

n, generator = 10_000_000, torch.Generator().manual_seed(0)
tensor, residual = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
extra = {}
for text in sys.argv[1:]:
    compressor = by_name(text)
    # Once in small, and past the size at which ways part: what is imported and compiled does not count.
    for size in (1000, 300_000):
        compressor.feed(torch.ones(size), torch.zeros(size), "small")
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = status("VmRSS:")
    packet = compressor.feed(tensor, residual, "w")
    extra[text] = status("VmHWM:") - before - packet.nbytes
    del compressor, packet
print(json.dumps(extra))
"""


def test_feeding_takes_at_most_one_copy_more():
    texts = ["topk:0.01", "topk:0.1", "sign", "half", "randomk:0.01", "qsgd", "identity"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *texts], capture_output=True, text=True, env=clean_environment(), timeout=100
    )
    if "clear_refs" in done.stderr or "malloc_trim" in done.stderr:
        pytest.skip("this system does not let a process reset its peak of memory")
    assert done.returncode == 0, done.stderr
    copies = {text: nbytes / 40e6 for text, nbytes in json.loads(done.stdout).items()}
    assert len(copies) == len(texts)
    assert max(copies.values()) <= 1.2, copies
    # Identity's packet is a copy and its decoded form another: if nothing is seen, nothing is measured.
    assert copies["identity"] > 0.8, copies
