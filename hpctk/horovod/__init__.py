"""hpctk's methods under Horovod, which stays as it is: nothing of it is patched or overwritten.

    hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters(),
                             compression=hpctk.horovod.Compression(hpctk.AdaCons(), model))

`Compression` serves Horovod's own optimizer; `DistributedOptimizer` takes its place, for all methods. Horovod must
have been built with MPI: it and hpctk share one, on communicators of their own. See docs/horovod.md.
"""

from __future__ import annotations

from hpctk.horovod import mpi_owner

# Before the imports below, which bring mpi4py.
mpi_owner.warn_where_horovod_owns_mpi()

from hpctk.horovod.compression import Compression as Compression  # noqa: E402  see above
from hpctk.horovod.optimizer import DistributedOptimizer as DistributedOptimizer  # noqa: E402  see above

__all__ = ["Compression", "DistributedOptimizer"]
