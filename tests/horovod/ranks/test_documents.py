"""The programs of the documents that use Horovod run, on all ranks."""

import documents
import pytest
import torch

import hpctk

PROGRAMS = documents.programs(horovod=True)


@pytest.mark.parametrize(("place", "program"), PROGRAMS, ids=[place for place, _ in PROGRAMS])
def test_a_program_runs(place, program, hvd, world, shared_folder, monkeypatch):
    monkeypatch.chdir(shared_folder)
    # Horovod runs already, and is started only once.
    monkeypatch.setattr(hvd, "init", lambda: None)
    torch.manual_seed(world.rank)
    names = documents.namespace(program)
    if "compression =" not in program:
        hvd.broadcast_parameters(names["model"].state_dict(), root_rank=0)
        names["compression"] = hpctk.horovod.Compression(hpctk.Mean(), names["model"])
    exec(compile(program, place, "exec"), names)
    world.barrier("the program is over")
