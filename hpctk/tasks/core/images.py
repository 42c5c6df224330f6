"""Images with labels, and how well a network tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Images that are looked at together.
AT_ONCE = 1000


@dataclass(frozen=True)
class Images:
    """Images and their labels, the first dimension counts them."""

    images: torch.Tensor
    labels: torch.Tensor


def accuracy_and_loss(
    model: torch.nn.Module,
    test: Images,
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda images: images,
) -> dict[str, float]:
    """Return the share of images the model gets right, and the mean cross entropy."""
    right = loss = 0.0
    with torch.no_grad():
        for images, labels in zip(test.images.split(AT_ONCE), test.labels.split(AT_ONCE), strict=True):
            scores = model(prepare(images))
            right += float((scores.argmax(1) == labels).sum())
            loss += float(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
    n = len(test.labels)
    return {"accuracy": right / n, "test loss": loss / n}
