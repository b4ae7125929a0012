"""A folder of images in the layout of ImageNet: train/CLASS/*.jpg and val/CLASS/*.jpg.

Decoding costs far more than reading pixels, so every image is decoded once, resized and
packed into one file of bytes, which is then read through a memory map.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from lib.data.cache import cached_folder, fingerprint
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec
from lib.errors import DataError

VERSION = 2  # raise it whenever a packed pixel changes, or what is kept beside them
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

_PARTS = ("train", "val")
_BLOCK = 1024  # images between two reports
_LEAST_DEVIATION = 1 / 255  # of a colour that is the same in all images, and is divided by it


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files of one part in the order they are packed, and their labels."""

    files: list[Path]
    labels: list[int]
    marks: list[str]  # name, size and time of change of each file


def open_folder(data_dir: Path, *, cache_dir: Path, image_size: int, say: Callable[[str], None]) -> Dataset:
    """Open `data_dir` (or image_folder in it), packed into `cache_dir` at image_size x image_size pixels.

    The shorter side is resized to image_size and the longer one cropped at the centre. Pixels are
    normalised by the mean and deviation of each colour over the training part, which need not be of
    photographs. The pack is made again when the name, size or time of change of any file differs.
    Raises DataError where a part or class is missing or an image cannot be decoded.
    """
    assert image_size > 0
    root = next((path for path in (data_dir, data_dir / "image_folder") if (path / "train").is_dir()), None)
    if root is None:
        raise DataError(
            f"data set image_folder is not there: no folder train in {data_dir}",
            todo="point CONFIG_DATA_DIR to a folder with train/CLASS/*.jpg and val/CLASS/*.jpg",
        )
    classes = _classes(root)
    listings = {part: _list(root / part, classes, say) for part in _PARTS}
    marks = (mark for listing in listings.values() for mark in listing.marks)
    identity = fingerprint("image_folder", VERSION, image_size, root, *classes, *marks)

    def fill(folder: Path) -> None:
        (folder / "classes.json").write_text(json.dumps(classes, indent=1) + "\n")
        for part, listing in listings.items():
            np.save(folder / f"{part}-labels.npy", np.array(listing.labels, np.int64))
            seen = _pack(listing.files, folder / f"{part}-images.npy", image_size, part, say)
            np.save(folder / f"{part}-colours.npy", seen)

    folder = cached_folder(
        cache_dir / f"image_folder-{fingerprint(root)[:8]}-{image_size}",
        identity=identity,
        fill=fill,
        say=say,
    )
    train, test = (
        ArrayPart(
            np.load(folder / f"{part}-images.npy", mmap_mode="r"), np.load(folder / f"{part}-labels.npy")
        )
        for part in _PARTS
    )
    mean, std = _normalisation(np.load(folder / "train-colours.npy"))
    spec = ImageSpec(
        name="image_folder",
        channels=3,
        height=image_size,
        width=image_size,
        classes=len(classes),
        mean=mean,
        std=std,
        synthetic=False,
    )
    return Dataset(
        spec, train, test, f"image_folder: {train.size} + {test.size} images from {root}, packed in {folder}"
    )


def _classes(root: Path) -> list[str]:
    """The names of the classes, which must be the same in both parts."""
    names = {}
    for part in _PARTS:
        if not (root / part).is_dir():
            raise DataError(f"{root / part} is missing", todo="image_folder needs both train/ and val/")
        names[part] = {path.name for path in (root / part).iterdir() if path.is_dir()}
    if names["train"] != names["val"]:
        only = sorted(names["train"] ^ names["val"])
        raise DataError(
            f"{root}: train/ and val/ have different classes",
            why=f"only one of them has {', '.join(only[:5])}",
        )
    if not names["train"]:
        raise DataError(f"{root / 'train'} has no folders", why="each class is a folder of images")
    return sorted(names["train"])


def _list(folder: Path, classes: list[str], say: Callable[[str], None]) -> _Listing:
    listing, others = _Listing([], [], []), 0
    for label, name in enumerate(classes):
        before = len(listing.files)
        for entry in sorted(os.scandir(folder / name), key=lambda entry: entry.name):
            if Path(entry.name).suffix.lower() not in SUFFIXES or not entry.is_file():
                others += 1
                continue
            status = entry.stat()
            listing.files.append(Path(entry.path))
            listing.labels.append(label)
            listing.marks.append(f"{name}/{entry.name} {status.st_size} {status.st_mtime_ns}")
        if len(listing.files) == before:
            raise DataError(f"{folder / name} has no images", why=f"looked for {', '.join(sorted(SUFFIXES))}")
    if others:
        say(f"{folder}: {others} entries that are no images are left out")
    return listing


def _pack(
    files: list[Path], target: Path, image_size: int, part: str, say: Callable[[str], None]
) -> npt.NDArray[np.int64]:
    """Decode `files` into one uint8 array (N, 3, image_size, image_size) on disk.

    Returns (3, 256): how many pixels there are of each brightness of each colour.
    """
    colours = np.zeros((3, 256), np.int64)
    packed = np.lib.format.open_memmap(
        target, mode="w+", dtype=np.uint8, shape=(len(files), 3, image_size, image_size)
    )

    def decode_to(row: int) -> None:
        packed[row] = _decode(files[row], image_size)

    with ThreadPoolExecutor(thread_name_prefix="decode") as pool:
        for start in range(0, len(files), _BLOCK):
            end = min(start + _BLOCK, len(files))
            for _ in pool.map(decode_to, range(start, end)):
                pass
            for colour, counts in enumerate(colours):
                counts += np.bincount(packed[start:end, colour].ravel(), minlength=256)
            say(f"image_folder: packed {end} of {len(files)} images of {part}")
    packed.flush()
    return colours


def _normalisation(colours: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each colour, of pixels between 0 and 1, from their counts (3, 256)."""
    brightness = np.arange(256) / 255
    shares = colours / colours.sum(axis=1, keepdims=True)
    mean = shares @ brightness
    deviation = np.sqrt((shares * (brightness - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.maximum(deviation, _LEAST_DEVIATION).tolist())


def _decode(file: Path, size: int) -> Images:
    """uint8 (3, size, size)."""
    try:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))  # JPEG only: decode at the least sufficient resolution
            width, height = image.size
            short = min(width, height)
            left, top = (width - short) / 2, (height - short) / 2
            # Resizing the centre square is resizing all of it and cropping, without the work thrown away.
            square = image.convert("RGB").resize(
                (size, size), Image.Resampling.BILINEAR, box=(left, top, left + short, top + short)
            )
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{file} cannot be decoded", why=str(error), todo="remove or replace the file"
        ) from error
    return np.asarray(square).transpose(2, 0, 1)
