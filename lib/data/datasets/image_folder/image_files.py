"""Finding the images of a folder: their classes by folders or by a file, and their part."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lib.data.datasets.tabular.table_files import read_table
from lib.data.sampler import held_out_by_hash
from lib.errors import ConfigError, DataError, os_errors, raise_faults

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
PARTS = ("train", "val")
LABELS = "labels.csv"
LAYOUTS = f"CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg, or *.jpg and {LABELS}"

_HELD_OUT = ("val", "valid", "validation", "test")  # the first that is there is used


class ImageFile(NamedTuple):
    """An image that is listed, but not opened. name: its path from the folder of its part."""

    path: str
    name: str
    label: str

    def mark(self) -> str:
        """Return what changes with the file. Raises ToolkitError if it cannot be read."""
        with os_errors("read"):
            status = Path(self.path).stat()
        return f"{self.label} {self.name} {status.st_size} {status.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """The images of both parts. split: how they were divided, for messages."""

    root: Path
    classes: tuple[str, ...]
    train: list[ImageFile]
    test: list[ImageFile]
    split: str


def find_root(data_dir: Path, cache_dir: Path) -> Path | None:
    """Return the folder of the images: `data_dir` or image_folder in it; None if neither has anything."""
    if (data_dir / PARTS[0]).is_dir():
        return data_dir
    if (own := data_dir / "image_folder").is_dir():
        return own
    is_cache = data_dir.resolve() == cache_dir.resolve()  # whose folders are no classes
    return data_dir if data_dir.is_dir() and not is_cache and any(data_dir.iterdir()) else None


def find_images(
    root: Path, *, percent: int, group: str = "", log: Callable[[str], None] = lambda _: None
) -> ImageFiles:
    """List the images of `root`, divided by its own folders or else by a hash of their names.

    percent: of the images for validation, unless `root` has a folder of them. group: regular expression;
    names with an equal match are in the same part. Raises ConfigError for faults of names and classes.
    """
    train = root / PARTS[0]
    test = next((root / name for name in _HELD_OUT if (root / name).is_dir()), None)
    if not train.is_dir() or not (test or (train / LABELS).is_file() or _folders(train)):
        return _divided(root, _listed(root, log, percent), percent, group, log)
    if test is None:
        return _divided(root, _listed(train, log, percent), percent, group, log)
    if group:
        what = f"CONFIG_IMAGE_FOLDER_GROUP={group} has no effect on {root}"
        raise ConfigError(
            what, why=f"it has a folder {test.name}/", todo="leave it out, or move all to train/"
        )
    parts, errors = list[list[ImageFile]](), list[DataError]()
    for folder in (train, test):
        try:
            parts.append(_listed(folder, log))
        except DataError as error:
            errors.append(error)
    if len(errors) > 1:
        faults = [fault for each in errors for fault in each.faults or (each.why or each.what,)]
        raise_faults(f"{root} cannot be used", faults, todo=errors[0].todo)
    if errors:
        raise errors[0]
    trained, evaluated = parts
    classes, others = ({image.label for image in part} for part in (trained, evaluated))
    if classes != others:
        why = f"only one of them has {', '.join(sorted(classes ^ others)[:5])}"
        what = f"{root}: train/ and {test.name}/ have different classes"
        raise DataError(what, why=why, todo="rename a misspelt one, add images of it, or remove it")
    return ImageFiles(root, _classes(root, trained), trained, evaluated, f"evaluated on {test.name}/")


def _classes(root: Path, images: Sequence[ImageFile]) -> tuple[str, ...]:
    classes = tuple(sorted({image.label for image in images}))
    if len(classes) < 2:
        todo = "add images of a second one"
        raise DataError(
            f"{root} has images of one class, {classes[0]}: there is nothing to tell apart", todo=todo
        )
    return classes


def _divided(
    root: Path, images: list[ImageFile], percent: int, group: str, log: Callable[[str], None]
) -> ImageFiles:
    """Divide by a hash. Raises ConfigError if a class would have no image to train on."""
    classes = _classes(root, images)
    keys = _groups(root, images, group) if group else [image.name for image in images]
    held_out = held_out_by_hash(keys, percent).tolist()
    train, test = (
        [image for image, out in zip(images, held_out, strict=True) if out == own] for own in (0, 1)
    )
    todo = "add images, or change CONFIG_IMAGE_FOLDER_VALIDATION_PCT"
    if not test:
        raise DataError(f"{root}: none of {len(images)} images is left for validation", todo=todo)
    lacking = [sorted({*classes} - {image.label for image in part}) for part in (train, test)]
    raise_faults(
        f"{root} has classes without an image to train on",
        [f"all images of class {name} are for validation" for name in lacking[0]],
        todo=todo,
    )
    if lacking[1]:
        log(f"{root}: no image for validation is of class {', '.join(lacking[1])}")
    by = f"the match of {group!r} in its name" if group else "its name"
    return ImageFiles(root, classes, train, test, f"{percent} % evaluated, each image by a hash of {by}")


def _groups(root: Path, images: Sequence[ImageFile], group: str) -> list[str]:
    """Return what the pattern, or its first group in parentheses, matches in each name."""
    symbol = f"CONFIG_IMAGE_FOLDER_GROUP={group}"
    try:
        pattern = re.compile(group)
    except re.error as error:
        todo = rf"write a backslash before a character that stands for itself: {re.escape(group)}"
        raise ConfigError(f"{symbol} is no regular expression", why=str(error), todo=todo) from error
    found = [pattern.search(image.name) for image in images]
    keys = [(match[1] if pattern.groups else match[0]) if match else "" for match in found]
    if without := [image.name for image, key in zip(images, keys, strict=True) if not key]:
        what = f"{symbol} matches nothing in {len(without)} of {len(images)} names in {root}"
        raise ConfigError(what, why=f"the first is {without[0]}", todo="change the pattern, or rename them")
    return keys


def _listed(folder: Path, log: Callable[[str], None], percent: int | None = None) -> list[ImageFile]:
    """Return the images of a part, those of a class by name. Raises DataError with all faults.

    percent: of them that will be for validation, if that is to be decided by their names.
    """
    if (folder / LABELS).is_file():
        return _by_file(folder, log)
    folders = _folders(folder)
    beside = [each for each in folder.iterdir() if each.is_file() and each.suffix.lower() in SUFFIXES]
    if not folders:
        what = f"{len(beside)} images without a class" if beside else "no images"
        example = min(beside).name if beside else "1.jpg"
        todo = f"move the images of each class into a folder of its name, or write {folder / LABELS}: "
        todo += f"name,label in its first line, then lines such as {example},LABEL"
        error = DataError(f"{folder} has {what}", why=f"it has neither folders nor {LABELS}", todo=todo)
        if beside and percent is not None:
            held_out = held_out_by_hash([each.name for each in beside], percent)
            error.train_size = len(beside) - int(held_out.sum())
        raise error
    images, faults, others = list[ImageFile](), list[str](), len(beside)
    for name in folders:
        known = len(images)
        for entry in walk(folder / name):
            if Path(entry.name).suffix.lower() not in SUFFIXES:
                others += 1
            elif entry.is_file():
                images.append(ImageFile(entry.path, entry.path.removeprefix(f"{folder}/"), name))
            else:
                faults.append(f"{entry.path} is a link to no file")
        if len(images) == known:
            faults.append(f"{folder / name} has no images: looked for {', '.join(sorted(SUFFIXES))}")
    raise_faults(f"{folder} cannot be used", faults, todo="add images, or remove it")
    if others:
        log(f"{folder}: {others} files that are no images of a class are left out")
    return images


def _folders(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and each.name[0] != ".")


def walk(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield the files below a folder, sorted, without those whose names begin with a dot."""
    with os_errors("read"):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir() and entry.name[0] != ".":
            yield from walk(entry.path)
        elif entry.name[0] != ".":
            yield entry


def _by_file(folder: Path, log: Callable[[str], None]) -> list[ImageFile]:
    """Return the images that labels.csv names. Raises DataError with all faults."""
    file = folder / LABELS
    table = read_table(file)
    for name in ("name", "label"):
        if name not in table.columns:
            todo = "make its first line name,label"
            raise DataError(f"{file} has no column {name!r}: it has {', '.join(table.columns)}", todo=todo)
    images, faults, rows = dict[str, ImageFile](), list[str](), dict[str, str]()
    for row, (given, label) in enumerate(zip(table.columns["name"], table.columns["label"], strict=True)):
        name, place = os.path.normpath(given), f"{file}, {table.row(row)}"
        if not label or not given:
            faults.append(f"{place} has no {'label' if given else 'name'}")
        elif rows.setdefault(name, place) != place:
            faults.append(f"{place}: {name} is there twice, first in {rows[name].rpartition(', ')[2]}")
        elif not (folder / name).is_file():
            faults.append(f"{place}: there is no file {folder / name}")
        images[name] = ImageFile(str(folder / name), name, label)
    raise_faults(f"{folder} cannot be used", faults, todo="mend it")
    files = (entry.path.removeprefix(f"{folder}/") for entry in walk(folder))
    if others := sum(name not in images for name in files if Path(name).suffix.lower() in SUFFIXES):
        log(f"{file} does not name {others} images in its folder: they are left out")
    return sorted(images.values(), key=lambda image: (image.label, image.name))
