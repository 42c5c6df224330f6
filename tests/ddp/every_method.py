"""A torchrun job in which no MPI can be imported: every method trains, and every rank writes down what it got."""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path


class NoMpi:
    """Nobody may even try to import these."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mpi4py", "horovod"):
            raise ImportError(f"{name} is not installed here")


# Before anything else is imported, hence the order below.
sys.meta_path.insert(0, NoMpi())
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch.distributed as dist  # noqa: E402  after the block above, as all below
from threshold import Threshold, simulated_mean, simulated_saef  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from training import alone, assert_alike, loss_of, net, sgd  # noqa: E402

import hpctk  # noqa: E402

COMPRESSORS = {
    "Identity": hpctk.Identity(), "Half": hpctk.Half(), "TopK": hpctk.TopK(0.3), "RandomK": hpctk.RandomK(0.3),
    "Sign": hpctk.Sign(), "QSGD": hpctk.QSGD(4), "PowerSGD": hpctk.PowerSGD(1), "ChunkTopK": hpctk.ChunkTopK(2, 8),
    "Threshold": Threshold(0.05),
}  # fmt: skip
GRADIENT_METHODS = {
    "Mean": hpctk.Mean(),
    **{f"Mean {name}": hpctk.Mean(compressor) for name, compressor in COMPRESSORS.items()},
    "AdaCons": hpctk.AdaCons(),
    "AdaCons layerwise": hpctk.AdaCons(layerwise=True),
    "EF21": hpctk.EF21(hpctk.TopK(0.1)),
}
METHODS = {
    **GRADIENT_METHODS,
    "SASG": hpctk.SASG(density=0.3),
    "SAEF": hpctk.SAEF(hpctk.TopK(0.3)),
    "SAEF Threshold": hpctk.SAEF(Threshold(0.01)),
    "SAEF one-bit": hpctk.SAEF(hpctk.Sign(), server=hpctk.Sign()),
    "MGRAWA": hpctk.MGRAWA(period=2),
    "LGRAWA": hpctk.LGRAWA(period=2),
    "MGRAWA asynchronous": hpctk.MGRAWA(period=2, asynchronous=True),
    "CELGC": hpctk.CELGC(0.1, period=2),
    "EPISODE": hpctk.EPISODE(0.1, period=2),
    "SA-PEF": hpctk.SAEF(hpctk.TopK(0.3), step_ahead=0.85, period=2),
    "DiLoCo": hpctk.DiLoCo(period=2),
    "DiLoCo streaming": hpctk.DiLoCo(period=4, fragments=2, delay=1, compressor=hpctk.TopK(0.3)),
    "SparseLoCo": hpctk.SparseLoCo(period=2, k=2, chunk=4),
    "CELGC TopK": hpctk.CELGC(0.1, period=2, compressor=hpctk.TopK(0.3)),
    "LocalSGD": hpctk.LocalSGD(period=2),
    "EASGD": hpctk.EASGD(period=2),
    "LSGD": hpctk.LSGD(period=2),
}
STEPS = 5


def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def step(opt, model, t):
    def closure():
        opt.zero_grad()
        loss = loss_of(model, dist.get_rank(), t)
        loss.backward()
        return loss

    opt.step(closure)


def assert_as_simulated(method, model):
    """Hold the model against a simulation of all ranks, where there is one."""
    size = dist.get_world_size()
    if method is METHODS["Mean Threshold"]:
        assert_alike(model, simulated_mean(size, STEPS, 0.05)[0])
    elif method is METHODS["SAEF Threshold"]:
        assert_alike(model, simulated_saef(size, STEPS, 0.01))


def on_the_bare_model(method):
    model = net()
    opt = hpctk.ddp.DistributedOptimizer(sgd(model.parameters()), method, model=model)
    with opt.join():
        for t in range(STEPS):
            step(opt, model, t)
    with opt.averaged_model():
        evaluated = digest(model)
        assert_as_simulated(method, model)
    return model, {"digest": evaluated, "steps": opt.stats.steps, "messages": opt.stats.messages}


def under_ddp(method):
    model = net()
    wrapped = DistributedDataParallel(model)
    attached = hpctk.ddp.attach(wrapped, method)
    base = sgd(model.parameters())
    for t in range(STEPS):
        step(base, wrapped, t)
    assert_as_simulated(method, model)
    return model, {"digest": digest(model), "steps": attached.stats.steps, "messages": attached.stats.messages}


def resumed():
    """Train three steps, save, load into another model, train two more."""
    folder = Path(tempfile.gettempdir()) / f"hpctk-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}"
    first, second = net(), net(seed=4)
    opt = hpctk.ddp.DistributedOptimizer(sgd(first.parameters()), METHODS["SAEF"], model=first)
    for t in range(3):
        step(opt, first, t)
    hpctk.save_checkpoint(folder, opt, first)
    opt = hpctk.ddp.DistributedOptimizer(sgd(second.parameters()), METHODS["SAEF"], model=second)
    hpctk.load_checkpoint(folder, opt, second)
    for t in range(3, STEPS):
        step(opt, second, t)
    with opt.averaged_model():
        return {"digest": digest(second)}


def main():
    found = {}
    try:
        hpctk.ddp.DistributedOptimizer(sgd(net().parameters()), hpctk.Mean(), model=net())
    except hpctk.HpctkError as error:
        found["before init_process_group"] = str(error)
    dist.init_process_group("gloo")
    try:
        hpctk.DistributedOptimizer(sgd(net().parameters()), hpctk.Mean(), model=net())
    except hpctk.HpctkError as error:
        found["without a communicator"] = str(error)
    for name, method in METHODS.items():
        model, found[name] = on_the_bare_model(method)
        if name == "Mean":
            assert_alike(model, alone(dist.get_world_size(), STEPS))
    for name, method in GRADIENT_METHODS.items():
        model, found[f"{name} attached"] = under_ddp(method)
        if name == "Mean":
            assert_alike(model, alone(dist.get_world_size(), STEPS))
    found["resumed"] = resumed()
    found["libmpi"] = "libmpi" in Path("/proc/self/maps").read_text()
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
