"""Two ranks under Lightning, accumulating and clipping: what comes of it, and of plain torch on the batches of both.

Says for each method how far the two are apart, and how often the norm was above the limit.
"""

import os

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpctk

CLIP, ACCUMULATED, BATCH, STEPS, RANKS = 0.05, 2, 4, 3, 2
torch.manual_seed(2)
X = torch.randn(RANKS * STEPS * ACCUMULATED * BATCH, 5, dtype=torch.float64)
Y = X.sin() + X.flip(1)


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Linear(5, 5).double()

    def training_step(self, batch, _):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def by_lightning(method):
    trainer = pl.Trainer(
        strategy=hpctk.lightning.Strategy(method), accelerator="cpu", devices=RANKS, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=CLIP,
        accumulate_grad_batches=ACCUMULATED, use_distributed_sampler=False,
    )  # fmt: skip
    model = Regression()
    rank = int(os.environ["RANK"])
    trainer.fit(model, DataLoader(TensorDataset(X[rank::RANKS], Y[rank::RANKS]), batch_size=BATCH))
    return rank, model


def by_torch():
    model, clipped = Regression(), 0
    base = model.configure_optimizers()
    for step in range(STEPS):
        base.zero_grad()
        for micro in range(step * ACCUMULATED, (step + 1) * ACCUMULATED):
            for rank in range(RANKS):
                x, y = (each[rank::RANKS][micro * BATCH : (micro + 1) * BATCH] for each in (X, Y))
                (model.training_step((x, y), 0) / (RANKS * ACCUMULATED)).backward()
        clipped += int(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP)
        base.step()
    return model, clipped


def main():
    wanted, clipped = by_torch()
    for method in (hpctk.Mean(), hpctk.Mean(hpctk.TopK(1.0))):
        rank, model = by_lightning(method)
        pairs = zip(model.parameters(), wanted.parameters(), strict=True)
        far = max(float((p - q).detach().abs().max()) for p, q in pairs)
        print(f"rank {rank}: {far:.1e} apart, {clipped} clipped\n", end="", flush=True)


main()
