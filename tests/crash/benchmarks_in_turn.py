"""A program for ranks: some benchmarks, one after the other in the same processes, which take long to start.

    mpirun -n 2 python -m mpi4py benchmarks_in_turn.py '{"step": ["benchmarks/step.py", "--repeats", "1"], ...}'

What a benchmark prints follows a line "== NAME".
"""

import json
import runpy
import sys

import torch.distributed as dist

from hpctk.comm.world import world

here = world()
sys.path.insert(0, "benchmarks")
for name, words in json.loads(sys.argv[1]).items():
    here.barrier("the next benchmark")
    if here.rank == 0:
        print(f"== {name}", flush=True)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    sys.stdout.flush()
    if dist.is_initialized():
        here.barrier("leaving gloo")
        dist.destroy_process_group()
