"""A folder of images of any sizes and modes, with a class for each.

Decoding costs far more than reading pixels, so every image is decoded once, resized and
packed into one file of bytes, which is then read through a memory map.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from lib.data.cache import cached_folder, content_of, fingerprint
from lib.data.datasets.class_names import naming_note
from lib.data.datasets.files import DataLocation, describe_images, file_in_place_of
from lib.data.datasets.image_folder.image_files import (
    LAYOUTS,
    PARTS,
    SUFFIXES,
    ImageFile,
    ImageFiles,
    find_images,
    find_root,
    walk,
)
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec, Indices
from lib.errors import DataError, os_error, raise_faults

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
        if isinstance(error, OSError) and error.errno not in (None, errno.EACCES):  # an error of the disk
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


VERSION = 4  # raise it whenever the packed data change

IMAGENET_SIZES = (1_281_167, 50_000)  # of ILSVRC 2012, assumed without files
IMAGENET_CLASSES = 1000

_NAME = "image_folder"
_SKIPPED = "skipped.json"  # [file, reason] of each file that cannot be decoded
_BLOCK = 1024  # images between two progress lines
_MIN_DEVIATION = 1 / 255  # against division by zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/image_folder/Kconfig."""

    validation_pct: int
    group: str
    on_bad_sample: Literal["error", "skip"]


def describe(options: Options, location: DataLocation) -> Dataset:
    """Return the metadata by the names of the files, or of ImageNet. Raises ConfigError as `open_set`."""
    assert location.image_size is not None
    if location.data_dir:
        _check_no_file(location)
    root = location.data_dir and find_root(location.data_dir, location.cache_dir)
    percent, group = options.validation_pct, options.group
    found = find_images(root, percent=percent, group=group) if root else None
    count = len(found.classes) if found else IMAGENET_CLASSES
    # Mean and deviation are placeholders.
    spec = ImageSpec.square(_NAME, location.image_size, count, mean=(0.5,) * 3, std=(0.25,) * 3)
    if found is None:
        absent = f"{location.data_dir} has no images; planned " if location.data_dir else ""
        return describe_images(
            spec, IMAGENET_SIZES, f"{absent}as ImageNet has them, {IMAGENET_CLASSES} classes"
        )
    train, test = len(found.train), len(found.test)
    source = f"image_folder: {train} + {test} files of {count} classes in {root}, not opened"
    return replace(describe_images(spec, (train, test), ""), source=source)


def _check_no_file(location: DataLocation) -> None:
    if why := file_in_place_of(location.files):
        todo = f"point CONFIG_DATA_DIR to a folder with {LAYOUTS}"
        raise DataError("data set image_folder is not there", why=why, todo=todo)


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open the images, packed into the cache at image_size x image_size pixels on first use.

    The shorter side is resized to image_size and the longer one cropped at the centre. Mean and deviation are
    those of the training part. The pack is made again if the name, size or modification time of any file
    changes, or its part. on_bad_sample: "skip" leaves out files that cannot be decoded, and lists them in
    Dataset.skipped. Raises ConfigError if a part or class is missing or empty, and for all undecodable files
    unless they are skipped.
    """
    assert location.image_size is not None
    size, log = location.image_size, location.log
    _check_no_file(location)
    root = find_root(location.files, location.cache_dir)
    if root is None:
        what = f"data set image_folder is not there: {location.files} is no folder with images"
        raise DataError(what, todo=f"point CONFIG_DATA_DIR to a folder with {LAYOUTS}")
    try:
        found = find_images(root, percent=options.validation_pct, group=options.group, log=log)
    except DataError as error:
        # Bad images are reported with it: they would be the next error.
        if error.why and options.on_bad_sample == "error":
            log(f"{error.what}: looking for bad images, too")  # takes as long as packing them
            bad = _undecodable(root, size)
            faults = [*(error.faults or (error.why,)), *bad] if bad else ()
            raise_faults(error.what, faults, todo=error.todo, train_size=error.train_size)
        raise
    listings = dict(zip(PARTS, (found.train, found.test), strict=True))

    def fill(folder: Path) -> None:
        (folder / "classes.json").write_text(json.dumps(found.classes, indent=1) + "\n")
        skipped = []
        for part, images in listings.items():
            files = [Path(image.path) for image in images]
            colours, sizes, bad = _pack(files, folder / f"{part}-images.npy", size, part, log)
            kept = [image for row, image in enumerate(images) if row not in bad]
            labels = [found.classes.index(image.label) for image in kept]
            np.save(folder / f"{part}-labels.npy", np.array(labels, np.int64))
            np.save(folder / f"{part}-colours.npy", colours)
            np.save(folder / f"{part}-sizes.npy", sizes)
            names = [os.path.relpath(image.path, root) for image in kept]
            (folder / f"{part}-names.json").write_text(json.dumps(names))
            skipped += [(os.path.relpath(files[row], root), reason) for row, reason in bad.items()]
        (folder / _SKIPPED).write_text(json.dumps(skipped, indent=1) + "\n")

    marks = [mark for part, images in listings.items() for mark in (part, *map(ImageFile.mark, images))]
    # Two ways to divide the images do not replace each other's pack.
    folder = location.cache_dir / f"image_folder-{fingerprint(root, found.split)[:8]}-{size}"
    identity = fingerprint("image_folder", VERSION, size, root, *found.classes, *marks)
    cached_folder(folder, identity=identity, fill=fill, log=log)
    return _packed(folder, found, listings, skip=options.on_bad_sample == "skip")


def _undecodable(root: Path, size: int) -> list[str]:
    """Return each image below `root` that cannot be decoded, with the reason."""

    def fault(file: Path) -> str:
        try:
            decode(file, size)
        except BadSampleError as error:
            return f"{file}: {error}"
        return ""

    files = [Path(each.path) for each in walk(root) if Path(each.name).suffix.lower() in SUFFIXES]
    with ThreadPoolExecutor(thread_name_prefix="decode") as pool:
        return [*filter(None, pool.map(fault, filter(Path.is_file, files)))]


def _packed(
    folder: Path, found: ImageFiles, listings: Mapping[str, Sequence[ImageFile]], *, skip: bool
) -> Dataset:
    """Return the data set in `folder`. Raises DataError for images that are not in it unless `skip`."""
    root, classes = found.root, found.classes
    skipped = [f"{root / file}: {reason}" for file, reason in json.loads((folder / _SKIPPED).read_text())]
    labels = {part: np.load(folder / f"{part}-labels.npy") for part in PARTS}
    if not skip:
        raise_faults(
            f"{len(skipped)} of {sum(map(len, listings.values()))} images cannot be decoded",
            skipped,
            todo="remove or replace them, or set CONFIG_ON_BAD_SAMPLE_SKIP=y to train without them",
        )
    for part in PARTS if skipped else ():
        lost = {*range(len(classes))} - {*np.unique(labels[part]).tolist()}
        names = {image.label for image in listings[part]} & {classes[label] for label in lost}
        faults = [f"no image of class {name} in {part} can be decoded" for name in sorted(names)]
        raise_faults(f"{root} cannot be used", faults, todo="replace them, or remove the class")
    train, test = (
        # Rows of skipped images are left at the end.
        ArrayPart(np.load(folder / f"{part}-images.npy", mmap_mode="r")[: len(labels[part])], labels[part])
        for part in PARTS
    )
    mean, std = _normalisation(np.load(folder / "train-colours.npy"))
    spec = ImageSpec.square(_NAME, train.inputs.shape[-1], len(classes), mean=mean, std=std)
    sides = np.concatenate([np.load(folder / f"{part}-sizes.npy") for part in PARTS])
    least, usual, most = (
        f"{width:.0f}x{height:.0f}" for width, height in np.quantile(sides, (0, 0.5, 1), axis=0)
    )
    without = f" without {len(skipped)} that cannot be decoded" if skipped else ""
    source = (
        f"image_folder: {train.size} + {test.size} images from {root}{without}, {found.split}; "
        f"{least} to {most} pixels, median {usual}; packed in {folder}, SHA-256 {content_of(folder)[:16]}"
    ) + naming_note(classes)
    return Dataset(spec, train, test, source, skipped=tuple(skipped), class_names=classes)


def show(_: Dataset, part: ArrayPart, places: Indices) -> list[str]:
    """Return the names of images, for `make data-check`."""
    file = Path(str(cast(np.memmap[Any, Any], part.inputs).filename))  # in the pack
    names = json.loads(file.with_name(file.name.replace("images.npy", "names.json")).read_text())
    return [names[place] for place in places.tolist()]


def _pack(
    files: list[Path], target: Path, image_size: int, part: str, log: Callable[[str], None]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[int, str]]:
    """Decode `files` into one uint8 array (N, 3, image_size, image_size) on disk, without undecodable ones.

    Returns a histogram of pixel values per colour, (3, 256), width and height of the decodable files, (N, 2),
    and the reasons of undecodable files by index.
    """
    colours, bad = np.zeros((3, 256), np.int64), dict[int, str]()
    sizes = np.zeros((len(files), 2), np.int64)
    shape = len(files), 3, image_size, image_size
    packed = np.lib.format.open_memmap(target, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):  # not on macOS: a disk that fills later ends the process by SIGBUS
        with target.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, target.stat().st_size)

    def decode_to(row: int, number: int) -> str:
        try:
            packed[row] = decode(files[number], image_size)
        except BadSampleError as error:
            return str(error)
        with Image.open(files[number]) as image:  # reads no more than its header
            sizes[row] = image.size
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
                sizes[filled : filled + len(good)] = sizes[good]
            for colour, counts in enumerate(colours):
                counts += np.bincount(packed[filled : filled + len(good), colour].ravel(), minlength=256)
            filled += len(good)
            log(f"image_folder: packed {numbers.stop} of {len(files)} images of {part}")
    packed.flush()
    return colours, sizes[:filled], bad


def _normalisation(colours: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per colour, for pixels in 0..1, from histograms (3, 256)."""
    brightness = np.arange(256) / 255
    shares = colours / colours.sum(axis=1, keepdims=True)
    mean = shares @ brightness
    deviation = np.sqrt((shares * (brightness - mean[:, None]) ** 2).sum(axis=1))
    return tuple(mean.tolist()), tuple(np.maximum(deviation, _MIN_DEVIATION).tolist())
