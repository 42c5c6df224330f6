"""Who decides whether MPI takes device memory, and in which order they are asked."""

import ctypes.util

import pytest

from hpctk.comm import gpu
from hpctk.errors import SettingError

#: A real library, to call real functions in: getpid() is not 0, sched_yield() is.
LIBC = ctypes.util.find_library("c")
YES, NO, NONE = "getpid", "sched_yield", "MPIX_Query_no_such_support"


class Info:
    def __init__(self, kinds):
        self.kinds, self.freed = kinds, False

    def Get(self, key):
        if isinstance(self.kinds, Exception):
            raise self.kinds
        return self.kinds if key == "mpi_memory_alloc_kinds" else None

    def Free(self):
        self.freed = True


class FakeMPI:
    """What `decide` needs of the module mpi4py.MPI."""

    __file__ = LIBC

    def __init__(self, kinds=None, initialized=True):
        self.initialized, self.info = initialized, Info(kinds)
        self.COMM_WORLD = self

    def Is_initialized(self):
        return self.initialized

    def Get_info(self):
        # As the real one does before MPI_Init: it ends the process.
        assert self.initialized, "asked for info before MPI was started"
        return self.info


CRAY = {"MPICH_GPU_SUPPORT_ENABLED": "1"}


@pytest.mark.parametrize(
    ("kinds", "functions", "environ", "aware", "because"),
    [
        # The user wins over everybody, both ways.
        ("system,cuda", [YES], CRAY | {"HPCTK_GPU_AWARE": "0"}, False, "HPCTK_GPU_AWARE=0"),
        ("system", [NO], {"HPCTK_GPU_AWARE": "1"}, True, "HPCTK_GPU_AWARE=1"),
        # Then MPI's own word, both ways.
        ("mpi,system,cuda:device", [NO], {}, True, "mpi_memory_alloc_kinds='mpi,system,cuda:device'"),
        ("mpi,system,rocm", [], {}, True, "rocm"),
        ("mpi,system", [YES], CRAY, False, "mpi_memory_alloc_kinds='mpi,system'"),
        # Then the query functions: one yes is enough.
        (None, [NONE, NO, YES], {}, True, "getpid() = 1"),
        ("", [YES], {}, True, "getpid() = 1"),
        # A no of theirs is not the last word: Cray's MPICH has its own switch.
        (None, [NO], CRAY, True, "MPICH_GPU_SUPPORT_ENABLED=1"),
        (None, [NONE], {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False, "nothing says"),
        (None, [], {"HPCTK_GPU_AWARE": ""}, False, "nothing says"),
    ],
)
def test_order_of_the_answers(monkeypatch, kinds, functions, environ, aware, because):
    monkeypatch.setattr(gpu, "QUERY_FUNCTIONS", functions)
    answer = gpu.decide(FakeMPI(kinds), environ)
    assert answer.aware is aware
    assert because in answer.because


def test_nothing_is_asked_of_an_mpi_that_has_not_started(monkeypatch):
    monkeypatch.setattr(gpu, "QUERY_FUNCTIONS", [NO])
    assert not gpu.decide(FakeMPI("cuda", initialized=False), {}).aware


def test_a_bad_setting_is_an_error():
    with pytest.raises(SettingError, match="HPCTK_GPU_AWARE='maybe'"):
        gpu.decide(FakeMPI("cuda"), {"HPCTK_GPU_AWARE": "maybe"})


@pytest.mark.parametrize("kinds", ["cuda", None, RuntimeError("no info")])
def test_info_is_freed(kinds):
    mpi = FakeMPI(kinds)
    if isinstance(kinds, Exception):
        with pytest.raises(RuntimeError):
            gpu.memory_kinds(mpi)
    else:
        gpu.memory_kinds(mpi)
    assert mpi.info.freed


@pytest.mark.parametrize(
    ("library", "name", "answer"),
    [(LIBC, YES, True), (LIBC, NO, False), (LIBC, NONE, None), ("no-such-library.so", YES, None)],
)
def test_query(library, name, answer):
    assert gpu.query(library, name) is answer
