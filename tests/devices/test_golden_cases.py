"""Every method comes to the same on a device as on the host, by every way in.

The same bits as are recorded of the host; or, where sums over a whole tensor decide (norms, the size of signs), the
same up to a rounding: those are torch's on a device, in an order of its own.
"""

import numpy as np
import pytest
import torch
from golden import digests, problem
from golden.cases import COMPRESSORS, MODEL_METHODS, UPDATE_METHODS, pairs
from golden.ways import train

#: One case of each method and compressor; all others where there is time.
QUICK = {
    *(f"Mean {name}" for name in COMPRESSORS), *(f"SAEF {name}" for name in COMPRESSORS), *MODEL_METHODS,
    *UPDATE_METHODS, "Mean", "Mean unit norm", "Mean clip", "Mean overlapping", "AdaCons layerwise", "SASG mean",
    "AdaCons overlapping", "SAEF TopK not ahead", "SAEF TopK both ways", "SAEF TopK, resumed", "Mean large",
    "Mean TopK, resumed", "SASG, resumed", "MGRAWA probing", "Mean, skipping", "Mean, some unused",
}  # fmt: skip
#: By torch.distributed: what is above it is the same. DDP wants a group that serves the device: test_device_group.py.
QUICK_OVER_TORCH = {"Mean", "Mean TopK", "Mean Sign", "AdaCons", "SAEF TopK", "SASG", "LocalSGD", "Mean overlapping"}


def cases(quick, *ways):
    return [
        pytest.param(*each, id=name, marks=[] if each[1].name in quick else pytest.mark.full)
        for name, each in pairs(*ways).items()
    ]


def on_the_host(way, case, folder):
    device, problem.device = problem.device, torch.device("cpu")
    try:
        return train(way, case, folder)
    finally:
        problem.device = device


def assert_as_on_the_host(way, case, folder, comm):
    seen = train(way, case, folder / "device")
    try:
        digests.check(way, case, seen, comm)
    except AssertionError:
        host = on_the_host(way, case, folder / "host")
        eps = torch.finfo(getattr(torch, case.dtype)).eps
        np.testing.assert_allclose(seen.final, host.final, rtol=0, atol=64 * eps)
        assert seen.digests["counts"].digest() == host.digests["counts"].digest()


@pytest.mark.parametrize(("way", "case"), cases(QUICK, "mpi"))
def test_over_mpi(comm, shared_folder, way, case):
    assert_as_on_the_host(way, case, shared_folder / f"{way} {case.name}", comm)


@pytest.mark.parametrize(("way", "case"), cases(QUICK_OVER_TORCH, "torch"))
def test_over_torch(comm, process_group, shared_folder, way, case):
    assert_as_on_the_host(way, case, shared_folder / f"{way} {case.name}", comm)


def test_nothing_quick_is_misspelt():
    assert {case.name for _, case in pairs("mpi").values()} >= QUICK | QUICK_OVER_TORCH
