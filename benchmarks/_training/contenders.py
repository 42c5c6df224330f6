"""Who competes: DDP in 32 and in 16 bits, hpctk's methods, and the baselines that each of them has to beat."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

import hpctk

#: Name: how to make the method, given the rate and the norm at which to clip, and the way of `hpctk advise` it is.
METHODS = {
    "mean": (lambda rate, norm: hpctk.Mean(), "Mean()"),
    "adacons": (lambda rate, norm: hpctk.AdaCons(), "AdaCons()"),
    "mean-unit-norm": (lambda rate, norm: hpctk.Mean(unit_norm=True), None),
    "mean-half": (lambda rate, norm: hpctk.Mean(hpctk.Half()), "Mean(Half())"),
    "mean-topk": (lambda rate, norm: hpctk.Mean(hpctk.TopK(0.01)), "Mean(TopK(0.01))"),
    "powersgd": (lambda rate, norm: hpctk.Mean(hpctk.PowerSGD(4)), "Mean(PowerSGD(4))"),
    "mean-clip": (lambda rate, norm: hpctk.Mean(clip=rate * norm), None),
    "saef": (lambda rate, norm: hpctk.SAEF(hpctk.TopK(0.01)), "SAEF(TopK(0.01))"),
    "saef-top10": (lambda rate, norm: hpctk.SAEF(hpctk.TopK(0.1)), "SAEF(TopK(0.1))"),
    "saef-sign": (lambda rate, norm: hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()), "SAEF(Sign(), server=Sign())"),
    "error-feedback": (lambda rate, norm: hpctk.SAEF(hpctk.TopK(0.01), step_ahead=False), None),
    "ef21": (lambda rate, norm: hpctk.EF21(hpctk.TopK(0.01)), "EF21(TopK(0.01))"),
    "sasg": (lambda rate, norm: hpctk.SASG(density=0.01, reduce="mean"), "SASG(density=0.01)"),
    "sasg-top10": (lambda rate, norm: hpctk.SASG(density=0.1, alpha=1.0, reduce="mean"), None),
    "mgrawa": (lambda rate, norm: hpctk.MGRAWA(period=16), "MGRAWA(period=16)"),
    "lgrawa": (lambda rate, norm: hpctk.LGRAWA(period=16), "LGRAWA(period=16)"),
    "celgc": (lambda rate, norm: hpctk.CELGC(clip=rate * norm, period=16), "CELGC(clip=1.0, period=16)"),
    "episode": (lambda rate, norm: hpctk.EPISODE(clip=rate * norm, period=16), "EPISODE(clip=1.0, period=16)"),
    "diloco": (lambda rate, norm: hpctk.DiLoCo(period=16), "DiLoCo(period=16)"),
    # As the streaming paper mixes; a period in which most of the mlp can travel at 200 Mbit/s while 12 steps go on.
    "diloco-streaming": (lambda rate, norm: hpctk.DiLoCo(period=32, fragments=2, delay=12, mixing=0.5), None),
    "sparse-loco": (lambda rate, norm: hpctk.SparseLoCo(period=16), "SparseLoCo(period=16)"),
    "local-sgd": (lambda rate, norm: hpctk.LocalSGD(period=16), "LocalSGD(period=16)"),
    # What local steps came to, compressed: for networks on which a model every 16 steps is too much.
    "saef-local": (lambda rate, norm: hpctk.SAEF(hpctk.TopK(0.02), step_ahead=0.85, period=5), None),
    "celgc-topk": (lambda rate, norm: hpctk.CELGC(rate * norm, period=16, compressor=hpctk.TopK(0.05)), None),
    "mgrawa-topk": (lambda rate, norm: hpctk.MGRAWA(period=16, compressor=hpctk.TopK(0.05)), None),
    "mgrawa-chunk": (
        lambda rate, norm: hpctk.MGRAWA(period=16, compressor=hpctk.ChunkTopK()),
        "MGRAWA(period=16, compressor=ChunkTopK())",
    ),
    "easgd": (lambda rate, norm: hpctk.EASGD(period=16), "EASGD(period=16)"),
    "lsgd": (lambda rate, norm: hpctk.LSGD(period=16), "LSGD(period=16)"),
}
#: Those that are not hpctk's: DDP over gloo, and each rank by itself, which also tells what a step takes alone.
OTHERS = {"ddp": "DDP, 32 bit", "ddp-fp16": "DDP, fp16 hook", "alone": None, "horovod": None}
#: Controls without a network: rank 0 trains on the batches of all, the others rest. What local steps and an outer
#: optimizer do for learning must be told from what more workers do for it.
ONE_WORKER = {"one-worker": None, "one-worker-diloco": METHODS["diloco"][0]}
NAMES = (*OTHERS, *ONE_WORKER, *METHODS)
DEFAULT = (
    "alone",
    "ddp",
    "ddp-fp16",
    "mean-topk",
    "powersgd",
    "saef",
    "sasg",
    "mgrawa",
    "celgc",
    "local-sgd",
    "adacons",
)
QUICK = ("ddp-fp16", "saef", "mgrawa")


def way_of(name):
    """Return the name that `hpctk advise` has for a contender, None where it has none."""
    if name in ONE_WORKER:
        return None
    return OTHERS[name] if name in OTHERS else METHODS[name][1]


class Contender:
    """One of them at work on a model: `step` makes a training step, `evaluated` shows the model to judge."""

    def __init__(self, name, here, task, model, rate):
        self._here, self._task, self.model, self._trained = here, task, model, model
        self._name, self._one_worker = name, name in ONE_WORKER
        base = task.make_optimizer(model.parameters(), rate)
        self._opt, self._own = base, None
        self._closure = name.startswith("sasg")
        if name in ("ddp", "ddp-fp16"):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self._trained = torch.nn.parallel.DistributedDataParallel(model)
            if name == "ddp-fp16":
                self._trained.register_comm_hook(None, fp16_compress_hook)
        elif name == "horovod":
            import horovod.torch as hvd

            hvd.init()
            self._opt = hvd.DistributedOptimizer(base, named_parameters=model.named_parameters())
        elif name == "one-worker-diloco":
            from mpi4py import MPI

            method = ONE_WORKER[name](rate, task.norm)
            self._own = self._opt = hpctk.DistributedOptimizer(base, method, model=model, comm=MPI.COMM_SELF)
        elif name in METHODS:
            method = METHODS[name][0](rate, task.norm)
            # As `hpctk advise` writes it.
            early = name in ("mean", "adacons") and len(here.nodes) > 1
            self._own = self._opt = hpctk.DistributedOptimizer(base, method, model=model, overlap=early)

    def step(self, seed, number):
        """Make one step. Collective, but for `alone`, one worker, and between rounds."""
        here, task = self._here, self._task
        if not self._one_worker:
            self._step(task.batch_of(here.rank, here.size, seed, number))
        elif here.rank == 0:
            batches = [task.batch_of(rank, here.size, seed, number) for rank in range(here.size)]
            self._step([torch.cat(parts) for parts in zip(*batches, strict=True)])

    def _step(self, batch):

        def closure():
            self._opt.zero_grad()
            loss = self._task.loss(self._trained, batch)
            loss.backward()
            return loss

        if self._closure:
            self._opt.step(closure)
            return
        loss = closure()
        self._opt.step(loss=loss) if self._own is not None else self._opt.step()

    @contextmanager
    def evaluated(self):
        """Let the model be the one to judge. Collective."""
        with nullcontext() if self._own is None else self._own.averaged_model():
            if self._one_worker:
                # All ranks judge, each a part of the samples.
                for tensor in self.model.state_dict().values():
                    dist.broadcast(tensor, 0)
            yield

    def close(self):
        """Leave nothing behind that would slow down the next one. Collective."""
        if self._name == "horovod":
            import horovod.torch as hvd

            # Its thread polls MPI all the time.
            hvd.shutdown()

    @property
    def account_bytes(self):
        """What hpctk says it sent; None for those that keep no account, or where MPI does not tell."""
        if self._own is None or self._own.stats.uncounted_calls:
            return None
        return self._own.stats.sent_bytes
