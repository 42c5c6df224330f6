"""`kernels.thin` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Columns that are turned into rows together.
TURNED = 256


def _times(matrix: Array, columns: int, thin: Array, product: Array) -> None:
    weights = thin.reshape(columns, -1)
    rows = matrix.reshape(-1, columns)
    sums = np.zeros((weights.shape[1], len(rows)), np.float32)
    for lo in range(0, columns, TURNED):
        for j, column in enumerate(np.ascontiguousarray(rows[:, lo : lo + TURNED].T), lo):
            sums += weights[j][:, None] * column
    product.reshape(len(rows), len(sums))[:] = sums.T


def _add_transposed(matrix: Array, thin: Array, sums: Array, start: int, stop: int) -> None:
    for row, weights in zip(matrix, thin, strict=True):
        sums[:, start:stop] += weights[:, None] * row[start:stop]
