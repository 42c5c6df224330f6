"""Worlds made while Horovod's thread is in MPI."""

import hpctk.comm.world


def test_made_beside_horovods_thread(comm, hvd):
    for _ in range(100):
        copy = comm.Dup()
        made = hpctk.comm.world.world(copy)
        made.barrier()
        copy.Free()
