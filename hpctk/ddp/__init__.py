"""hpctk under torchrun: methods for DistributedDataParallel, and for bare models, over torch.distributed.

    model = DistributedDataParallel(model)
    hpctk.ddp.attach(model, hpctk.AdaCons())                                    # gradient methods

    opt = hpctk.ddp.DistributedOptimizer(opt, hpctk.MGRAWA(), model=model)      # all others, on the bare model

No MPI is needed or started.
"""

from __future__ import annotations

from hpctk.ddp.attachment import Attached as Attached
from hpctk.ddp.attachment import CommState as CommState
from hpctk.ddp.attachment import DistributedOptimizer as DistributedOptimizer
from hpctk.ddp.attachment import attach as attach
from hpctk.ddp.attachment import comm_hook as comm_hook

__all__ = ["Attached", "CommState", "DistributedOptimizer", "attach", "comm_hook"]
