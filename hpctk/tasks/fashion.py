"""Fashion-MNIST: 70000 images of clothes, 28x28 pixels, in ten classes; an MLP or a small CNN.

Xiao, Rasul, Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms", arXiv
1708.07747. The four IDX files are read from a folder, gzip or not; any data set of the same form will do (MNIST).
"""

from __future__ import annotations

from pathlib import Path

import torch

from hpctk.errors import HpctkError
from hpctk.tasks.core.images import Images, ImageTask, read_idx
from hpctk.tasks.core.settings import FashionSettings

#: Where Debian's package dataset-fashion-mnist puts the files.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
PIXELS, CLASSES = (28, 28), 10


class Fashion(ImageTask[FashionSettings]):
    """Classify clothes."""

    settings_class = FashionSettings

    def load(self) -> None:
        """Read the four files."""
        folder = DEBIAN if self.settings.data is None else Path(self.settings.data)
        self.train, self.test = (load(folder, part) for part in ("train", "t10k"))
        self.samples = len(self.train.labels)

    def make_model(self) -> torch.nn.Module:
        """Return the network: 203,530 parameters the MLP, 105,866 the CNN."""
        if self.settings.model == "mlp":
            return torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, CLASSES)
            )
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.25),
            torch.nn.Linear(32 * 7 * 7, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, CLASSES),
        )

    def prepare(self, images: torch.Tensor) -> torch.Tensor:
        """Return bytes, which take a quarter of the memory until here, as one channel of numbers around 0."""
        return (images.float() / 255 - 0.2860).div_(0.3530).unsqueeze(1)


def load(folder: Path, part: str) -> Images:
    """Return the training ("train") or the test ("t10k") images, as bytes."""
    images = read_idx(find(folder, f"{part}-images-idx3-ubyte"), 3)
    labels = read_idx(find(folder, f"{part}-labels-idx1-ubyte"), 1)
    if images.shape[1:] != PIXELS:
        raise HpctkError(f"{folder}: {part} images of {images.shape[1]}x{images.shape[2]} pixels, need 28x28")
    if len(images) != len(labels) or not len(labels):
        raise HpctkError(f"{folder}: {len(images)} {part} images and {len(labels)} labels: need as many of each")
    if labels.max() >= CLASSES:
        raise HpctkError(f"{folder}: {part} label {labels.max()}, allowed are 0 to {CLASSES - 1}")
    return Images(torch.from_numpy(images.copy()), torch.from_numpy(labels.astype("int64")))


def find(folder: Path, name: str) -> Path:
    """Return the file of that name in the folder, packed or not; else say both ways to get it."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise HpctkError(
        f"no {name} or {name}.gz in {folder}: give the folder with the four files of Fashion-MNIST by --data DIR, "
        "or install Debian's package: apt-get install dataset-fashion-mnist"
    )
