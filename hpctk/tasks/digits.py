"""Handwritten digits: 1797 images of 8x8 pixels, bundled, and a small network to tell them apart.

The data are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
UCI Machine Learning Repository, 1998, CC BY 4.0), kept in hpctk/data/digits.h5.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import torch

#: Every 6th image is held out for testing: 300 images, all classes.
TEST_EVERY = 6


@dataclass(frozen=True)
class Split:
    """Images as float rows of 64 pixels in 0..1, and their labels."""

    images: torch.Tensor
    labels: torch.Tensor


def load() -> tuple[Split, Split]:
    """Return the training and the test images."""
    import h5py

    with as_file(files("hpctk").joinpath("data/digits.h5")) as path, h5py.File(path, "r") as stored:
        images = torch.from_numpy(stored["images"][...]).flatten(1).float() / 16
        labels = torch.from_numpy(stored["labels"][...]).long()
    held_out = torch.arange(len(labels)) % TEST_EVERY == 0
    return Split(images[~held_out], labels[~held_out]), Split(images[held_out], labels[held_out])


def model(seed: int) -> torch.nn.Module:
    """Return the network, the same for the same seed, without touching torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )


def batches(n: int, batch: int, rank: int, size: int, seed: int, epoch: int) -> list[torch.Tensor]:
    """Return the indices of this rank's batches in one epoch.

    All ranks shuffle alike and take every size-th image, the same number each; what does not fill a
    batch on every rank is left for another epoch.
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    mine = order[rank::size][: n // size]
    return list(mine.split(batch)[: n // size // batch])


def accuracy(network: Any, split: Split) -> float:
    """Return the share of images the network gets right."""
    with torch.no_grad():
        right = network(split.images).argmax(1) == split.labels
    return float(right.double().mean())
