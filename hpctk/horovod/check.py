"""What a Compression can be made from and attached to."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hpctk.collectives.tuning import auto
from hpctk.comm.world import World
from hpctk.errors import MismatchError, SettingError
from hpctk.methods.core.method import Method
from hpctk.methods.core.replica import Replica
from hpctk.methods.grawa import Grawa
from hpctk.methods.lsgd import LSGD
from hpctk.methods.mean import Mean
from hpctk.methods.sasg import SASG
from hpctk.ways_in import handshake

INSTEAD = "use hpctk.horovod.DistributedOptimizer(optimizer, method, model=model)"


def needs_attach(method: Method) -> bool:
    """Return whether a method does more than exchange gradients."""
    return method.kind != "gradient" or (isinstance(method, Mean) and method.clip is not None)


def check_method(method: Any, model: Any, schedule: str, on_bad_gradient: str, here: World) -> None:
    """Raise SettingError for what no Compression can be made from."""
    if not isinstance(method, Method):
        raise SettingError(f"method={method!r}: need a method or a compressor, such as hpctk.TopK(0.01)")
    if not isinstance(model, torch.nn.Module):
        raise SettingError(f"model={model!r}: need the torch.nn.Module whose parameters are optimized")
    if on_bad_gradient not in handshake.ON_BAD_GRADIENT:
        allowed = ", ".join(handshake.ON_BAD_GRADIENT)
        raise SettingError(f"on_bad_gradient={on_bad_gradient!r}: allowed are {allowed}")
    auto.check(here, "allreduce", schedule)
    name = type(method).__name__
    if isinstance(method, SASG):
        raise SettingError(
            f"{name} takes a second gradient in step(closure), which Horovod's optimizer cannot give: {INSTEAD}"
        )
    if isinstance(method, LSGD):
        raise SettingError(
            f"{name} asks for the loss of every step, which Horovod's optimizer does not tell: {INSTEAD}"
        )
    if isinstance(method, Grawa) and method.asynchronous:
        raise SettingError(f"{name}(asynchronous=True): Horovod's optimizer lets ranks wait in every step: {INSTEAD}")


def check_attached(hvd: Any, optimizer: Any, compression: object, process_set: Any) -> None:
    """Raise SettingError unless Horovod made the optimizer, with this compression, for these ranks."""
    if getattr(optimizer, "_compression", None) is not compression:
        raise SettingError(
            f"attach({type(optimizer).__name__}): give what hvd.DistributedOptimizer(..., compression=this) returned"
        )
    if getattr(optimizer, "op", hvd.Adasum) == hvd.Adasum:
        raise SettingError("op=Adasum: Horovod combines updates by a rule of its own there; use hvd.Average")
    theirs = getattr(optimizer, "process_set", hvd.global_process_set)
    if theirs.process_set_id != process_set.process_set_id:
        raise SettingError(
            f"the optimizer works on {theirs} and Compression on {process_set}: give both the same process_set"
        )


def check_same_parameters(replica: Replica) -> None:
    """Raise MismatchError unless all ranks hold the same model. Collective over the communicator."""
    rows = zip(replica.names, replica.copies(), strict=True)
    digests = [(name, hashlib.blake2b(copy.cpu().numpy().data, digest_size=8).hexdigest()) for name, copy in rows]
    try:
        replica.world.agree("parameters before the first step, as hashes", digests)
    except MismatchError as error:
        raise MismatchError(
            f"{error} Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step."
        ) from None
