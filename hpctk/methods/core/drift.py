"""Replicas that have drifted apart: what all ranks should hold alike is compared now and then, by samples.

A learning rate that was changed on one rank only, or weights that only one rank has loaded, train wrongly in silence.
Every so many steps the message that opens a step carries a digest of the base optimizer's numbers (rates, momenta) and
of some elements of what the method says all ranks hold alike. Other elements are looked at each time, so that in the
end all have been.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from hpctk.settings import Setting

#: Tensors that one check looks at, and elements of each.
TENSORS, ELEMENTS = 64, 64


def check_every(every: object) -> None:
    """Raise SettingError unless `every` is a number of steps, or 0 for never."""
    Setting("steps between two looks; 0 for never", int, at_least=0).check("check_every", every)


def numbers(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, and tuples of numbers, of a group or of a parameter's state."""
    parts = {key: x if isinstance(x, tuple) else (x,) for key, x in items.items()}
    return {key: items[key] for key in items if all(isinstance(x, int | float) for x in parts[key])}


def items(
    groups: Sequence[Mapping[str, Any]], shared: Mapping[str, torch.Tensor], number: int
) -> list[tuple[str, object]]:
    """Return what is compared in check `number`: by name, the same on all ranks that hold the same."""
    found: list[tuple[str, object]] = []
    for g, group in enumerate(groups):
        found += [(f"{key} of group {g}", value) for key, value in sorted(_readable(group).items())]
    first = number * TENSORS % max(1, len(shared))
    looked_at = islice([*shared.items()] * 2, first, first + min(TENSORS, len(shared)))
    return found + [(f"a digest of {name!r}", _sampled(tensor, number)) for name, tensor in looked_at]


def _readable(group: Mapping[str, Any]) -> dict[str, Any]:
    scalars = {key: float(x) for key, x in group.items() if isinstance(x, torch.Tensor) and x.numel() == 1}
    return {**numbers(group), **scalars}


def _sampled(tensor: torch.Tensor, number: int) -> str:
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // ELEMENTS)
    sample = flat[number % stride :: stride][:ELEMENTS].cpu().contiguous()
    return hashlib.blake2b(sample.view(torch.uint8).numpy().data, digest_size=8).hexdigest()
