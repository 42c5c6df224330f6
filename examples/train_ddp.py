"""Train on the bundled digits with DistributedDataParallel; hpctk is what follows the two arrows.

  torchrun --standalone --nproc-per-node=2 examples/train_ddp.py
  torchrun --standalone --nproc-per-node=2 examples/train_ddp.py --method adacons
  torchrun --standalone --nproc-per-node=2 examples/train_ddp.py --method mgrawa --epochs 20
  torchrun --standalone --nproc-per-node=2 examples/train_ddp.py --folder runs/ddp

Gradient methods are attached to the DDP model. The others train the bare model, with an optimizer around yours.
No MPI is needed. With --folder the training goes on where it was when it is started again, and SIGTERM or SIGUSR2
make all processes save and exit with 85.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hpctk
from hpctk.tasks import digits

METHODS = {
    "mean": hpctk.Mean(),
    "topk": hpctk.Mean(hpctk.TopK(0.05)),
    "powersgd": hpctk.Mean(hpctk.PowerSGD(2)),
    "adacons": hpctk.AdaCons(),
    "saef": hpctk.SAEF(hpctk.TopK(0.05)),
    "mgrawa": hpctk.MGRAWA(period=8),
    "localsgd": hpctk.LocalSGD(period=8),
}


def options():
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="topk", help="[topk]")
    parser.add_argument("--epochs", type=int, default=10, help="[10]")
    parser.add_argument("--batch", type=int, default=16, help="on each process [16]")
    parser.add_argument("--lr", type=float, default=0.05, help="[0.05]")
    parser.add_argument("--folder", metavar="DIR", help="keep checkpoints in DIR, and go on from them")
    return parser.parse_args()


def main():
    """Train, evaluate, and say what it cost."""
    given = options()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    train, test = digits.load()
    data = TensorDataset(train.images, train.labels)
    sampler = DistributedSampler(data, size, rank, seed=1, drop_last=True)
    loader = DataLoader(data, given.batch, sampler=sampler, drop_last=True)
    torch.manual_seed(1)
    model = network = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    ).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=given.lr, momentum=0.9)

    method = METHODS[given.method]
    if method.kind == "gradient":
        model = DistributedDataParallel(network)
        # <-- gradient methods
        at_work = hpctk.ddp.attach(model, method)
    else:
        # <-- all others
        at_work = optimizer = hpctk.ddp.DistributedOptimizer(optimizer, method, model=network)

    checkpoints, at = None, {"epoch": 0, "step": 0}
    if given.folder:
        checkpoints = hpctk.Checkpoints(f"{given.folder}/checkpoints", at_work, network, every_s=60)
        at = checkpoints.resume() or at
        if "optimizer" in at:
            optimizer.load_state_dict(at["optimizer"])

    for epoch in range(at["epoch"], given.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            if epoch == at["epoch"] and step < at["step"]:
                continue  # done before
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            if checkpoints:
                # Only DDP's own optimizer is not in the checkpoint already.
                extra = {"optimizer": optimizer} if method.kind == "gradient" else {}
                checkpoints.after_step(epoch=epoch, step=step + 1, **extra)

    # The model that the method wants evaluated; under DDP it is the one that all hold.
    with optimizer.averaged_model() if method.kind != "gradient" else nullcontext():
        right = network(test.images.to(device)).argmax(1) == test.labels.to(device)
        accuracy = right.double().mean()
    if rank == 0:
        stats = at_work.stats
        # So few bytes that torch's own all-reduce is taken, which does not tell what it sends.
        sent = f"{stats.sent_bytes} bytes" if not stats.uncounted_calls else "an unknown number of bytes"
        print(
            f"{given.method} on {size} processes: accuracy {accuracy:.3f} after {stats.steps} steps, rank 0 sent {sent}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
