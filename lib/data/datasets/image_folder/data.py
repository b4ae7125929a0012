"""A folder of images in the layout of ImageNet: train/CLASS/*.jpg and val/CLASS/*.jpg.

Decoding costs far more than reading pixels, so every image is decoded once, resized and
packed into one file of bytes, which is then read through a memory map.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from lib.data.cache import cached_folder, fingerprint
from lib.data.datasets.files import DataLocation, describe_images
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec
from lib.errors import DataError, os_error

_WHITE_16 = 65535
_SIXTEEN_BITS_IN_32 = ("PPM", "PNG")  # formats whose mode "I" holds 16 bits, scaled to all of them


# For damaged files.
_PILLOW_ERRORS = OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError


class BadSampleError(Exception):
    """The file is no image, or damaged; the text says why."""


def decode(file: Path, size: int) -> Images:
    """Return the centre square of an image as uint8 (3, size, size), upright as its EXIF data say.

    The shorter side is resized to `size`; 16-bit grey is scaled to 8 bits, transparency becomes white, and
    only the first frame is used. Raises BadSampleError, and ToolkitError if the disk fails.
    """
    try:
        with Image.open(file) as image:
            image.draft("RGB", (size, size))  # JPEG only: decode at the lowest sufficient resolution
            ImageOps.exif_transpose(image, in_place=True)
            width, height = image.size
            short = min(width, height)
            left, top = (width - short) / 2, (height - short) / 2
            # Equal to resizing the whole image and cropping, with less work.
            square = _rgb(image).resize(
                (size, size), Image.Resampling.BILINEAR, box=(left, top, left + short, top + short)
            )
    except UnidentifiedImageError as error:
        raise BadSampleError("it is not an image of a known format") from error
    except _PILLOW_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
            raise os_error(f"read {file}", error) from error
        raise BadSampleError(str(error) or type(error).__name__) from error
    return np.asarray(square).transpose(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB. Image.convert would clip 16 bits at 255, and drop transparency."""
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


VERSION = 3  # raise it whenever the packed data change
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

IMAGENET_SIZES = (1_281_167, 50_000)  # of ILSVRC 2012, assumed without files
IMAGENET_CLASSES = 1000

_NAME, _PARTS = "image_folder", ("train", "val")
_SKIPPED = "skipped.json"  # [file, reason] of each file that cannot be decoded
_BLOCK = 1024  # images between two progress lines
_MIN_DEVIATION = 1 / 255  # against division by zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/image_folder/Kconfig."""

    on_bad_sample: Literal["error", "skip"]


def describe(_: Options, location: DataLocation) -> Dataset:
    """Return the metadata by the names of the files, or of ImageNet. Raises DataError as `open_folder`."""
    assert location.image_size is not None
    root = _root(location.data_dir) if location.data_dir is not None else None
    classes = [] if root is None else _classes(root)
    count = len(classes) or IMAGENET_CLASSES
    # Mean and deviation are placeholders.
    spec = ImageSpec.square(_NAME, location.image_size, count, mean=(0.5,) * 3, std=(0.25,) * 3)
    if root is None:
        return describe_images(spec, IMAGENET_SIZES, f"as ImageNet has them, {IMAGENET_CLASSES} classes")
    train, test = (sum(len(_images(root / part / name)[0]) for name in classes) for part in _PARTS)
    source = f"image_folder: {train} + {test} files of {len(classes)} classes in {root}, not opened"
    return replace(describe_images(spec, (train, test), ""), source=source)


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open the images, packed into the cache on first use (`open_folder`)."""
    assert location.image_size is not None
    folders, skip_bad = (location.files, location.cache_dir), options.on_bad_sample == "skip"
    return open_folder(*folders, image_size=location.image_size, skip_bad=skip_bad, log=location.log)


def open_folder(
    data_dir: Path, cache_dir: Path, *, image_size: int, skip_bad: bool = False, log: Callable[[str], None]
) -> Dataset:
    """Open `data_dir` (or image_folder in it), packed into `cache_dir` at image_size x image_size pixels.

    The shorter side is resized to image_size and the longer one cropped at the centre. Mean and deviation are
    those of the training part. The pack is made again if the name, size or modification time of any file
    changes. skip_bad: leave out files that cannot be decoded, and list them in Dataset.skipped. Raises
    DataError if a part or class is missing or empty, and for undecodable files unless they are skipped.
    """
    assert image_size > 0
    root = _root(data_dir)
    if root is None:
        raise DataError(
            f"data set image_folder is not there: no folder train in {data_dir}",
            todo="point CONFIG_DATA_DIR to a folder with train/CLASS/*.jpg and val/CLASS/*.jpg",
        )
    classes = _classes(root)
    listings = {part: _list(root / part, classes, log) for part in _PARTS}
    marks = (mark for listing in listings.values() for *_, mark in listing)

    def fill(folder: Path) -> None:
        (folder / "classes.json").write_text(json.dumps(classes, indent=1) + "\n")
        skipped = []
        for part, listing in listings.items():
            files = [file for file, *_ in listing]
            colours, bad = _pack(files, folder / f"{part}-images.npy", image_size, part, log)
            labels = [label for row, (_, label, _) in enumerate(listing) if row not in bad]
            np.save(folder / f"{part}-labels.npy", np.array(labels, np.int64))
            np.save(folder / f"{part}-colours.npy", colours)
            skipped += [(str(files[row].relative_to(root)), reason) for row, reason in bad.items()]
        (folder / _SKIPPED).write_text(json.dumps(skipped, indent=1) + "\n")

    folder = cache_dir / f"image_folder-{fingerprint(root)[:8]}-{image_size}"
    identity = fingerprint("image_folder", VERSION, image_size, root, *classes, *marks)
    cached_folder(folder, identity=identity, fill=fill, log=log)
    skipped = [f"{root / file}: {reason}" for file, reason in json.loads((folder / _SKIPPED).read_text())]
    labels = {part: np.load(folder / f"{part}-labels.npy") for part in _PARTS}
    if skipped and not skip_bad:
        count = sum(map(len, listings.values()))
        for line in skipped:
            log(f"Cannot be decoded: {line}")
        raise DataError(
            f"{len(skipped)} of {count} images cannot be decoded",
            why=skipped[0] if len(skipped) == 1 else f"{skipped[0]}; all are named above",
            todo="remove or replace them, or set CONFIG_ON_BAD_SAMPLE_SKIP=y to train without them",
        )
    for part, (label, name) in itertools.product(_PARTS if skipped else (), enumerate(classes)):
        if label not in labels[part]:
            raise DataError(f"{root / part / name} has no image that can be decoded")
    train, test = (
        # Rows of skipped images are left at the end.
        ArrayPart(np.load(folder / f"{part}-images.npy", mmap_mode="r")[: len(labels[part])], labels[part])
        for part in _PARTS
    )
    mean, std = _normalisation(np.load(folder / "train-colours.npy"))
    spec = ImageSpec.square(_NAME, image_size, len(classes), mean=mean, std=std)
    without = f" without {len(skipped)} that cannot be decoded" if skipped else ""
    source = f"image_folder: {train.size} + {test.size} images from {root}{without}, packed in {folder}"
    return Dataset(spec, train, test, source, skipped=tuple(skipped), class_names=tuple(classes))


def _root(data_dir: Path) -> Path | None:
    return next((path for path in (data_dir, data_dir / "image_folder") if (path / "train").is_dir()), None)


def _classes(root: Path) -> list[str]:
    """Return the names of the classes, which must be equal in both parts."""
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


def _images(folder: Path) -> tuple[list[os.DirEntry[str]], int]:
    """Return the images in the folder of a class, and the number of other entries."""
    entries = list(os.scandir(folder))
    images = [entry for entry in entries if Path(entry.name).suffix.lower() in SUFFIXES and entry.is_file()]
    if not images:
        raise DataError(f"{folder} has no images", why=f"looked for {', '.join(sorted(SUFFIXES))}")
    return images, len(entries) - len(images)


def _list(folder: Path, classes: list[str], log: Callable[[str], None]) -> list[tuple[Path, int, str]]:
    """Return each file in the order they are packed, its label, and its name, size and modification time."""
    listing, others = [], 0
    for label, name in enumerate(classes):
        images, more = _images(folder / name)
        others += more
        for entry in sorted(images, key=lambda entry: entry.name):
            status = entry.stat()
            mark = f"{name}/{entry.name} {status.st_size} {status.st_mtime_ns}"
            listing.append((Path(entry.path), label, mark))
    if others:
        log(f"{folder}: {others} entries that are no images are left out")
    return listing


def _pack(
    files: list[Path], target: Path, image_size: int, part: str, log: Callable[[str], None]
) -> tuple[npt.NDArray[np.int64], dict[int, str]]:
    """Decode `files` into one uint8 array (N, 3, image_size, image_size) on disk, without undecodable ones.

    Returns a histogram of pixel values per colour, (3, 256), and the reasons of undecodable files by index.
    """
    colours, bad = np.zeros((3, 256), np.int64), dict[int, str]()
    shape = len(files), 3, image_size, image_size
    packed = np.lib.format.open_memmap(target, mode="w+", dtype=np.uint8, shape=shape)

    def decode_to(row: int, number: int) -> str:
        try:
            packed[row] = decode(files[number], image_size)
        except BadSampleError as error:
            return str(error)
        return ""

    filled = 0
    with ThreadPoolExecutor(thread_name_prefix="decode") as pool:
        for start in range(0, len(files), _BLOCK):
            numbers = range(start, min(start + _BLOCK, len(files)))
            rows = range(filled, filled + len(numbers))
            reasons = list(pool.map(decode_to, rows, numbers))
            good = [row for row, reason in zip(rows, reasons, strict=True) if not reason]
            if len(good) < len(rows):
                bad |= {number: reason for number, reason in zip(numbers, reasons, strict=True) if reason}
                packed[filled : filled + len(good)] = packed[good]
            for colour, counts in enumerate(colours):
                counts += np.bincount(packed[filled : filled + len(good), colour].ravel(), minlength=256)
            filled += len(good)
            log(f"image_folder: packed {numbers.stop} of {len(files)} images of {part}")
    packed.flush()
    return colours, bad


def _normalisation(colours: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per colour, for pixels in 0..1, from histograms (3, 256)."""
    brightness = np.arange(256) / 255
    shares = colours / colours.sum(axis=1, keepdims=True)
    mean = shares @ brightness
    deviation = np.sqrt((shares * (brightness - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.maximum(deviation, _MIN_DEVIATION).tolist())
