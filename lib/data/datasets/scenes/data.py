"""Synthetic scenes: a shape with a texture in random colours among clutter; 3x32x32, 10 classes.

Class = 2 x shape + texture. Colours, position and rotation are independent of the class, so that a linear
classifier is close to chance.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from lib.data.datasets.embedded import EmbeddedSet, outer, pixel_centres, rotation
from lib.data.types import Images, ImageSpec, Labels
from lib.plugins import NoOptions
from lib.rng import Floats, integers, key, noise_bytes, uniform

VERSION = 1  # raise it whenever a pixel changes
TRAIN_SIZE, TEST_SIZE = 10_000, 2_000

SHAPES = ("disc", "square", "triangle", "star", "cross")
TEXTURES = ("stripes", "checker")

_CLASSES = len(SHAPES) * len(TEXTURES)
SPEC = ImageSpec.square("scenes", 32, _CLASSES, mean=(0.501,) * 3, std=(0.277,) * 3, synthetic=True)

_SIZE = 32  # pixels of an image
_CHUNK = 128  # images per step, so that arrays stay in the L2 cache


def generate(part: Literal["train", "test"]) -> tuple[Images, Labels]:
    """Return images uint8 (N, 3, 32, 32) and labels int64 (N,)."""
    size = TRAIN_SIZE if part == "train" else TEST_SIZE
    labels = np.arange(size, dtype=np.int64) % SPEC.classes
    images = np.empty((size, 3, _SIZE, _SIZE), np.uint8)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, size))
        images[chunk] = _draw(labels[chunk], key("scenes", part, start))
    return images, labels


def _draw(labels_N: Labels, seed: int) -> Images:
    """Images (N, 3, 32, 32) of the given classes: background, clutter, object, more clutter, noise."""
    count = len(labels_N)
    ground_3N1, first_3N1, second_3N1 = (colour[:, :, None] for colour in _colours(count, seed))
    slopes = uniform(key("slopes", seed), (2, 3, count, 1), low=-0.006, high=0.006) * pixel_centres(_SIZE)
    scene = outer(ground_3N1 + slopes[0], slopes[1])
    _clutter(scene, key("behind", seed))
    inside, texture = _object(labels_N, seed)
    for channel, first_N1, second_N1 in zip(scene, first_3N1, second_3N1, strict=True):
        colour = first_N1[:, :, None] * texture + second_N1[:, :, None] * (1 - texture)
        channel += inside * (colour - channel)
    _clutter(scene, key("before", seed))
    noise = noise_bytes(key("noise", seed), scene.shape).astype(np.float32)
    scene = scene * 255 + (noise - np.float32(127.5)) * np.float32(0.15)
    images: Images = np.clip(scene + np.float32(0.5), 0, 255).astype(np.uint8).transpose(1, 0, 2, 3)
    return images


def _colours(count: int, seed: int) -> tuple[Floats, Floats, Floats]:
    """Background and the two colours of the object, (3, N) each, 0..1.

    The scale of each channel is bent to a circle and the three colours are spread around it, so that any
    two of them differ by at least a fifth in every channel: stripes never melt into the background.
    """
    ground = uniform(key("ground", seed), (3, count))
    side = 1 - 2 * integers(key("side", seed), (3, count), below=2).astype(np.float32)
    first = ground + side * uniform(key("first", seed), (3, count), low=0.25, high=0.4)
    second = ground - side * uniform(key("second", seed), (3, count), low=0.25, high=0.4)
    return ground, first - np.floor(first), second - np.floor(second)


def _clutter(scene_3NHW: Floats, seed: int) -> None:
    """Paint one small rectangle of a random colour anywhere in each image."""
    count = scene_3NHW.shape[1]
    centre = uniform(key("centre", seed), (2, count, 1), low=-15, high=15)
    extent = uniform(key("extent", seed), (2, count, 1), low=1.5, high=3.5)
    colour = uniform(key("colour", seed), (3, count))
    cover = np.clip(extent - np.abs(pixel_centres(_SIZE) - centre) + np.float32(0.5), 0, 1)
    painted = cover[0][:, :, None] * cover[1][:, None, :]
    for channel, colour_N in zip(scene_3NHW, colour, strict=True):
        channel += painted * (colour_N[:, None, None] - channel)


def _object(labels_N: Labels, seed: int) -> tuple[Floats, Floats]:
    """How much of each pixel is object, and how much of that has the first colour: (N, 32, 32), 0..1."""
    count = len(labels_N)
    shift = uniform(key("shift", seed), (2, count, 1), low=-3.5, high=3.5)
    row, column = pixel_centres(_SIZE) - shift
    x_NHW, y_NHW = _rotated(row, column, uniform(key("turn", seed), (count,), low=-25, high=25))
    radius = uniform(key("radius", seed), (count,), low=9, high=13)[:, None, None]
    inside = np.empty_like(x_NHW)
    for number, shape in enumerate(SHAPES):
        members = np.flatnonzero(labels_N // len(TEXTURES) == number)
        inside[members] = _depth(shape, x_NHW[members], y_NHW[members], radius[members])
    np.clip(inside + np.float32(0.5), 0, 1, out=inside)
    u_NHW, v_NHW = _rotated(row, column, uniform(key("grain", seed), (count,), low=-25, high=25))
    period = uniform(key("period", seed), (count,), low=4.2, high=6.5)[:, None, None]
    phase = uniform(key("phase", seed), (2, count, 1, 1))
    across, along = _wave(u_NHW / period + phase[0]), _wave(v_NHW / period + phase[1])
    upright = integers(key("upright", seed), (count,), below=2)[:, None, None].astype(bool)
    stripes = np.where(upright, across, along) * (period / 4)
    checker = across * along * (period / 2)
    texture = np.where((labels_N % len(TEXTURES) == 0)[:, None, None], stripes, checker)
    return inside, np.clip(texture + np.float32(0.5), 0, 1)


def _rotated(row_NH: Floats, column_NW: Floats, degrees_N: Floats) -> tuple[Floats, Floats]:
    """Coordinates of all pixels in a system turned by `degrees_N`."""
    cosine, sine = (part[:, None] for part in rotation(degrees_N))
    return outer(-sine * row_NH, cosine * column_NW), outer(cosine * row_NH, sine * column_NW)


def _wave(turns: Floats) -> Floats:
    """A triangle wave of period 1 between -1 and 1."""
    wave: Floats = np.abs(turns - np.floor(turns) - np.float32(0.5)) * 4 - 1
    return wave


# Outward normals of the five sides of a pentagon.
_PENTAGON = (
    *((0.0, 1.0), (0.9510565, 0.3090170), (0.5877853, -0.8090170)),
    *((-0.5877853, -0.8090170), (-0.9510565, 0.3090170)),
)


def _depth(shape: str, x: Floats, y: Floats, radius: Floats) -> Floats:
    """Depth inside a shape in pixels (negative outside) at x, y from its centre; y points down."""
    wide, tall = np.abs(x), np.abs(y)
    if shape == "disc":
        return np.asarray(radius - np.sqrt(x * x + y * y))
    if shape == "square":
        return np.asarray(np.float32(0.86) * radius - np.maximum(wide, tall))
    if shape == "triangle":
        sides = wide * np.float32(0.8660254) - y * np.float32(0.5)
        return np.asarray(np.float32(0.62) * radius - np.maximum(sides, y))
    if shape == "cross":
        arm, reach = np.float32(0.38) * radius, np.float32(1.05) * radius
        upright, level = np.minimum(arm - wide, reach - tall), np.minimum(reach - wide, arm - tall)
        return np.asarray(np.maximum(upright, level))
    assert shape == "star"  # a pentagram: its points lie inside at least four of its five sides
    distance = np.float32(0.3090170) * np.float32(1.25) * radius
    least = second = np.full_like(x, np.inf)
    for side_x, side_y in _PENTAGON:
        depth = distance - (x * np.float32(side_x) + y * np.float32(side_y))
        second = np.minimum(second, np.maximum(least, depth))
        least = np.minimum(least, depth)
    return second


_SET = EmbeddedSet(SPEC, VERSION, (TRAIN_SIZE, TEST_SIZE), lambda part: generate(part))
Options, describe, open_set = NoOptions, _SET.describe, _SET.open_set
