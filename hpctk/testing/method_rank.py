"""One rank of `check_method`: python -m hpctk.testing.method_rank JOB, with RANK and WORLD_SIZE set."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpctk import ddp
from hpctk.checkpoint import load_checkpoint, save_checkpoint
from hpctk.comm.world import world
from hpctk.errors import HpctkError
from hpctk.methods import by_name, names
from hpctk.methods.core.method import GradientMethod, Method
from hpctk.settings import settings_of


class Net(torch.nn.Module):
    """A small network; `extra` is used on rank 0 alone where that is asked for, `unused` never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 12), torch.nn.Linear(12, 3)
        self.extra, self.unused = torch.nn.Linear(6, 3), torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, *, extra: bool) -> torch.Tensor:
        """Return the outputs."""
        y: torch.Tensor = self.last(self.first(x).tanh())
        return y + self.extra(x) if extra else y


class Checks:
    """The checks, on this rank. All ranks do the same ones in the same order.

    Parameters
    ----------
    make : callable
        Returns a new method.
    steps : int
    lr, momentum : float
        Of SGD.
    folder : Path
        For checkpoints.
    """

    def __init__(self, make: Callable[[], Method], steps: int, lr: float, momentum: float, folder: Path) -> None:
        self.make, self.steps, self.lr, self.momentum, self.folder = make, steps, lr, momentum, folder
        assert dist.group.WORLD is not None
        self.world = world(dist.group.WORLD)

    def job(self, **settings: Any) -> tuple[Net, ddp.DistributedOptimizer]:
        """Return a new model and the optimizer that trains it."""
        torch.manual_seed(7)
        model = Net()
        base = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        return model, ddp.DistributedOptimizer(base, self.make(), model=model, check_every=5, **settings)

    def step(
        self, model: Net, opt: ddp.DistributedOptimizer, t: int, *, bad: bool = False, extra: bool = False
    ) -> float:
        """Do one step, and return its loss."""
        rank, value = self.world.rank, 0.0
        generator = torch.Generator().manual_seed(1000 * t + rank)
        x = torch.randn(16, 6, generator=generator)
        y = x[:, :3].sin() + 0.05 * rank

        def closure() -> torch.Tensor:
            nonlocal value
            opt.zero_grad()
            loss: torch.Tensor = (model(x, extra=extra and rank == 0) - y).square().mean()
            loss.backward()
            if bad:
                for parameter in model.first.parameters():
                    assert parameter.grad is not None
                    parameter.grad.fill_(torch.nan)
            value = float(loss.detach())
            return loss.detach()

        opt.step(closure)
        return value

    def train(self, model: Net, opt: ddp.DistributedOptimizer, begin: int, end: int, **how: Any) -> list[float]:
        """Do steps `begin` to `end`; what ranks hold alike is compared after each."""
        losses = []
        for t in range(begin, end):
            losses.append(self.step(model, opt, t, **how))
            self.alike(f"what is shared after step {t}", opt._run.shared_state())
        return losses

    def alike(self, what: str, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return a digest of tensors that must be the same on all ranks. Collective over the ranks."""
        whole = hashlib.sha256()
        for name, tensor in tensors.items():
            whole.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        found = self.world.gather_texts(whole.hexdigest(), "comparing digests")
        assert len(set(found)) == 1, f"{what} differs from rank to rank"
        return whole.hexdigest()

    def evaluated(self, model: Net, opt: ddp.DistributedOptimizer) -> str:
        """Return a digest of the model that is to be evaluated, which must be the same on all ranks."""
        with opt.averaged_model():
            parameters = dict(model.named_parameters())
            assert all(bool(p.isfinite().all()) for p in parameters.values()), "the model has NaN or infinity"
            return self.alike("the model to evaluate", {name: p.detach() for name, p in parameters.items()})

    def check_settings(self) -> None:
        """Settings are frozen, fit into JSON and say which method it is."""
        method = self.make()
        assert is_dataclass(method), "a method is a frozen dataclass"
        # The only way to ask; the types of Python's library do not know it.
        assert type(method).__dataclass_params__.frozen, "a method is a frozen dataclass"  # type: ignore[attr-defined]
        assert method.kind in ("gradient", "update", "model"), f"kind is {method.kind!r}"
        assert isinstance(method.summary, str), "there is no summary"
        json.dumps(method.settings(), default=str)
        assert method.settings() == self.make().settings(), "two of the same have different settings"

    def check_training(self) -> None:
        """Two trainings come to the same bits, and the loss falls."""
        digests = []
        for _ in range(2):
            model, opt = self.job()
            losses = self.train(model, opt, 0, self.steps)
            digests.append(self.evaluated(model, opt))
            few = max(1, self.steps // 4)
            first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
            assert last < first, f"the loss does not fall: {first:.4g} at first, {last:.4g} in the end"
            if not opt.method.lockstep:
                return
        assert digests[0] == digests[1], "two trainings come to different bits"

    def check_checkpoint(self) -> None:
        """A training that goes on from a checkpoint comes to the bits of one that was not interrupted."""
        if not self.make().lockstep:
            return
        half = self.steps // 2 + 1
        model, opt = self.job()
        self.train(model, opt, 0, half)
        save_checkpoint(self.folder / "checkpoints", opt, model)
        self.train(model, opt, half, self.steps)
        straight = self.evaluated(model, opt)
        model, opt = self.job()
        self.train(model, opt, 0, 1)
        load_checkpoint(self.folder / "checkpoints", opt, model)
        self.train(model, opt, half, self.steps)
        assert self.evaluated(model, opt) == straight, "after a checkpoint training goes on otherwise"

    def check_bad_gradient(self) -> None:
        """A gradient that is NaN on the last rank raises on all, or is skipped by all."""
        last = self.world.rank == self.world.size - 1
        model, opt = self.job(on_bad_gradient="raise")
        raised = False
        try:
            for t in range(self.steps):
                self.step(model, opt, t, bad=last and t == 3)
        except HpctkError:
            raised = True
        told = self.world.gather_texts(str(raised), "comparing errors")
        assert set(told) == {"True"}, f"a NaN on the last rank is raised on some ranks only, or on none: {told}"
        model, opt = self.job(on_bad_gradient="skip")
        for t in range(self.steps):
            self.step(model, opt, t, bad=last and t == 3)
            self.alike(f"what is shared after step {t}, with a NaN in step 3", opt._run.shared_state())
        self.evaluated(model, opt)

    def check_join(self) -> None:
        """Ranks may run out of data at different times."""
        if not self.make().lockstep:
            return
        model, opt = self.job()
        with opt.join():
            for t in range(max(1, self.steps - 2 * self.world.rank)):
                self.step(model, opt, t)
        self.evaluated(model, opt)

    def check_missing_gradients(self) -> None:
        """A parameter may have a gradient on one rank only, and one on none."""
        model, opt = self.job()
        before = model.extra.weight.detach().clone()
        self.train(model, opt, 0, self.steps, extra=True)
        self.evaluated(model, opt)
        assert not torch.equal(before, model.extra.weight.detach()), (
            "what rank 0 alone has a gradient of is not trained"
        )
        assert not bool(model.unused.detach().any()), "a parameter without a gradient has been changed"

    def check_ddp(self) -> None:
        """A gradient method works under DistributedDataParallel, too."""
        method = self.make()
        if not isinstance(method, GradientMethod):
            return
        torch.manual_seed(7)
        model = Net()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        ddp.attach(wrapped, method)
        base = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        for t in range(self.steps):
            generator = torch.Generator().manual_seed(1000 * t + self.world.rank)
            x = torch.randn(16, 6, generator=generator)
            base.zero_grad()
            (wrapped(x, extra=False) - x[:, :3].sin()).square().mean().backward()
            base.step()
            self.alike(f"the model after step {t} under DDP", dict(model.named_parameters()))


def method_maker(name: str, settings: Mapping[str, Any]) -> Callable[[], Method]:
    """Return a function that makes a method by its name or its place, with settings as of a command line."""
    module, colon, attribute = name.partition(":")
    if colon:
        kind = getattr(importlib.import_module(module), attribute)
    else:
        assert name in names(), f"no method {name!r}: known are {', '.join(names())}"
        kind = by_name(name)

    def make() -> Method:
        declared = settings_of(kind)
        given = {
            key: declared[key].parse(key, value) if isinstance(value, str) and key in declared else value
            for key, value in settings.items()
        }
        made: Method = kind(**given)
        return made

    return make


def main() -> None:
    """Run all checks; the first one that fails ends this rank, and hpctk the others."""
    job = json.loads(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{job['folder']}/store", rank=rank, world_size=size)
    make = method_maker(job["name"], job["settings"])
    checks = Checks(make, job["steps"], job["lr"], job["momentum"], Path(job["folder"]))
    for check in (
        checks.check_settings,
        checks.check_training,
        checks.check_checkpoint,
        checks.check_bad_gradient,
        checks.check_join,
        checks.check_missing_gradients,
        checks.check_ddp,
    ):
        check()
    checks.world.barrier("the last check")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
