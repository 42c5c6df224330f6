"""The global random numbers of this process: torch's on the host and on CUDA devices, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

State = dict[str, Any]


def current() -> State:
    """Return where all global generators are: tensors, numbers and tuples of them."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": devices,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def put_back(state: State) -> None:
    """Let all global generators go on from what `current` returned."""
    torch.set_rng_state(state["torch"])
    # There may be fewer devices now than there were.
    devices = state["cuda"][: torch.cuda.device_count()]
    if devices:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
