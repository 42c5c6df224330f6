"""hpctk's methods under Horovod, which stays as it is: nothing of it is patched or overwritten.

    hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(),
                             compression=hpctk.horovod.Compression(hpctk.AdaCons(), model))

`Compression` serves Horovod's own optimizer; `DistributedOptimizer` takes its place, for all methods. Horovod must
have been built with MPI: it and hpctk share one, on communicators of their own. See docs/horovod.md.
"""

from __future__ import annotations

from hpctk.horovod.compression import Compression as Compression
from hpctk.horovod.optimizer import DistributedOptimizer as DistributedOptimizer

__all__ = ["Compression", "DistributedOptimizer"]
