"""The tasks: a model, data split into training and held-out, an optimizer, and a target.

Sized so that the network's share is large on two cores. `tiny` is for tests: it says nothing about anything.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

#: Held-out samples that are looked at, and together.
HELD_OUT, AT_ONCE = 2000, 250
WINDOW = 64


@dataclass
class Task:
    """One of them, with its data."""

    name: str
    data: str
    make_model: object
    make_optimizer: object
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor
    batch: int
    rate: float
    #: "accuracy", which is to rise, or "loss", which is to fall.
    metric: str
    target: float
    #: Norm at which the clipping contenders cut.
    norm: float

    def batch_of(self, rank, size, seed, step):
        """Return this rank's samples of a step: all ranks draw from one shuffled order, which the seed gives."""
        per_epoch = max(1, len(self.inputs) // (self.batch * size))
        generator = torch.Generator().manual_seed(seed * 1000 + step // per_epoch)
        order = torch.randperm(len(self.inputs), generator=generator)
        first = (step % per_epoch * size + rank) * self.batch
        chosen = order[first : first + self.batch]
        return self.inputs[chosen], self.targets[chosen]

    def loss(self, model, batch):
        inputs, targets = batch
        scores = model(inputs)
        return torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), targets.reshape(-1))

    def verdict(self, model, rank, size):
        """Return sums over this rank's part of the held-out samples: of the loss, of right answers, of answers."""
        mine = torch.arange(rank, len(self.test_inputs), size)
        sums = torch.zeros(3, dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for part in mine.split(AT_ONCE):
                scores = model(self.test_inputs[part])
                scores, wanted = scores.reshape(-1, scores.shape[-1]), self.test_targets[part].reshape(-1)
                loss = torch.nn.functional.cross_entropy(scores, wanted, reduction="sum")
                sums += torch.tensor([float(loss), float((scores.argmax(1) == wanted).sum()), len(wanted)])
        model.train()
        return sums

    def reached(self, loss, accuracy):
        return accuracy >= self.target if self.metric == "accuracy" else loss <= self.target


def momentum(parameters, rate):
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def adamw(parameters, rate):
    return torch.optim.AdamW(parameters, lr=rate)


class Lstm(torch.nn.Module):
    """Predicts the next byte."""

    def __init__(self, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 128)
        self.lstm = torch.nn.LSTM(128, width, batch_first=True)
        self.scores = torch.nn.Linear(width, 256)

    def forward(self, text):
        return self.scores(self.lstm(self.embedding(text))[0])


class Transformer(torch.nn.Module):
    """Predicts the next byte by attention to those before it."""

    def __init__(self, width, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        self.places = torch.nn.Parameter(torch.randn(WINDOW, width) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.scores = torch.nn.Linear(width, 256)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(WINDOW))

    def forward(self, text):
        return self.scores(self.layers(self.embedding(text) + self.places, mask=self.mask, is_causal=True))


def mlp(pixels, width):
    layers = [torch.nn.Flatten(), torch.nn.Linear(pixels, width), torch.nn.ReLU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(width, 10))


def cnn(side, width):
    layers = []
    for before, after in ((1, 32), (32, 64)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    flat = 64 * (side // 4) ** 2
    return torch.nn.Sequential(
        *layers, torch.nn.Flatten(), torch.nn.Linear(flat, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )


def images(folder):
    """Return Fashion-MNIST from a folder, by default Debian's; the bundled digits where it is not there."""
    from hpctk.tasks import digits, fashion

    place = Path(folder) if folder else fashion.DEBIAN
    if folder or place.is_dir():
        parts = [fashion.load(place, part) for part in ("train", "t10k")]
        scaled = [(part.images.float() / 255 - 0.286) / 0.353 for part in parts]
        name = "Fashion-MNIST"
    else:
        parts = digits.load()
        scaled = [part.images.reshape(-1, 8, 8) for part in parts]
        name = "digits (no Fashion-MNIST here)"
    return name, *(x for image, part in zip(scaled, parts, strict=True) for x in (image.unsqueeze(1), part.labels))


def text(file):
    """Return windows of a text and the byte after each of their bytes: nine in ten to train on."""
    from hpctk.tasks.lm import manual

    raw = Path(file).read_bytes() if file else manual()
    n = (len(raw) - 1) // WINDOW
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    inputs, targets = (codes[i : i + n * WINDOW].view(n, WINDOW) for i in (0, 1))
    cut = n - n // 10
    name = Path(file).name if file else f"the manual of Python {sys.version_info[0]}.{sys.version_info[1]}"
    return name, inputs[:cut], targets[:cut], inputs[cut:], targets[cut:]


def make(name, data=None, *, tiny=False):
    """Return a task by its name."""
    if name in ("mlp", "cnn"):
        told, *parts = images(data)
        side = parts[0].shape[-1]
        wide = (32 if tiny else 2816) if name == "mlp" else (16 if tiny else 512)
        build = partial(mlp, side * side, wide) if name == "mlp" else partial(cnn, side, wide)
        optimizer, rate, metric, target, norm, batch = momentum, 0.02, "accuracy", 0.8, 5.0, 32 if name == "mlp" else 16
    else:
        told, *parts = text(data)
        build, rate, target = partial(Lstm, 32 if tiny else 640), 4e-3, 1.8
        if name == "transformer":
            build, rate, target = partial(Transformer, 32 if tiny else 256, 1 if tiny else 4), 2e-3, 2.2
        optimizer, metric, norm, batch = adamw, "loss", 1.0, 8
    held = slice(0, 100 if tiny else HELD_OUT if name in ("mlp", "cnn") else 400)
    train = [part[:400] if tiny else part for part in parts[:2]]
    test = [part[held] for part in parts[2:]]
    return Task(name, told, build, optimizer, *train, *test, batch, rate, metric, target, norm)


TASKS = ("mlp", "cnn", "lstm", "transformer")
