"""The same engine and the same plans over torch.distributed: no MPI moves a byte of it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hpctk.comm.world
from hpctk.collectives.engine.elements import InPlace
from hpctk.collectives.engine.engine import Engine
from hpctk.schedules import build
from hpctk.schedules.core.registry import names


@pytest.fixture
def engine(world, mpi_tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{mpi_tmp_path}/store", rank=world.rank, world_size=world.size)
    yield Engine(hpctk.comm.world.world(dist.group.WORLD).transport())
    world.barrier("the end of a gloo test")
    dist.destroy_process_group()


def test_every_plan(world, engine):
    rows = np.stack([np.random.default_rng([9, rank]).standard_normal(50_001) for rank in range(world.size)])
    for name in names("allreduce", with_nodes=True):
        mine = rows[world.rank].copy()
        engine.run(build(name, "allreduce", world.size, nodes=world.nodes), InPlace(mine, 8, "float64"))
        np.testing.assert_allclose(mine, rows.sum(0), rtol=1e-12, atol=1e-13, err_msg=name)
    if world.size > 1:
        assert engine.counter.sent_bytes > 0


def test_the_same_bits_as_over_mpi(world, engine):
    rows = [np.random.default_rng([8, rank]).standard_normal(20_000).astype(np.float32) for rank in range(world.size)]
    for name in names("allreduce", with_nodes=True):
        mine = rows[world.rank].copy()
        engine.run(build(name, "allreduce", world.size, nodes=world.nodes), InPlace(mine, 4, "float32"))
        over_mpi = hpctk.allreduce(torch.from_numpy(rows[world.rank]), op="sum", schedule=name)
        assert mine.tobytes() == over_mpi.numpy().tobytes(), name
