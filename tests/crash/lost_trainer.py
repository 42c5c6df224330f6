"""A program for ranks: train digits while ranks are lost, one of them in a save; write down who trained on what.

With a second argument: the job that is queued next, with all ranks, goes on from what was saved.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from faults import Faults

from hpctk.checkpoint import load_checkpoint
from hpctk.comm.world import world
from hpctk.tasks import task_class
from hpctk.tasks.core.recipes import recipes
from hpctk.tasks.core.settings import DigitsSettings
from hpctk.tasks.core.train import Job

target = Path(sys.argv[1])
here = world()
name = here.rank
settings = DigitsSettings(
    method="saef", epochs=2, batch=16, checkpoint_steps=5, on_lost_rank="shrink", time_budget_s=1e6
)
kind = task_class("digits")
task = kind(settings)
task.load()
(recipe,) = recipes(settings, kind.recipes)

if len(sys.argv) > 2:
    again = Job(here, task, recipe)
    load_checkpoint(target / "kept", again.optimizer, again.model)
    steps = again.optimizer.stats.steps
    for parameter in again.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    again.optimizer.step()
    with again.optimizer.averaged_model():
        held = [parameter.detach().numpy() for parameter in again.model.parameters()]
        here.agree("the model", [("sum", [float(x.sum()) for x in held])])
    assert all(np.isfinite(x).all() for x in held)
    print(f"rank {here.rank} of {here.size} goes on from step {steps}", flush=True)
    sys.exit()

job = Job(here, task, recipe, target / "kept", target / "stats")
faults = Faults().kill(rank=2, step=5, during="save").kill(rank=0, step=12, during="exchange")
faults.watch(name)
faults.begin(0)

dealt: list[tuple[int, list[int]]] = []
pick = task.pick


def noted(indices):
    """Write down which samples of which epoch this rank trains on."""
    dealt.append((job._position.epoch, indices.tolist()))
    return pick(indices)


task.pick = noted
result = job.run(lambda report: faults.begin(job.optimizer.stats.steps))
job.close()

again = Job(here, task, recipe)
load_checkpoint(target / "kept", again.optimizer, again.model)
written = {
    "dealt": dealt, "samples": task.samples, "sha256": result.parameters_sha256, "size": here.size,
    "loaded_step": again.optimizer.stats.steps,
}  # fmt: skip
(target / f"dealt-{name}.json").write_text(json.dumps(written))
