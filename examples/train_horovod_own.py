"""A Horovod script with hpctk's own optimizer in the place of Horovod's: for every method, closures included.

    mpirun -n 2 python -m mpi4py examples/train_horovod_own.py

hvd.init(), hvd.broadcast_optimizer_state, hvd.allreduce of metrics and clipping after synchronize() stay as they were.
"""

import argparse

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpctk.horovod
from hpctk.tasks import digits

parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
parser.add_argument("--epochs", type=int, default=10)
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
optimizer = hpctk.horovod.DistributedOptimizer(
    optimizer, hpctk.SASG(density=0.05, alpha=1.0, reduce="mean"), model=model
)

for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        loss = optimizer.step(closure)

with optimizer.averaged_model():
    accuracy = (model(test.images).argmax(1) == test.labels).double().mean()
loss = hvd.allreduce(loss.detach(), name="last loss")
if hvd.rank() == 0:
    stats = optimizer.stats
    print(
        f"sasg: accuracy {accuracy:.1%}, last loss {loss:.3f}, {stats.steps} steps, {stats.counts['uploads']} uploads"
    )
