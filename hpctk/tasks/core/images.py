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
from typing import IO, Any, TypeVar, cast

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
PIECE = 1 << 20

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
    with open(path, "rb") as plain:
        packed = plain.read(2) == GZIP
        plain.seek(0)
        stream = cast("IO[bytes]", gzip.GzipFile(fileobj=plain)) if packed else plain
        try:
            shape = _shape(stream, path, dimensions)
            wanted = math.prod(shape)
            # One byte more, to see whether the file ends.
            content = _read(stream, wanted + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise HpctkError(f"{path}: damaged or cut short: {error}") from None
    if len(content) != wanted:
        held = f"{len(content)} bytes" if len(content) < wanted else "more"
        shown = " x ".join(map(str, shape))
        raise HpctkError(
            f"{path}: its header promises {shown} = {wanted} bytes, but it holds {held}: get it again"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read(stream: IO[bytes], n: int) -> bytes:
    """Return up to n bytes; piece by piece, for a header that is nonsense may promise more than there is memory."""
    pieces: list[bytes] = []
    while n > 0 and (piece := stream.read(min(n, PIECE))):
        pieces.append(piece)
        n -= len(piece)
    return b"".join(pieces)


def _shape(stream: IO[bytes], path: Path, dimensions: int) -> tuple[int, ...]:
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or not 1 <= head[3] <= MAX_DIMENSIONS:
        raise HpctkError(f"{path}: not an IDX file: it begins with {head.hex(' ') or 'nothing'}")
    if head[2] != UNSIGNED_BYTES:
        raise HpctkError(f"{path}: elements of type {head[2]:#04x}, need unsigned bytes (0x08)")
    if head[3] != dimensions:
        raise HpctkError(f"{path}: {head[3]} dimensions, need {dimensions}")
    raw = stream.read(4 * dimensions)
    if len(raw) < 4 * dimensions:
        raise HpctkError(f"{path}: cut short inside its header")
    return tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(0, len(raw), 4))
