"""What becomes of Mean(TopK) where the step is not linear in the gradient: under Adam, and under clipping.

    ./launch/bench adam_topk [--seeds 3] [--only NAMES] [--json FILE]

A small transformer whose output layer is its embedding (so the loss begins near 70) learns a rule in 24 steps, with
AdamW, OneCycleLR and gradients clipped to norm 1 after the exchange: as a script does under DDP that calls
clip_grad_norm_ between backward and step, where hpctk.ddp.attach gives the same bits. Losses are of held-out sequences,
medians over the seeds with the smallest and the largest beside; `moved` is how far a parameter ends from where it
began, in units of the largest rate, the mean over all parameters.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import _rig
import torch
from torch import nn

import hpctk
from hpctk.cli.core.table import table
from hpctk.comm.world import world

WORDS, LENGTH, BATCH, STEPS, CLIP, DENSITY = 32, 24, 8, 24, 1.0, 0.1


def top_k():
    return hpctk.Mean(hpctk.TopK(DENSITY))


@dataclass
class Way:
    """How one row is trained; `clip` is where: after the exchange, before it (on each rank's own gradient), or not."""

    method: object = hpctk.Mean
    base: str = "adamw"
    rate: float = 2.5e-3
    clip: str = "after"
    steps: int = STEPS
    #: Steps at the start that are averaged dense.
    warmup: int = 0
    cycle_momentum: bool = True
    results: list = field(default_factory=list)


WAYS = {
    "dense": Way(),
    "topk": Way(top_k),
    "topk, not clipped": Way(top_k, clip="no"),
    "topk, clipped before the exchange": Way(top_k, clip="before"),
    "topk, betas do not cycle": Way(top_k, cycle_momentum=False),
    "topk, no feedback": Way(lambda: hpctk.Mean(hpctk.TopK(DENSITY), error_feedback=False)),
    "topk, 6 dense steps first": Way(top_k, warmup=6),
    "topk, 12 dense steps first": Way(top_k, warmup=12),
    "topk, rate / 2": Way(top_k, rate=1.25e-3),
    "dense, rate / 2": Way(rate=1.25e-3),
    "topk, rate * 2": Way(top_k, rate=5e-3),
    "topk, rate * 4": Way(top_k, rate=1e-2),
    "topk, 48 steps": Way(top_k, steps=48),
    "saef": Way(lambda: hpctk.SAEF(hpctk.TopK(DENSITY)), clip="before"),
    "saef, no step ahead": Way(lambda: hpctk.SAEF(hpctk.TopK(DENSITY), step_ahead=False), clip="before"),
    "sgd, dense": Way(base="sgd", rate=0.1),
    "sgd, topk": Way(top_k, base="sgd", rate=0.1),
    "sgd, dense, not clipped": Way(base="sgd", rate=0.03, clip="no"),
    "sgd, topk, not clipped": Way(top_k, base="sgd", rate=0.03, clip="no"),
}


class Network(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, WORDS)
        self.out.weight = self.words.weight

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.out(self.body(self.words(text) + self.places, mask=mask, is_causal=True))


def loss_of(model, seed, rank, t):
    """Return the loss of one rank's batch number t: sequences in which a word says what the next one is."""
    generator = torch.Generator().manual_seed(seed * 10_000_019 + rank * 1009 + t)
    text = [torch.randint(WORDS, (BATCH, 1), generator=generator)]
    for _ in range(LENGTH):
        text.append((text[-1] * 5 + 3) % WORDS)
    text = torch.cat(text, 1)
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(here, way, seed):
    """Return the loss at the end, and how far parameters have moved. Collective over the communicator."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = Network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if way.base == "adamw":
        base = torch.optim.AdamW(model.parameters(), lr=way.rate)
    else:
        base = torch.optim.SGD(model.parameters(), lr=way.rate, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        base, max_lr=way.rate, total_steps=way.steps, cycle_momentum=way.cycle_momentum
    )
    first = hpctk.Mean() if way.warmup else way.method()
    opt = hpctk.DistributedOptimizer(base, first, model=model, schedule="ring")
    for t in range(way.steps):
        if way.warmup and t == way.warmup:
            # The base optimizer, and its moments, go on; only the exchange is another.
            opt = hpctk.DistributedOptimizer(base, way.method(), model=model, schedule="ring")
        opt.zero_grad()
        loss_of(model, seed, here.rank, t).backward()
        if way.clip == "after":
            opt.synchronize()
        if way.clip != "no":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        scheduler.step()
    with opt.averaged_model(), torch.no_grad():
        loss = sum(float(loss_of(model, seed, 99, 10_000 + i)) for i in range(4)) / 4
        pairs = zip(model.parameters(), before, strict=True)
        moved = torch.cat([(a - b).abs().flatten() for a, b in pairs]).mean()
    return {"loss": loss, "moved": float(moved) / way.rate, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose names begin with one of these, with commas")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    here = world()
    report = _rig.reporter(here)
    chosen = {name: way for name, way in WAYS.items() if name.startswith(tuple(given.only.split(",")))}
    for name, way in chosen.items():
        for seed in range(1, given.seeds + 1):
            report(f"{name}, seed {seed}")
            way.results.append(train(here, way, seed))
    if here.rank == 0:
        show(chosen, given.json)


def show(chosen, target) -> None:
    rows = []
    for name, way in chosen.items():
        losses, moved = ([one[key] for one in way.results] for key in ("loss", "moved"))
        rows.append([name, f"{median(losses):.3g}", f"{min(losses):.3g}", f"{max(losses):.3g}", f"{median(moved):.2f}"])
    print(table(["", "loss", "least", "most", "moved"], rows))
    if target is not None:
        plain = [
            {
                "name": name,
                "seconds": median(one["seconds"] for one in way.results),
                **asdict(way),
                "method": repr(way.method()),
            }
            for name, way in chosen.items()
        ]
        target.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
