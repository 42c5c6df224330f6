"""What a training is made of on one rank, as one tree, and how it is put back.

model      parameters and buffers, those that state_dict() leaves out too
optimizer  the base optimizer's state and groups
method     what this rank alone knows: residuals, snapshots, messages, momenta, counters
settings   of the method
stats      steps and bytes so far
schedule   what schedule="auto" was resolved to, with the calibration behind it
random     the global generators of torch, Python and numpy
extra      what the user added: epochs, schedulers, positions in the data
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from hpctk.collectives.tuning import auto
from hpctk.comm.world import World
from hpctk.errors import SettingError
from hpctk.methods.core import replay
from hpctk.methods.core.method import Method
from hpctk.methods.core.resharding import SavedRanks
from hpctk.ways_in.counters import Stats

T = TypeVar("T")
Tree = dict[str, Any]


class Trainer(Protocol):
    """What carries a method: DistributedOptimizer, hpctk.ddp.attach's result, hpctk.horovod.Compression.

    Of the last two `state_dict` is empty: there the optimizer is the user's, to be kept as an extra.
    """

    method: Method

    @property
    def world(self) -> World: ...

    @property
    def stats(self) -> Stats: ...

    def load_stats(self, stats: Stats) -> None: ...

    def close_stats(self) -> None: ...

    def begin(self) -> None:
        """Make sure that there is a state to load into. Collective over the communicator."""

    def together(self, attempt: Callable[[], T]) -> T: ...

    def check_between_steps(self, what: str) -> None: ...

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state_dict: Tree) -> None: ...

    def local_state_dict(self) -> Tree: ...

    def load_local_state_dict(self, state: Tree) -> None: ...

    def resized_local_state_dict(self, earlier: SavedRanks) -> Tree: ...


def capture(opt: Trainer, model: torch.nn.Module, extra: Mapping[str, Any]) -> Tree:
    """Return all that training goes on from; not copies. Local once the schedules are resolved."""
    return {
        "model": model_state(model),
        "optimizer": opt.state_dict(),
        "method": opt.local_state_dict(),
        "settings": settings(opt),
        "stats": {**vars(opt.stats), "counts": dict(opt.stats.counts)},
        "schedule": auto.resolved(opt.world),
        "random": replay.random_state(),
        "extra": {key: _plain(value) for key, value in extra.items()},
    }


def settings(opt: Trainer) -> Tree:
    """Return the method's settings as JSON gives them back."""
    text = json.dumps(opt.method.settings(), default=str)
    kept: Tree = json.loads(text)
    return kept


def model_state(model: torch.nn.Module) -> Tree:
    """Return a model's parameters and buffers; not copies."""
    state = dict(model.state_dict())
    left_out = {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set
    }
    return {"state": state, "left_out": left_out}


def _plain(value: Any) -> Any:
    """Return a scheduler, sampler or scaler as its state."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def put_back(opt: Trainer, model: torch.nn.Module, tree: Tree) -> None:
    """Let a rank go on from what it was, bit for bit."""
    opt.load_local_state_dict(tree["method"])
    # After the method, which may write parameters: what a user did to them since the last step counts.
    load_model(model, tree["model"])
    opt.load_state_dict(tree["optimizer"])
    opt.load_stats(Stats(**tree["stats"]))
    auto.resolve(opt.world, tree["schedule"])
    replay.restore_random_state(tree["random"])


def load_model(model: torch.nn.Module, state: Tree) -> None:
    """Overwrite a model's parameters and buffers, in place."""
    left_out = model_state(model)["left_out"]
    unknown = [name for name in state["left_out"] if name not in left_out]
    if unknown:
        raise SettingError(f"the model has no buffer {unknown[0]!r}, but the checkpoint has")
    model.load_state_dict(state["state"])
    for name, value in state["left_out"].items():
        path, _, key = name.rpartition(".")
        _load_buffer(model.get_submodule(path), key, value)


def _load_buffer(module: torch.nn.Module, key: str, value: torch.Tensor | None) -> None:
    """Overwrite a buffer that state_dict() leaves out: a cache may have another size by now, or be none."""
    buffer = module._buffers[key]
    if buffer is not None and value is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
        buffer.detach().copy_(value)
        return
    device = next((p.device for p in (buffer, *module.parameters()) if p is not None), None)
    module._buffers[key] = None if value is None else value.to(device, copy=True)


def copied(tree: Any) -> Any:
    """Return a tree whose tensors are copies, on the host."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(value) for value in tree)
    return tree


def check_alike(opt: Trainer, kept: Mapping[str, Any], *, strict: bool) -> None:
    """Raise SettingError where the checkpoint was made by another method, or, if `strict`, by other settings of it."""
    mine = settings(opt)
    differing = [key for key in {**kept, **mine} if kept.get(key) != mine.get(key)]
    key = "method" if "method" in differing else next(iter(differing), "")
    text = f"the checkpoint was made with {key}={kept.get(key)}, this optimizer has {key}={mine.get(key)}"
    if key == "method":
        raise SettingError(
            f"{text}, to which its state means nothing. Load it into an optimizer with {kept.get(key)}; to go on by "
            f"{mine.get(key)}, make one with that for the model once it is loaded."
        )
    if strict and differing:
        raise SettingError(f"{text}. Make it with the same, or load with strict=False if you mean to change it.")
