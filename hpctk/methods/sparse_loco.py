"""SparseLoCo: DiLoCo whose outer momentum is a decaying error feedback, and which sends two bits of few elements.

Sarfi, Therien, Lidin, Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. After
`period` local steps of any base optimizer, x being the same on all ranks and e_i rank i's residual:

    delta_i = x - x_i;  p = decay*e_i + delta_i;  c_i = ChunkTopK(p);  e_i = p - c_i
    delta = sum_i c_i / how many ranks sent the element (reduce="contributors"), or / all ranks ("mean")
    x <- x - outer_lr*delta;  x_i <- x

The same as DiLoCo(period, outer_lr, outer_momentum=0, nesterov=False, compressor=ChunkTopK(k, chunk, bits, codebook),
feedback=decay, reduce=reduce), which also takes `min_elements` of the compressor, to send small tensors as they are. At
1.6 % density few elements coincide: "contributors" moves up to N times as far as "mean", and wants another outer_lr.

What travels: at most 112 bytes for 4096 float32, and the codebook, once in `period` steps; of every rank to every rank.
The model to evaluate is x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hpctk.compressors import ChunkTopK
from hpctk.methods.core.method import LocalStepMethod
from hpctk.methods.core.replica import Replica
from hpctk.methods.diloco import REDUCE, DiLoCo, DilocoRun
from hpctk.settings import documented, setting


@documented
@dataclass(frozen=True)
class SparseLoCo(LocalStepMethod):
    """Exchange the largest elements of what local steps have come to, on two bits each."""

    kind: ClassVar[str] = "model"
    summary: ClassVar[str] = "what period local steps came to, as a chunked top-k on two bits"

    period: int = setting(30, "local steps between rounds", at_least=1)
    k: int = setting(64, "elements of a chunk that are sent", at_least=1)
    chunk: int = setting(4096, "consecutive elements of which the largest are sent", at_least=1)
    bits: int | None = setting(2, "of each value that is sent; its own without", at_least=1, at_most=8)
    codebook: str = setting("sigma", "how values are cut into cells", choices=("sigma", "signed"))
    decay: float = setting(0.95, "what is kept of a residual from round to round", at_least=0, at_most=1)
    outer_lr: float = setting(1.0, "how much of the displacement is applied", above=0)
    reduce: str = setting("contributors", **REDUCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.as_diloco()

    def as_diloco(self) -> DiLoCo:
        """Return DiLoCo with the same settings."""
        compressor = ChunkTopK(self.k, self.chunk, self.bits, self.codebook)
        return DiLoCo(
            self.period, self.outer_lr, 0.0, False, compressor=compressor, feedback=self.decay, reduce=self.reduce
        )

    def begin(self, replica: Replica, base: torch.optim.Optimizer) -> DilocoRun:
        """Return SparseLoCo at work on a replica."""
        return self.as_diloco().begin(replica, base)
