"""Ranks of an MPI communicator: the only place that imports mpi4py, besides Horovod's process sets."""
