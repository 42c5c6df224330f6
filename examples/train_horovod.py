"""A Horovod script that sends less: Horovod's own optimizer, with hpctk's compression.

    mpirun -n 2 python -m mpi4py examples/train_horovod.py
    mpirun -n 2 python -m mpi4py examples/train_horovod.py --method saef
    mpirun -n 2 python -m mpi4py examples/train_horovod.py --folder runs/horovod

What differs from a script without hpctk is marked. Horovod stays as it is. With --folder the training goes on where it
was when it is started again, and SIGTERM or SIGUSR2 make all ranks save and exit with 85.
"""

import argparse

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpctk.horovod
from hpctk.tasks import digits

METHODS = {
    "topk": lambda model: hpctk.horovod.Compression.topk(0.05, model),
    "powersgd": lambda model: hpctk.horovod.Compression.powersgd(4, model),
    "sign": lambda model: hpctk.horovod.Compression.sign(model),
    "adacons": lambda model: hpctk.horovod.Compression.adacons(model),
    "saef": lambda model: hpctk.horovod.Compression(hpctk.SAEF(hpctk.TopK(0.05)), model),
    "celgc": lambda model: hpctk.horovod.Compression.celgc(0.5, 8, model),
}

parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
parser.add_argument("--method", choices=METHODS, default="topk")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--folder", metavar="DIR", help="keep checkpoints in DIR, and go on from them")
options = parser.parse_args()

hvd.init()
torch.manual_seed(1)

train, test = digits.load()
images = TensorDataset(train.images, train.labels)
sampler = DistributedSampler(images, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=True)
loader = DataLoader(images, batch_size=16, sampler=sampler, drop_last=True)

model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

compression = METHODS[options.method](model)  # hpctk
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,  # hpctk
)
compression.attach(optimizer)  # hpctk: for methods that do more than exchange gradients, harmless for the others

checkpoints, at = None, {"epoch": 0, "step": 0}
if options.folder:
    checkpoints = hpctk.Checkpoints(f"{options.folder}/checkpoints", compression, model, every_s=60)  # hpctk
    at = checkpoints.resume() or at
    if "optimizer" in at:
        optimizer.load_state_dict(at["optimizer"])

for epoch in range(at["epoch"], options.epochs):
    sampler.set_epoch(epoch)
    for step, (inputs, labels) in enumerate(loader):
        if epoch == at["epoch"] and step < at["step"]:
            continue  # done before
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if checkpoints:
            checkpoints.after_step(epoch=epoch, step=step + 1, optimizer=optimizer)  # hpctk

# hpctk: the model that the method wants evaluated; for methods that exchange gradients, the one it holds anyway.
with compression.averaged_model():
    accuracy = (model(test.images).argmax(1) == test.labels).double().mean()
if hvd.rank() == 0:
    stats = compression.stats
    print(f"{options.method}: accuracy {accuracy:.1%}, {stats.steps} steps, {stats.sent_bytes / 1e6:.2f} MB sent")
