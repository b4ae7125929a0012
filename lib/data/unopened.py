"""What is known of a data set that nobody has opened: enough for a plan, and for nothing else."""

from __future__ import annotations

import numpy as np

from lib.data import digits, scenes
from lib.data.catalogue import BINARY_SETS, IDX_SETS
from lib.data.sudoku.generator import LEVELS
from lib.data.sudoku.opening import SudokuOptions
from lib.data.text import TextOptions
from lib.data.types import ArrayPart, Dataset, ImageSpec, PuzzleSpec, TextSpec, TokenPart

IDX_SIZES = (60_000, 10_000)  # of MNIST and what copies its layout
IMAGENET_SIZES = (1_281_167, 50_000)  # of ILSVRC 2012, what a folder of images most often is
IMAGENET_CLASSES = 1000


def unopened(
    name: str, *, image_size: int, text: TextOptions | None, sudoku: SudokuOptions | None = None
) -> Dataset | None:
    """The shapes and sizes of data set `name`; its samples are all zero. None: only its files can tell."""
    if name == "token_bins":
        assert text is not None and text.vocab_size is not None
        return _tokens(text.vocab_size, text.block_size)
    if name == "sudoku":
        assert sudoku is not None
        return _puzzles(sudoku)
    images = _images(name, image_size)
    if images is None:
        return None
    spec, train_size, test_size, source = images
    return Dataset(spec, _zeros(spec, train_size), _zeros(spec, test_size), source)


def _images(name: str, image_size: int) -> tuple[ImageSpec, int, int, str] | None:
    generator = {"digits": digits, "scenes": scenes}.get(name)
    if generator is not None:
        sizes = generator.TRAIN_SIZE, generator.TEST_SIZE
        return generator.SPEC, *sizes, f"{name}: as it is generated, {_told(*sizes)}"
    if name in IDX_SETS:
        return IDX_SETS[name].spec, *IDX_SIZES, f"{name}: as published, {_told(*IDX_SIZES)}"
    if name in BINARY_SETS:
        found = BINARY_SETS[name]
        sizes = found.train_size, found.test_size
        return found.spec, *sizes, f"{name}: as published, {_told(*sizes)}"
    if name != "image_folder":
        return None
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


def _tokens(vocab_size: int, block_size: int) -> Dataset:
    """As many as never end: of files of tokens nothing but the vocabulary is known."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    train, test = (
        TokenPart(np.broadcast_to(dtype(0), (length,)), block_size, shifted=shifted)
        for length, shifted in ((10**8, True), (10**7, False))
    )
    spec = TextSpec(
        name="token_bins",
        vocab_size=vocab_size,
        block_size=block_size,
        unit="token",
        validation_tokens=10**7 - 1,
        validation_bytes=None,
    )
    return Dataset(spec, train, test, f"token_bins: any number of tokens below {vocab_size}")


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
