"""A small classifier under Lightning, by SAEF with the largest hundredth of every update.

    python examples/train_lightning.py --devices 2
    python examples/train_lightning.py --devices 2 --resume

Every rank's residuals lie beside Lightning's checkpoint, and training goes on from them bit for bit.
"""

import argparse
import hashlib

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import hpctk


class Classifier(pl.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        """Return the optimizer that does the local steps, and its rates."""
        opt = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)}


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    x = torch.randn(256, 16)
    y = x[:, :4].argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    steps = []
    strategy = hpctk.lightning.Strategy(hpctk.SAEF(hpctk.TopK(0.1)), metrics=steps.append)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=options.devices, max_epochs=options.epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(options.folder, save_last=True, every_n_epochs=1)],
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, loader, ckpt_path=f"{options.folder}/last.ckpt" if options.resume else None)
    with strategy.distributed.averaged_model():
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    losses = [float(step.loss) for step in steps]
    print(
        f"rank {trainer.global_rank}: {trainer.global_step} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, "
        f"sent {sum(step.sent_bytes for step in steps)} bytes, model {digest}",
        flush=True,
    )


if __name__ == "__main__":
    main()
