"""Device memory on a machine without a device: host memory that wears `__cuda_array_interface__`.

hpctk takes the same way through buffers.py with these as with real device tensors; only the
stream's synchronisation is recorded instead of done (there is no stream).
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from hpctk.comm import buffers


class FakeCudaTensor(torch.Tensor):
    """A CPU tensor that claims to lie on a device."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": tuple(self.shape), "typestr": "|u1", "data": (self.data_ptr(), False), "version": 3}


def fake_cuda(tensor: torch.Tensor) -> FakeCudaTensor:
    return tensor.as_subclass(FakeCudaTensor)


class FakeCupyArray:
    """A foreign device array: no torch, no numpy, only the protocols."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype

    @property
    def __cuda_array_interface__(self):
        return {**self.array.__array_interface__, "version": 3}

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@contextlib.contextmanager
def recorded_synchronisation(monkeypatch):
    """Yield the list that gets one entry for each synchronisation of a stream."""
    calls: list[int] = []
    monkeypatch.setattr(buffers, "synchronize", lambda tensor: calls.append(tensor.data_ptr()))
    yield calls
