"""Small geometry for the generated sets, in arithmetic that is the same on every machine.

Only operations that IEEE 754 rounds exactly (+ - * / sqrt) and no sums over an axis: sin, cos
and matrix products differ between processors and libraries in the last bit, which would now
and then move a pixel by one.
"""

from __future__ import annotations

import numpy as np

from lib.rng import Floats


def rotation(degrees: Floats) -> tuple[Floats, Floats]:
    """Cosine and sine by their Taylor series: exact to 1e-6 up to 90 degrees."""
    angle = degrees.astype(np.float64) * 0.017453292519943295
    square = angle * angle
    cosine, sine, term = np.ones_like(angle), angle.copy(), np.ones_like(angle)
    for order in range(1, 8):
        term = -term * square / ((2 * order - 1) * (2 * order))
        cosine += term
        sine += term * angle / (2 * order + 1)
    return cosine.astype(np.float32), sine.astype(np.float32)


def pixel_centres(size: int) -> Floats:
    """Coordinates of pixel centres with the origin in the middle of the image: (size,)."""
    return np.arange(size, dtype=np.float32) - np.float32((size - 1) / 2)


def interpolate(controls_NK: Floats, size: int) -> Floats:
    """Straight lines through K evenly spaced control values, at `size` places: (N, size)."""
    place = np.arange(size, dtype=np.float32) * np.float32((controls_NK.shape[1] - 1) / (size - 1))
    left = np.minimum(place.astype(np.int64), controls_NK.shape[1] - 2)
    weight = place - left.astype(np.float32)
    line: Floats = controls_NK[:, left] * (1 - weight) + controls_NK[:, left + 1] * weight
    return line


def outer(rows_NH: Floats, columns_NW: Floats) -> Floats:
    """Sum of a function of the row and one of the column: (N, H, W)."""
    return rows_NH[:, :, None] + columns_NW[:, None, :]
