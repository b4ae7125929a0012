"""What is known of a data set that nobody has opened: enough for a plan, and for nothing else.

Of files that are there names, sizes and headers are looked at; of others what is published counts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lib.data.datasets import digits, scenes
from lib.data.datasets.catalogue import BINARY_SETS, IDX_SETS
from lib.data.datasets.opening import sizes_on_disk
from lib.data.datasets.sudoku.generator import LEVELS
from lib.data.datasets.sudoku.opening import SudokuOptions, check_sizes
from lib.data.datasets.text_files import TextOptions, check_lengths
from lib.data.datasets.token_files import map_bins
from lib.data.types import ArrayPart, Dataset, ImageSpec, PuzzleSpec, TextSpec, TokenPart

IDX_SIZES = (60_000, 10_000)  # of MNIST and what copies its layout
IMAGENET_SIZES = (1_281_167, 50_000)  # of ILSVRC 2012, what a folder of images most often is
IMAGENET_CLASSES = 1000


def unopened(
    name: str,
    *,
    data_dir: Path | None,
    image_size: int,
    text: TextOptions | None,
    sudoku: SudokuOptions | None = None,
) -> Dataset | None:
    """The shapes and sizes of data set `name`; its samples are all zero. None: only its contents can tell.

    data_dir: where files are looked for, if anywhere. Raises what `lib.data.open_dataset` does, as far as
    a look can tell.
    """
    if name == "token_bins":
        assert text is not None and text.vocab_size is not None
        return _tokens(text.vocab_size, text.block_size, data_dir)
    if name == "sudoku":
        assert sudoku is not None
        check_sizes(sudoku)
        return _puzzles(sudoku)
    images = _images(name, image_size, data_dir)
    if images is None:
        return None
    spec, train_size, test_size, source = images
    return Dataset(spec, _zeros(spec, train_size), _zeros(spec, test_size), source)


def _images(name: str, image_size: int, data_dir: Path | None) -> tuple[ImageSpec, int, int, str] | None:
    generator = {"digits": digits, "scenes": scenes}.get(name)
    if generator is not None:
        sizes = generator.TRAIN_SIZE, generator.TEST_SIZE
        return generator.SPEC, *sizes, f"{name}: as it is generated, {_told(*sizes)}"
    if name in IDX_SETS or name in BINARY_SETS:
        there = sizes_on_disk(name, data_dir) if data_dir is not None else None
        published = IDX_SIZES
        if name in BINARY_SETS:
            published = BINARY_SETS[name].train_size, BINARY_SETS[name].test_size
        sizes, where = (published, "as published") if there is None else (there[:2], f"in {there[2]}")
        spec = IDX_SETS[name].spec if name in IDX_SETS else BINARY_SETS[name].spec
        return spec, *sizes, f"{name}: {where}, {_told(*sizes)}"
    if name != "image_folder":
        return None
    # Imported when it is asked for: it needs Pillow, which takes time to import.
    from lib.data.datasets.image_folder import look_into_folder

    if data_dir is not None and (looked := look_into_folder(data_dir, image_size=image_size)) is not None:
        return looked
    spec = ImageSpec(
        name=name,
        channels=3,
        height=image_size,
        width=image_size,
        classes=IMAGENET_CLASSES,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        synthetic=False,
    )
    what = f"as ImageNet has them, {IMAGENET_CLASSES} classes, {_told(*IMAGENET_SIZES)}"
    return spec, *IMAGENET_SIZES, f"{name}: {what}"


def _tokens(vocab_size: int, block_size: int, data_dir: Path | None) -> Dataset:
    """As many as the files have; where there are none, as many as never end."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    lengths, told = (10**8, 10**7), f"any number of tokens below {vocab_size}"
    bins = map_bins(data_dir, vocab_size=vocab_size) if data_dir is not None else None
    if bins is not None:
        lengths = len(bins.train), len(bins.validation)
        told = f"{lengths[0]} + {lengths[1]} tokens in {bins.place}, not opened"
    check_lengths("token_bins", *lengths, block_size=block_size)
    train, test = (
        TokenPart(np.broadcast_to(dtype(0), (length,)), block_size, shifted=shifted)
        for length, shifted in zip(lengths, (True, False), strict=True)
    )
    spec = TextSpec(
        name="token_bins",
        vocab_size=vocab_size,
        block_size=block_size,
        unit="token",
        validation_tokens=lengths[1] - 1,
        validation_bytes=None,
    )
    return Dataset(spec, train, test, f"token_bins: {told}")


def _puzzles(options: SudokuOptions) -> Dataset:
    spec = PuzzleSpec(name="sudoku", side=LEVELS[options.level].side, synthetic=True)
    train, test = (
        ArrayPart(rows, rows)
        for size in (options.train_size, options.test_size)
        for rows in (np.broadcast_to(np.uint8(0), (size, *spec.input_shape)),)
    )
    source = f"sudoku: as it is generated, {train.size} + {test.size} puzzles of level {options.level}"
    return Dataset(spec, train, test, source)


def _zeros(spec: ImageSpec, size: int) -> ArrayPart:
    """As large as the real one to whoever asks, and one byte to the memory."""
    return ArrayPart(
        np.broadcast_to(np.uint8(0), (size, *spec.input_shape)), np.broadcast_to(np.int64(0), (size,))
    )


def _told(train_size: int, test_size: int) -> str:
    return f"{train_size} + {test_size} images, not opened"
