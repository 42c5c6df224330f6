"""A small data set in the form of Fashion-MNIST: each class is a bar at a place of its own, under noise."""

from __future__ import annotations

import gzip

import numpy as np


def idx(array, kind=8):
    """Return an array of bytes as an IDX file."""
    head = bytes([0, 0, kind, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def images_and_labels(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, n)
    images = rng.integers(0, 60, (n, 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 2 : 2 * label + 5, 4:24] = 250
    return images, labels


def write(folder, *, packed, train=480, test=60):
    """Write the four files."""
    folder.mkdir(exist_ok=True)
    for part, n in (("train", train), ("t10k", test)):
        images, labels = images_and_labels(n, n)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            content = idx(array)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder
