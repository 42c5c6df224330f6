"""Optimizers that not every torch has: without one, a test of it is skipped, with the reason."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch


def optimizer(name: str, parameters: Iterable[torch.Tensor], **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer of torch.optim; skip the test where this torch does not have it, or not fused on a CPU."""
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    # Asked of a parameter of its own: what a test's parameters are refused for is a failure.
    if settings.get("fused") and not _is_fused_on_cpus(name):
        pytest.skip(f"this torch has no fused {name} on CPUs")
    return getattr(torch.optim, name)(parameters, **settings)


def _is_fused_on_cpus(name: str) -> bool:
    weight = torch.zeros(1)
    weight.grad = torch.ones(1)
    try:
        # torch 2.3 finds out in the step that SGD's kernel is missing, with AdamW's when it is made.
        getattr(torch.optim, name)([weight], lr=0.1, fused=True).step()
    except NotImplementedError:
        return False
    except RuntimeError as error:
        if "supported devices" not in str(error):
            raise
        return False
    return True
