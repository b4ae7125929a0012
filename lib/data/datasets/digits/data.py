"""Synthetic digits: glyphs of the fonts that matplotlib ships, distorted; 1x28x28, 10 classes.

Each glyph is drawn once, large, and turned into a field of signed distances to its outline. An
image reads that field through a random affine map with wiggles and thresholds it at a random
distance, which makes strokes thinner or thicker. Five fonts occur in the test part only.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lib.data.datasets.embedded import EmbeddedSet, outer, pixel_centres, rotation
from lib.data.types import Images, ImageSpec, Labels
from lib.errors import DataError
from lib.plugins import NoOptions
from lib.rng import Floats, integers, key, noise_bytes, uniform

VERSION = 1  # raise it whenever a pixel changes
TRAIN_SIZE, TEST_SIZE = 20_000, 4_000

SPEC = ImageSpec.square("digits", 28, 10, mean=(0.163,), std=(0.292,), synthetic=True)

TRAIN_FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique"),
    *("DejaVuSansMono-Bold", "DejaVuSansMono-BoldOblique", "DejaVuSansMono-Oblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBolIta", "STIXGeneralItalic"),
    *("cmb10", "cmmi10", "cmr10", "cmtt10"),
)
TEST_FONTS = ("DejaVuSans-BoldOblique", "DejaVuSansMono", "DejaVuSerif-Italic", "STIXGeneralBol", "cmss10")

_SIZE = 28  # pixels of an image
_GLYPH_HEIGHT = 20  # pixels of an undistorted glyph in it, as in MNIST
_FONT_PIXELS = 80  # the em square of the large drawing
_FIELD = 112  # pixels of a distance field; a pixel of an image is about three of them
_REACH = 9  # distances are known up to this many field pixels
_STEPS = 12  # steps of a stored distance per field pixel
_CHUNK = 256  # images per step, so that arrays stay in the L2 cache


def generate(part: Literal["train", "test"]) -> tuple[Images, Labels]:
    """Return images uint8 (N, 1, 28, 28) and labels int64 (N,). Raises DataError if a font is missing."""
    size, fonts = (TRAIN_SIZE, TRAIN_FONTS) if part == "train" else (TEST_SIZE, TEST_FONTS)
    fields, field_per_pixel = _distance_fields(fonts)
    labels = np.arange(size, dtype=np.int64) % 10
    glyphs = integers(key("digits", part, "font"), (size,), below=len(fonts)) * 10 + labels
    images = np.empty((size, 1, _SIZE, _SIZE), np.uint8)
    for start in range(0, size, _CHUNK):
        chunk = slice(start, min(start + _CHUNK, size))
        seed = key("digits", part, start)
        images[chunk, 0] = _draw(fields, glyphs[chunk], field_per_pixel[glyphs[chunk]], seed)
    return images, labels


def _distance_fields(fonts: tuple[str, ...]) -> tuple[npt.NDArray[np.int8], Floats]:
    """Signed distances (10 per font, _FIELD, _FIELD), and field pixels per image pixel of each glyph."""
    masks, heights = zip(
        *(_glyph(path, digit) for path in _font_files(fonts) for digit in "0123456789"), strict=True
    )
    fields = np.empty((len(masks), _FIELD, _FIELD), np.int8)
    for start in range(0, len(masks), 10):
        ink = np.stack(masks[start : start + 10])
        distance = np.sqrt(_square_distance(ink)) - np.sqrt(_square_distance(~ink))
        fields[start : start + 10] = np.rint(distance * np.float32(_STEPS))
    return fields, np.array(heights, np.float32) / np.float32(_GLYPH_HEIGHT)


def _font_files(fonts: tuple[str, ...]) -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = [folder / f"{font}.ttf" for font in fonts]
    for file in files:
        if not file.is_file():
            why = "the embedded digits are drawn with it"
            raise DataError(f"{file} is missing", why=why, todo="reinstall matplotlib")
    return files


def _glyph(file: Path, digit: str) -> tuple[npt.NDArray[np.bool_], int]:
    """A large drawing of one digit, centred in the field, and the height of its ink in pixels."""
    from matplotlib.ft2font import FT2Font, LoadFlags

    font = FT2Font(str(file))
    font.set_size(_FONT_PIXELS, 72)
    font.set_text(digit, 0.0, flags=LoadFlags.NO_HINTING)
    font.draw_glyphs_to_bitmap(antialiased=True)
    ink = np.asarray(font.get_image()) >= 128
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    top, left = ((_FIELD - extent) // 2 for extent in ink.shape)
    field = np.zeros((_FIELD, _FIELD), np.bool_)
    field[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return field, ink.shape[0]


def _square_distance(ink_NHW: npt.NDArray[np.bool_]) -> Floats:
    """Squared distance of each pixel to the nearest ink, at most _REACH squared; exact, axis by axis."""
    limit = _REACH * _REACH
    nearest = np.where(ink_NHW, 0, limit).astype(np.int16)
    for axis in (1, 2):
        before = np.moveaxis(nearest, axis, 0)
        after = before.copy()
        for step in range(1, _REACH):
            np.minimum(after[step:], before[:-step] + np.int16(step * step), out=after[step:])
            np.minimum(after[:-step], before[step:] + np.int16(step * step), out=after[:-step])
        nearest = np.moveaxis(after, 0, axis)
    return np.minimum(nearest, limit).astype(np.float32)


def _draw(fields: npt.NDArray[np.int8], glyphs_N: Labels, field_per_pixel_N: Floats, seed: int) -> Images:
    """Images (N, 28, 28) of the given glyphs."""
    count = len(glyphs_N)
    x_NHW, y_NHW = _coordinates(field_per_pixel_N, seed)
    np.clip(x_NHW, 0, _FIELD - 1, out=x_NHW)
    np.clip(y_NHW, 0, _FIELD - 1, out=y_NHW)
    place = y_NHW.astype(np.int32)
    place *= _FIELD
    place += x_NHW.astype(np.int32)
    place += (glyphs_N * (_FIELD * _FIELD)).astype(np.int32)[:, None, None]
    # The field is three times as fine as the image: the nearest value is as good as interpolation.
    distance = np.take(fields.reshape(-1), place).astype(np.float32)
    distance *= (-1 / (_STEPS * field_per_pixel_N))[:, None, None]
    distance += uniform(key("stroke", seed), (count,), low=0.1, high=1.7)[:, None, None]
    ink = np.clip(distance, 0, 1, out=distance)
    _occlude(ink, seed)
    _strike(ink, seed)
    ink *= uniform(key("gain", seed), (count,), low=150, high=255)[:, None, None]
    noise = noise_bytes(key("noise", seed), ink.shape).astype(np.float32)
    noise -= 127.5
    noise *= uniform(key("grain", seed), (count,), high=0.25)[:, None, None]
    ink += noise
    images: Images = np.clip(ink + np.float32(0.5), 0, 255).astype(np.uint8)
    return images


def _coordinates(field_per_pixel_N: Floats, seed: int) -> tuple[Floats, Floats]:
    """Where in its distance field each pixel of each image looks: x and y, (N, 28, 28)."""
    count = len(field_per_pixel_N)
    cosine, sine = rotation(uniform(key("turn", seed), (count,), low=-20, high=20))
    shear = uniform(key("shear", seed), (count,), low=-0.25, high=0.25)
    scale = uniform(key("scale", seed), (2, count), low=0.85, high=1.17) * field_per_pixel_N
    shift = uniform(key("shift", seed), (2, count, 1), low=-2.5, high=2.5)
    wiggle_4NS = _interpolate(uniform(key("wiggle", seed), (4, count, 5), low=-0.9, high=0.9))
    row, column = pixel_centres(_SIZE) - shift
    centre = np.float32(_FIELD / 2)

    def along(axis: int, by_column: Floats, by_row: Floats) -> Floats:
        rows = scale[axis][:, None] * (by_row[:, None] * row + wiggle_4NS[2 * axis]) + centre
        columns = scale[axis][:, None] * (by_column[:, None] * column + wiggle_4NS[2 * axis + 1])
        return outer(rows, columns)

    return along(0, cosine + shear * sine, shear * cosine - sine), along(1, sine, cosine)


def _interpolate(controls: Floats) -> Floats:
    """Straight lines through K evenly spaced control values (..., K), at every pixel: (..., _SIZE)."""
    intervals = controls.shape[-1] - 1
    place = np.arange(_SIZE, dtype=np.float32) * np.float32(intervals / (_SIZE - 1))
    left = np.minimum(place.astype(np.int64), intervals - 1)
    weight = place - left.astype(np.float32)
    line: Floats = controls[..., left] * (1 - weight) + controls[..., left + 1] * weight
    return line


def _occlude(ink_NHW: Floats, seed: int) -> None:
    """Hide a rectangle of two of five images."""
    count = len(ink_NHW)
    extent = uniform(key("hide", seed), (2, count), low=3, high=7)
    extent *= uniform(key("hidden", seed), (count,)) < 0.4
    centre = uniform(key("where", seed), (2, count, 1), low=-12, high=12)
    outside = np.abs(pixel_centres(_SIZE) - centre) * 2 > extent[:, :, None]
    ink_NHW *= outside[0][:, :, None] | outside[1][:, None, :]


def _strike(ink_NHW: Floats, seed: int) -> None:
    """Draw a straight line across three of ten images."""
    struck = np.flatnonzero(uniform(key("struck", seed), (len(ink_NHW),)) < 0.3)
    count = len(struck)
    direction = uniform(key("slope", seed), (2, count), low=-1, high=1)
    length = np.sqrt(direction[0] * direction[0] + direction[1] * direction[1]) + np.float32(1e-6)
    normal = direction / length
    away = uniform(key("away", seed), (count, 1), low=-9, high=9)
    width = uniform(key("width", seed), (count,), low=0.7, high=1.5)[:, None, None]
    centres = pixel_centres(_SIZE)
    line = width - np.abs(outer(normal[0][:, None] * centres + away, normal[1][:, None] * centres))
    ink_NHW[struck] = np.maximum(ink_NHW[struck], np.clip(line, 0, 1))


# The font files and their rasteriser come with matplotlib.
_FONTS_OF = f" matplotlib {version('matplotlib')}"
_SET = EmbeddedSet(SPEC, VERSION, (TRAIN_SIZE, TEST_SIZE), lambda part: generate(part), _FONTS_OF)
Options, describe, open_set = NoOptions, _SET.describe, _SET.open_set
