"""hpctk for FSDP2: what sharded replicas exchange, by a method instead of a dense all-reduce.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    hpctk.fsdp.attach(model, hpctk.Mean(hpctk.TopK(0.01)), mesh)

Inside a shard group FSDP scatters and gathers as ever, over the fast network. Between replicas each rank exchanges what
the reduce-scatter has left it with, one flat row for each module that was given to fully_shard, by FSDP2's all-reduce
hook. Shard over mesh["shard"] alone: over the whole mesh FSDP averages between replicas in full, before any hook.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from hpctk import torch_private
from hpctk.collectives.engine.engine import counted
from hpctk.collectives.tuning import auto
from hpctk.comm.world import World, world
from hpctk.errors import SettingError
from hpctk.methods.core.method import Method
from hpctk.methods.core.replica import Replica
from hpctk.methods.ef21 import EF21
from hpctk.methods.mean import Mean
from hpctk.telemetry.recorder import Counter as Calls
from hpctk.ways_in import handshake
from hpctk.ways_in.counters import Stats
from hpctk.ways_in.gradient_exchange import exchange_gradients

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:
    raise SettingError(f"hpctk.fsdp needs FSDP2 (fully_shard), which torch {torch.__version__} does not have") from None


def attach(
    model: torch.nn.Module,
    method: Method,
    mesh: DeviceMesh,
    *,
    replicate: str = "replicate",
    schedule: str = "auto",
    grad_scaler: torch.amp.GradScaler | None = None,
) -> Attached:
    """Let a method exchange gradients between the replicas of a model that FSDP2 has sharded.

    Collective over the mesh. Once for each model, after fully_shard and before its first backward.

    Parameters
    ----------
    model : torch.nn.Module
        To which fully_shard was applied over one dimension of the mesh, not over both.
    method : Mean or EF21
        With any compressor but PowerSGD. Others need norms or matrices of whole gradients, and a rank has its shards.
    mesh : DeviceMesh
        Of two dimensions.
    replicate : str
        The dimension along which replicas lie.
    schedule : str
        Of dense all-reduces: a name that `hpctk schedule list` shows, "torch" or "auto".
    grad_scaler : torch.amp.GradScaler, optional
        The one that scales the loss, ShardedGradScaler or not: what travels, and what residuals hold, is then
        unscaled. Without it residuals stay in the scale that they were made in.
    """
    _check_mesh(mesh, replicate)
    here = world(mesh.get_group(replicate))
    with here.shared_errors("hpctk.fsdp.attach"):
        checked = _check_method(method)
        groups = dict(_sharded(model))
        _check_model(groups)
        auto.check(here, "allreduce", schedule)
    settings: list[tuple[str, object]] = [("schedule", schedule), ("grad_scaler", grad_scaler is not None)]
    settings += method.settings().items()
    here.agree("hpctk.fsdp.attach", [*settings, *((f"module {name!r}", "sharded") for name in groups)])
    return Attached(here, groups, checked, schedule, grad_scaler)


class Attached:
    """A method at work between the replicas of a sharded model. Made by `attach`."""

    def __init__(
        self,
        here: World,
        groups: Mapping[str, Any],
        method: Mean | EF21,
        schedule: str,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.method, self.world = method, here
        self._schedule, self._grad_scaler = schedule, grad_scaler
        #: By module: what exchanges its row, made when its size is known.
        self._rows: dict[str, _Row] = {}
        self._early: dict[str, Any] = {}
        self._calls = Calls()
        for name, module in groups.items():
            module.set_all_reduce_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda row: self._exchange(name, row)

    @torch.no_grad()
    def _exchange(self, name: str, gradient: torch.Tensor) -> None:
        """Replace a module's row by what comes of all replicas'. Collective over the replicas. In place."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = _Row(name, gradient, self.world, self.method, self._schedule)
            if name in self._early:
                row.run.load_local_state(self._early.pop(name))
        scale = 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())
        with counted(self.world, self._calls):
            row.exchange(gradient, scale)

    @property
    def stats(self) -> Stats:
        """What was done on this rank so far, between replicas; `steps` are backwards."""
        counts: Counter[str] = Counter()
        for row in self._rows.values():
            counts.update(row.run.counts)
        steps = max((row.steps for row in self._rows.values()), default=0)
        c = self._calls
        return Stats(steps, c.sent_bytes, c.received_bytes, c.messages, c.seconds, c.uncounted_calls, counts)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank alone knows, residuals above all, by module; not copies. Each rank has its own."""
        return {**self._early, **{name: row.run.local_state() for name, row in self._rows.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank, of the same model on the same mesh."""
        self._early = {}
        for name, state in state_dict.items():
            if name in self._rows:
                self._rows[name].run.load_local_state(state)
            else:
                # Its size is known with its first gradient.
                self._early[name] = state


class _Row:
    """One module's shards on this rank, as one flat row, and the method that exchanges it."""

    def __init__(self, name: str, like: torch.Tensor, here: World, method: Mean | EF21, schedule: str) -> None:
        # Nobody asks for its values: one element in memory stands for all.
        stand_in = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device).expand(like.shape))
        replica = Replica(here, [name], [stand_in], None, {}, schedule, "skip", 0)
        self.run, self.steps = method.begin(replica), 0

    def exchange(self, gradient: torch.Tensor, scale: float) -> None:
        status, made = exchange_gradients(self.run, lambda: [gradient], scale=scale)
        for result in made.values():
            gradient.copy_(result)
        if status.bad is not None:
            self.run.skip_or_raise(status)
            # On all replicas alike, as a dense sum would: whoever looks at norms or uses a GradScaler finds it.
            gradient.fill_(torch.inf)
        self.steps += 1


def _sharded(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name or type(model).__name__, module


def _check_mesh(mesh: Any, replicate: str) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or not mesh.mesh_dim_names:
        raise SettingError(
            f"mesh={mesh!r}: need a DeviceMesh of two named dimensions, such as "
            "init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))"
        )
    if replicate not in mesh.mesh_dim_names:
        raise SettingError(f"replicate={replicate!r}: the mesh has {', '.join(mesh.mesh_dim_names)}")


def _check_method(method: Any) -> Mean | EF21:
    handshake.check_method(method, "skip")
    name = type(method).__name__
    if not isinstance(method, Mean | EF21):
        raise SettingError(
            f"attach: {name} needs whole gradients, models or the optimizer, and a rank has its shards of them, one "
            "module's at a time, before the gradients of the others are there: only Mean and EF21 work between sharded "
            "replicas, which go element by element"
        )
    if isinstance(method, Mean) and (method.clip is not None or method.unit_norm):
        given = "unit_norm=True" if method.unit_norm else f"clip={method.clip}"
        raise SettingError(
            f"attach: Mean({given}) needs the norm of the whole gradient, and a rank has its shards: call "
            "torch.nn.utils.clip_grad_norm_ after backward"
        )
    if method.compressor is not None and method.compressor.combines == "own":
        raise SettingError(
            f"attach: {method.compressor!r} compresses matrices, and shards travel as flat rows: use TopK, RandomK, "
            "Sign, QSGD or Half"
        )
    return method


def _check_model(groups: Mapping[str, Any]) -> None:
    if not groups:
        raise SettingError("attach: no module of this model went through torch.distributed.fsdp.fully_shard")
    for name, module in groups.items():
        for dimensions, hook in torch_private.fsdp_groups(module):
            if dimensions != 1:
                raise SettingError(
                    f"attach: {name} is sharded over a mesh of two dimensions, between whose replicas FSDP averages in "
                    "full before any hook: give fully_shard one dimension, mesh=mesh['shard']"
                )
            if hook is not None:
                raise SettingError(f"attach: {name} has an all-reduce hook already")
        for key, parameter in module.named_parameters():
            if parameter.requires_grad:
                # One by one: rows of different modules do not mix.
                handshake.check_dtypes({key: parameter})
