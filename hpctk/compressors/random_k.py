"""Random-k: some elements, chosen by lot, the same ones on every rank.

Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599.

    C(z)_i = z_i for i in S, else 0;    S: k of n indices, drawn without replacement

What travels: k = max(1, floor(density * n)) values in the tensor's dtype, no indices: every rank draws
the same S from (seed, name of the parameter, number of calls so far), so packets are summed as they
are. The values are not multiplied by n/k. That would make C unbiased, but then what is sent and what
stays in the residual would no longer add up to z, and error feedback needs just that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctk.compressors.core import draws
from hpctk.compressors.core.compressor import Compressor, Shape, State, expect_length, kept_elements
from hpctk.compressors.core.packet import Packet
from hpctk.settings import documented, required, setting


@documented
@dataclass(eq=False, repr=False)
class RandomK(Compressor):
    """Send randomly chosen elements, the same on every rank.

    Ranks stay in step as long as they make the same calls for a parameter; a call that raises counts.
    """

    combines = "summed"
    shrinks = True

    density: float = field(metadata=required("part of the elements that is sent", above=0, at_most=1))
    seed: int = setting(0, "of the choice; the same on every rank", at_least=0, at_most=draws.MAX_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._draws = draws.Counters()
        self._last: dict[int, tuple[int, int, torch.Tensor]] = {}

    def indices(self, stamp: int, n: int) -> torch.Tensor:
        """Return the indices that packets with this stamp hold of n elements: ascending, on the host.

        The last ones of each name are kept: encoding, decoding and the residual all ask for them.
        """
        name = draws.name_of(stamp)
        last = self._last.get(name)
        if last is not None and last[:2] == (stamp, n):
            return last[2]
        stream = draws.stream(self.seed, stamp)
        chosen = torch.from_numpy(draws.subset(stream, kept_elements(self.density, n), n))
        self._last[name] = (stamp, n, chosen)
        return chosen

    def state_dict(self) -> State:
        """Return how often each parameter was compressed."""
        return self._draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor | int]]) -> None:
        """Go on from the given numbers of draws."""
        self._draws.load_state_dict(state)

    def _encode(self, flat: torch.Tensor, shape: Shape, name: str, stamp: int) -> torch.Tensor:
        return flat.index_select(0, self._chosen(flat, stamp))

    def _decode(self, packet: Packet) -> torch.Tensor:
        expect_length(packet, kept_elements(self.density, packet.n), packet.dtype, f"density {self.density}")
        out = packet.data.new_zeros(packet.n)
        out[self._chosen(out, packet.stamp)] = packet.data
        return out

    def _withdraw(self, memory: torch.Tensor, packet: Packet) -> None:
        memory[self._chosen(memory, packet.stamp)] = 0

    def _stamp(self, name: str) -> int:
        return self._draws.next_stamp(name)

    def _chosen(self, flat: torch.Tensor, stamp: int) -> Any:
        return self.indices(stamp, flat.numel()).to(flat.device)
