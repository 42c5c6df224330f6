"""Images with labels: read from IDX files, and a task that tells them apart.

MNIST and its kin are kept in IDX files, gzip or not. The header is 0 0 TYPE DIMENSIONS, then each dimension as 4 bytes,
the high one first; the elements follow in C order.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hpctk.errors import HpctkError
from hpctk.tasks.core.settings import EpochSettings
from hpctk.tasks.core.task import ShuffledTask

#: Images that are looked at together.
AT_ONCE = 1000

GZIP = b"\x1f\x8b"
#: The type of unsigned bytes: what images and labels are.
UNSIGNED_BYTES = 8
MAX_DIMENSIONS = 8

E = TypeVar("E", bound=EpochSettings)


@dataclass(frozen=True)
class Images:
    """Images and their labels, the first dimension counts them."""

    images: torch.Tensor
    labels: torch.Tensor


class ImageTask(ShuffledTask[E]):
    """Tell images apart; `load` sets `train` and `test`."""

    train: Images
    test: Images

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """Return images as the network wants them; as they are, unless a task says otherwise."""
        return images

    def pick(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images as the network wants them, and labels."""
        return self.prepare(self.train.images[indices]), self.train.labels[indices]

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the cross entropy."""
        images, labels = batch
        return torch.nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the share of test images the model gets right, and the mean cross entropy."""
        right = loss = 0.0
        parts = zip(self.test.images.split(AT_ONCE), self.test.labels.split(AT_ONCE), strict=True)
        with torch.no_grad():
            for images, labels in parts:
                scores = model(self.prepare(images))
                right += float((scores.argmax(1) == labels).sum())
                loss += float(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
        n = len(self.test.labels)
        return {"accuracy": right / n, "test loss": loss / n}


def read_idx(path: Path, dimensions: int) -> Any:
    """Return the bytes of an IDX file as an array of so many dimensions.

    Raises
    ------
    HpctkError
        Where the file is damaged, cut short, too long or of another kind; it names the file.
    OSError
        Where it cannot be opened.
    """
    content = path.read_bytes()
    if content.startswith(GZIP):
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise HpctkError(f"{path}: damaged or cut short: {error}") from None
    head, start = content[:4], 4 + 4 * dimensions
    if len(head) < 4 or head[:2] != b"\0\0" or not 1 <= head[3] <= MAX_DIMENSIONS:
        raise HpctkError(f"{path}: not an IDX file: it begins with {head.hex(' ') or 'nothing'}")
    if head[2] != UNSIGNED_BYTES:
        raise HpctkError(f"{path}: elements of type {head[2]:#04x}, need unsigned bytes (0x08)")
    if head[3] != dimensions:
        raise HpctkError(f"{path}: {head[3]} dimensions, need {dimensions}")
    if len(content) < start:
        raise HpctkError(f"{path}: cut short inside its header")
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    wanted, held = math.prod(shape), len(content) - start
    if held != wanted:
        raise HpctkError(
            f"{path}: its header promises {' x '.join(map(str, shape))} = {wanted} bytes, but it holds "
            f"{f'{held} bytes' if held < wanted else 'more'}: get it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
