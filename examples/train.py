"""A complete training script with hpctk: any model, any data, checkpoints, Slurm-proof stopping.

    mpirun -n 4 python -m mpi4py examples/train.py [FOLDER FOR CHECKPOINTS]

Started again with the same folder, it goes on where it was; SIGTERM or SIGUSR2 make all ranks save and exit with 85.
"""

import sys

import torch
from mpi4py import MPI

import hpctk

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
EPOCHS, BATCH = 6, 16


def data():
    """Two moons: points in the plane, and on which of two half circles each one lies."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(2000, generator=generator) * torch.pi
    labels = torch.arange(2000) % 2
    upper = torch.stack([angles.cos(), angles.sin()], 1)
    points = torch.where(labels.bool().unsqueeze(1), torch.tensor([1.0, 0.5]) - upper, upper)
    return points + 0.1 * torch.randn(2000, 2, generator=generator), labels


def batches(n, epoch):
    """Yield the samples of this rank: all ranks shuffle alike, and each takes its own part of every step's samples."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    for first in range(0, n - SIZE * BATCH + 1, SIZE * BATCH):
        yield order[first + RANK * BATCH :][:BATCH]


def main():
    """Train, evaluate on rank 0."""
    points, labels = data()
    train, test = slice(0, 1600), slice(1600, 2000)
    torch.manual_seed(RANK)  # for dropout and the like; the model that counts is rank 0's, everybody gets it
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    criterion = torch.nn.CrossEntropyLoss()

    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # What hpctk adds: the optimizer's steps are shared by all ranks. Any method will do.
    opt = hpctk.DistributedOptimizer(opt, hpctk.SAEF(hpctk.TopK(0.05)), model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS)

    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/example"
    checkpoints = hpctk.Checkpoints(folder, opt, model, every_s=60)
    # None where there is nothing to go on from; else what was given to after_step.
    saved = checkpoints.resume() or {"epoch": 0, "step": 0}
    if "scheduler" in saved:
        scheduler.load_state_dict(saved["scheduler"])

    for epoch in range(saved["epoch"], EPOCHS):
        skip = saved["step"] if epoch == saved["epoch"] else 0  # steps of this epoch that are done already
        for step, batch in enumerate(batches(1600, epoch)):
            if step < skip:
                continue
            opt.zero_grad()
            loss = criterion(model(points[train][batch]), labels[train][batch])
            loss.backward()
            opt.step()
            # Saves when it is time to, or when somebody wants the job to stop; then it does not return.
            checkpoints.after_step(epoch=epoch, step=step + 1, scheduler=scheduler)
        scheduler.step()
        checkpoints.save(epoch=epoch + 1, step=0, scheduler=scheduler)

    with opt.averaged_model():  # the model that the method wants evaluated; every rank must come here
        right = (model(points[test]).argmax(1) == labels[test]).float().mean()
    if RANK == 0:
        print(f"accuracy {right:.1%} after {opt.stats.steps} steps, {opt.stats.sent_bytes} bytes sent")


if __name__ == "__main__":
    main()
