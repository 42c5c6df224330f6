"""The Python programs of README.md and of the guide run, on all ranks, from their first line to their last."""

import contextlib

import documents
import pytest
import torch

import hpctk

PROGRAMS = documents.programs(horovod=False)
#: Programs that need what not every machine has; tests/unit compiles them.
NEEDS_GPU = "torch.cuda.set_device"


@pytest.fixture
def working_folder(shared_folder, world, monkeypatch, request):
    """A folder of its own for each program, with the statistics that pages read."""
    folder = shared_folder / request.node.name.replace("/", "-").replace("[", "-").rstrip("]")
    world.run_on_root("making a folder", lambda: folder.mkdir())
    monkeypatch.chdir(folder)
    return folder


def trained(folder, name):
    """Make what the page calls `name`: an optimizer's three steps, recorded. Collective over COMM_WORLD."""
    model = torch.nn.Linear(4, 2)
    opt = hpctk.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), hpctk.Mean(), model=model, stats=name)
    for _ in range(3):
        opt.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        opt.step(loss=loss)
    opt.close_stats()


@pytest.mark.parametrize(("place", "program"), PROGRAMS, ids=[place for place, _ in PROGRAMS])
def test_a_program_runs(place, program, world, working_folder, process_group, capsys):
    if NEEDS_GPU in program:
        return
    torch.manual_seed(world.rank)
    if "runs/7/stats" in program or "merged.h5" in program:
        trained(working_folder, "runs/7/stats")
        world.barrier("statistics are written")
        if "merged.h5" in program:
            from hpctk.cli import main

            world.run_on_root("merging", lambda: main(["merge", "runs/7/stats", "--copy", "-o", "merged.h5"]))
    # A page that goes on from a checkpoint speaks of one that is there.
    if "load_checkpoint" in program and "save_checkpoint" not in program:
        names = documents.namespace("opt, model")
        opt = hpctk.DistributedOptimizer(names["opt"], hpctk.Mean(), model=names["model"])
        hpctk.save_checkpoint("run/checkpoints", opt, names["model"])
    with contextlib.ExitStack() as stack:
        if "init_process_group" in program:
            # The ranks have met already, and can only once.
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(torch.distributed, "init_process_group", lambda backend: None)
        names = documents.namespace(program)
        exec(compile(program, place, "exec"), names)
    world.barrier("the program is over")
