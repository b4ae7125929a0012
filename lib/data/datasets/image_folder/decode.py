"""Image files to pixels of 8 bits in three colours."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from lib.data.types import Images
from lib.errors import os_error

_WHITE_16 = 65535
_SIXTEEN_BITS_IN_32 = ("PPM", "PNG")  # formats whose mode "I" holds 16 bits, scaled to all of them


class BadSampleError(Exception):
    """A file that is no image, or a damaged one; the text says why."""


def decode(file: Path, size: int) -> Images:
    """Return the centre square of an image as uint8 (3, size, size), upright as its EXIF data say.

    The shorter side is resized to `size`. Grey values of 16 bits are scaled to 8, and what is transparent
    shows white. Of several frames the first is taken. Raises BadSampleError, and ToolkitError for the disk.
    """
    try:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))  # JPEG only: decode at the least sufficient resolution
            ImageOps.exif_transpose(image, in_place=True)
            width, height = image.size
            short = min(width, height)
            left, top = (width - short) / 2, (height - short) / 2
            # Resizing the centre square is resizing all of it and cropping, without the work thrown away.
            square = _rgb(image).resize(
                (size, size), Image.Resampling.BILINEAR, box=(left, top, left + short, top + short)
            )
    except UnidentifiedImageError as error:
        raise BadSampleError("it is no image of a known format") from error
    except (
        *(OSError, SyntaxError, ValueError, EOFError, struct.error),  # Pillow's, of damaged files
        Image.DecompressionBombError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not of the file's content
            raise os_error(f"read {file}", error) from error
        raise BadSampleError(str(error) or type(error).__name__) from error
    return np.asarray(square).transpose(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    """`image` in mode RGB. Image.convert would clip 16 bits at 255, and drop transparency."""
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS_IN_32)
    if sixteen:
        values = np.asarray(image).astype(np.uint32)
        clear = image.info.get("transparency")
        if isinstance(clear, int):
            values[values == clear] = _WHITE_16
        return Image.fromarray(((values * 255 + _WHITE_16 // 2) // _WHITE_16).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floats"
        raise ValueError(f"its pixels are 32-bit {kind}, without a known white: store 8 or 16 bits")
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), whole).convert("RGB")
    return image.convert("RGB")
