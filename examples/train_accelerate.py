"""A small classifier under Accelerate, by averaging with the largest tenth of every gradient.

    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py
    torchrun --nproc-per-node 2 examples/train_accelerate.py --resume

The model is left out of `prepare`, which would average gradients in full. save_state keeps every rank's residuals.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import hpctk


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    x = torch.randn(256, 16)
    y = x[:, :4].argmax(1)
    loader = accelerator.prepare(DataLoader(TensorDataset(x, y), batch_size=16))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    opt = hpctk.ddp.DistributedOptimizer(base, hpctk.Mean(hpctk.TopK(0.1)), model=model)
    rates = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    hpctk.accelerate.keep(accelerator, opt, model, rates=rates)
    if options.resume:
        accelerator.load_state(options.folder)
    losses = []
    for _ in range(rates.last_epoch, options.epochs):
        for inputs, targets in loader:
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            opt.step(loss=loss)
            losses.append(float(loss.detach()))
        rates.step()
        accelerator.save_state(options.folder)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(
        f"rank {accelerator.process_index}: {opt.stats.steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, "
        f"sent {opt.stats.sent_bytes} bytes, model {digest}",
        flush=True,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
