"""What hpctk makes for a process group ends with that group, and before the interpreter does."""

import subprocess
import sys

PROGRAM = """
import atexit, gc, os, sys

@atexit.register
def last():
    # Registered first, so it is called when everyone else has left.
    print("threads:", len(os.listdir("/proc/self/task")))

import torch.distributed as dist
from hpctk.comm.torch import world as worlds

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] != "unused":
    worlds.world(dist.group.WORLD).barrier()
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
    gc.collect()
print("worlds:", len(worlds._worlds))
"""


def left(word):
    """Return how many worlds there are at the end of a program, and how many threads when all have left."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True)
    said = dict(line.split(": ") for line in ended.stdout.splitlines())
    return int(said["worlds"]), int(said["threads"])


def test_its_threads_are_gone_before_the_interpreter_is():
    """They free tensors, and want the GIL for it: a thread that asks for it too late takes the process down."""
    unused, kept, destroyed = (left(word) for word in ("unused", "kept", "destroyed"))
    assert (unused[0], kept[0], destroyed[0]) == (0, 1, 0)
    # Those of the user's own group are the user's.
    assert kept[1] == unused[1] > destroyed[1]
