"""What a model must know of the images that it is given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """Shape, classes and normalisation of one image data set."""

    name: str
    channels: int
    height: int  # pixels
    width: int  # pixels
    classes: int
    mean: tuple[float, ...]  # per channel, of values scaled to 0..1
    std: tuple[float, ...]
    synthetic: bool
