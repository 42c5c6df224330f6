"""Tensors on a device: the tests of tests/devices, in processes in which torch knows the stand-in device."""

import sys

import shielded
from jobs import ROOT, mpirun, run


def test_on_a_device_of_which_the_host_sees_no_memory():
    # Once, not by every rank.
    shielded.library()
    words = ("-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider", "tests/devices")
    ended = run(mpirun(2, sys.executable, *words), timeout_s=380, cwd=ROOT)
    assert ended.code == 0, ended.output
    assert " passed" in ended.output
