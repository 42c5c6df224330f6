"""What compression left behind: one residual for each parameter, in the units of what travels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpctk.compressors.core import arrays
from hpctk.compressors.core.compressor import Compressor
from hpctk.compressors.core.packet import Packet
from hpctk.errors import TensorError


class Residuals:
    """A store of residuals, by parameter name."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the residual of a parameter, to be changed in place: contiguous zeros at first.

        Moves to the device of `like` where it is on another, as after loading a checkpoint. Raise TensorError if shape
        or dtype are no longer those of `like`.
        """
        kept = self._kept.get(name)
        if kept is None:
            kept = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if kept.shape != like.shape or kept.dtype != like.dtype:
            raise TensorError(
                f"parameter {name!r} is {_described(like)}, but its residual {_described(kept)}: "
                "a residual does not outlive a change of the model"
            )
        self._kept[name] = kept.to(like.device)
        return self._kept[name]

    def feed(self, compressor: Compressor, name: str, tensor: torch.Tensor) -> Packet:
        """Return `compressor.feed` of a tensor and its residual, which is changed in place."""
        return compressor.feed(tensor, self.of(name, tensor), name)

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def names(self) -> list[str]:
        """Return the names of all parameters that have a residual, in the order they came."""
        return list(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(kept.numel() * kept.element_size() for kept in self._kept.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals by name: themselves, not copies."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace all residuals by copies of the given ones."""
        for name, tensor in state.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in arrays.DTYPES:
                kind = _described(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise TensorError(f"the residual of {name!r} is {kind}: need a tensor of floating point numbers")
        self._kept = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
        }


def _described(tensor: torch.Tensor) -> str:
    return f"{arrays.dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
