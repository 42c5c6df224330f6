"""A training with everything that a restart can lose: momentum, dropout, batch norm, a scheduler, uneven data."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

import hpctk

METHODS = {
    "mean": lambda: hpctk.Mean(),
    "mean_clip": lambda: hpctk.Mean(clip=0.02),
    "mean_unit": lambda: hpctk.Mean(unit_norm=True),
    "mean_half": lambda: hpctk.Mean(hpctk.Half()),
    "mean_topk": lambda: hpctk.Mean(hpctk.TopK(0.1)),
    "mean_keep": lambda: hpctk.Mean(hpctk.TopK(0.1, keep=True)),
    "mean_randomk": lambda: hpctk.Mean(hpctk.RandomK(0.2)),
    "mean_sign": lambda: hpctk.Mean(hpctk.Sign()),
    "mean_qsgd": lambda: hpctk.Mean(hpctk.QSGD(4)),
    "mean_powersgd": lambda: hpctk.Mean(hpctk.PowerSGD(1)),
    "adacons": lambda: hpctk.AdaCons(),
    "adacons_layerwise": lambda: hpctk.AdaCons(layerwise=True, momentum=0.5),
    "sasg": lambda: hpctk.SASG(0.1, warmup=2, alpha=3.0),
    "sasg_mean": lambda: hpctk.SASG(0.1, warmup=2, reduce="mean"),
    "saef_topk": lambda: hpctk.SAEF(hpctk.TopK(0.1), average_every=4),
    "saef_sign": lambda: hpctk.SAEF(hpctk.Sign()),
    "saef_onebit": lambda: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign(), average_every=3),
    "saef_server": lambda: hpctk.SAEF(hpctk.QSGD(4), server=hpctk.TopK(0.3)),
    "saef_powersgd": lambda: hpctk.SAEF(hpctk.PowerSGD(1), step_ahead=False),
    "mgrawa": lambda: hpctk.MGRAWA(period=4),
    "lgrawa": lambda: hpctk.LGRAWA(period=4, prox=0.1),
    "celgc": lambda: hpctk.CELGC(0.05, period=4),
    "episode": lambda: hpctk.EPISODE(0.05, period=4),
    "ef21_topk": lambda: hpctk.EF21(hpctk.TopK(0.1)),
    "diloco": lambda: hpctk.DiLoCo(4),
    "diloco_topk": lambda: hpctk.DiLoCo(4, compressor=hpctk.TopK(0.1)),
    "sparseloco": lambda: hpctk.SparseLoCo(4, k=2, chunk=8),
    # Step 6, at which checkpoints are saved, is within the delay of the second fragment.
    "diloco_streaming": lambda: hpctk.DiLoCo(8, fragments=2, delay=2, mixing=0.5, period_rule=hpctk.QSR(0.03)),
    "celgc_sign": lambda: hpctk.CELGC(0.05, period=4, compressor=hpctk.Sign()),
    "mgrawa_topk": lambda: hpctk.MGRAWA(period=4, compressor=hpctk.TopK(0.1)),
    "localsgd": lambda: hpctk.LocalSGD(4),
    "easgd": lambda: hpctk.EASGD(),
    "lsgd": lambda: hpctk.LSGD(),
}


class Net(torch.nn.Module):
    """A small network whose forward draws random numbers and leaves traces in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 3)
        # Not in state_dict(), and counts all the same.
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        x = torch.nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.2, self.training)
        return self.last(x) * (1 + self.seen / 1000)


class Job:
    """One rank's training by a method; everything random follows from the rank."""

    def __init__(self, method, comm=None, adam=False) -> None:
        self.rank = 0 if comm is None else comm.rank
        torch.manual_seed(7)
        self.model = Net()
        make = torch.optim.AdamW if adam else torch.optim.SGD
        more = {} if adam else {"momentum": 0.9, "weight_decay": 0.01}
        base = make(self.model.parameters(), lr=0.02, **more)
        self.opt = hpctk.DistributedOptimizer(base, method, model=self.model, comm=comm, schedule="auto")
        self.rates = torch.optim.lr_scheduler.StepLR(self.opt, 7, 0.5)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + self.opt.world.rank)
        self.t = 0

    def step(self) -> None:
        x = torch.randn(12, 6) * random.uniform(0.5, 1.5) + float(np.random.rand())
        y = x[:, :3].sin() + 0.1 * self.opt.world.rank

        def closure():
            self.opt.zero_grad()
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            return loss.detach()

        self.opt.step(closure)
        self.rates.step()
        self.t += 1

    def train(self, steps) -> None:
        for _ in range(steps):
            self.step()

    def save(self, path):
        return hpctk.save_checkpoint(path, self.opt, self.model, t=self.t, rates=self.rates)

    def load(self, path, **settings) -> None:
        extra = hpctk.load_checkpoint(path, self.opt, self.model, **settings)
        self.t = extra["t"]
        self.rates.load_state_dict(extra["rates"])

    def digest(self) -> str:
        """Return one number for every bit that training depends on."""
        whole = hashlib.sha256()
        states = [dict(self.model.named_parameters()), dict(self.model.named_buffers()), self.opt.state_dict()]
        method = self.opt.local_state_dict()
        method.pop("elapsed_s", None)
        for state in (*states, method, self.rates.state_dict(), self.t):
            _absorb(whole, state)
        return whole.hexdigest()


def _absorb(whole, value) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            whole.update(repr(key).encode())
            _absorb(whole, one)
    elif isinstance(value, list | tuple):
        for one in value:
            _absorb(whole, one)
    elif isinstance(value, torch.Tensor):
        whole.update(value.detach().cpu().contiguous().view(-1).numpy().tobytes())
    else:
        whole.update(repr(value).encode())
