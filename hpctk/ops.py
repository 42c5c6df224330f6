"""The collective operations for direct use: hpctk.ops.allreduce(tensor), and so on."""

from __future__ import annotations

from hpctk.collectives.allgather import allgather as allgather
from hpctk.collectives.allgather import iallgather as iallgather
from hpctk.collectives.allreduce import allreduce as allreduce
from hpctk.collectives.allreduce import iallreduce as iallreduce
from hpctk.collectives.broadcast import broadcast as broadcast
from hpctk.collectives.broadcast import ibroadcast as ibroadcast
from hpctk.collectives.consensus import adacons_aggregate as adacons_aggregate
from hpctk.collectives.engine.consensus_weights import ConsensusState as ConsensusState
from hpctk.collectives.reduce_scatter import ireduce_scatter as ireduce_scatter
from hpctk.collectives.reduce_scatter import reduce_scatter as reduce_scatter
from hpctk.collectives.sparse_allreduce import sparse_allreduce as sparse_allreduce
from hpctk.collectives.weighted_mean import weighted_mean as weighted_mean
