"""Every data set as a few samples: in files of its published format, or by generators that make few."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from PIL import Image

from lib.data.datasets.digits import data as digits
from lib.data.datasets.scenes import data as scenes
from lib.data.datasets.texts import markov
from lib.data.datasets.texts.corpus import Corpus, Texts
from tests.support.examples import told_of

TRAIN, TEST = 24, 8


@contextmanager
def few_generated() -> Iterator[None]:
    """What is generated, or found with Python, is little."""
    with ExitStack() as patches:
        for module in (digits, scenes):
            few = replace(module._SET, sizes=(TRAIN, TEST))
            functions = {"describe": few.describe, "open_set": few.open_set}
            patches.enter_context(mock.patch.multiple(module, TRAIN_SIZE=TRAIN, TEST_SIZE=TEST, **functions))
        patches.enter_context(mock.patch.multiple(markov, TRAIN_BYTES=4000, VALIDATION_BYTES=400))
        text = Path(__file__).read_bytes()
        library = Corpus("here", "here", lambda: Texts(text, text[:400], ""))
        patches.enter_context(mock.patch("lib.data.datasets.texts.data.python_library", lambda: library))
        for others in told_of("few_generated"):
            for patch in others():
                patches.enter_context(patch)
        yield


def write_files(data: Path) -> None:
    """The sets that are made of files, in folders of `data`."""
    random = np.random.default_rng(0)
    for name in ("mnist", "fashion_mnist"):
        for part, size in (("train", TRAIN), ("t10k", TEST)):
            images = random.integers(0, 256, (size, 28, 28), dtype=np.uint8)
            _write(data / name / f"{part}-images-idx3-ubyte", _idx(images))
            _write(data / name / f"{part}-labels-idx1-ubyte", _idx(np.arange(size, dtype=np.uint8) % 10))
    for name, label_bytes, *files in (
        ("cifar10", 1, "data_batch_1.bin", "test_batch.bin"),
        ("cifar100", 2, "train.bin", "test.bin"),
    ):
        for file, size in zip(files, (TRAIN, TEST), strict=True):
            records = random.integers(0, 10, (size, label_bytes + 3 * 32 * 32), dtype=np.uint8)
            _write(data / name / file, records.tobytes())
    for label in ("a", "b"):
        for number in range((TRAIN + TEST) // 2):
            pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            file = data / "image_folder" / label / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    for part, size in (("train", 4000), ("val", 400)):
        _write(data / "token_bins" / f"{part}.bin", random.integers(0, 90, size).astype(np.uint16).tobytes())
    text = Path(__file__).read_text()
    _write(data / "shakespeare" / "input.txt", text.encode())
    for name in ("wikitext2", "wikitext103"):
        for part, content in (("train", text[: len(name) * 200]), ("valid", text[:400])):
            _write(data / name / f"wiki.{part}.tokens", content.encode())
    for number in range(12):
        _write(data / "text_files" / f"{number}.txt", text[number * 100 :][:400].encode())
    for part, size in (("train", TRAIN), ("dev", TEST)):
        lines = [f"{'good' if row % 2 else 'bad'} film {row}\t{row % 2}" for row in range(size)]
        _write(data / "SST-2" / f"{part}.tsv", "\n".join(lines).encode())
    for name, size in (("table", TRAIN + TEST), ("other", TEST)):
        rows = [
            f"{row if row % 5 else ''},{'red' if row % 3 else 'blue'},{row % 4 or ''},{row % 3 // 2},"
            f"{row % 2}"
            for row in range(size)
        ]
        _write(data / f"{name}.csv", "\n".join(["size,colour,target,small,odd", *rows]).encode())
    for name, size in (("train", TRAIN + TEST), ("other", TRAIN), ("validation", TEST)):
        labels = ({"text": f"text {row}", "label": row % 2} for row in range(size))
        tags = ({"tokens": ["Ada", f"w{row}"], "tags": ["B-PER", "O"]} for row in range(size))
        words = (label | tag for label, tag in zip(labels, tags, strict=True))
        _write(data / f"{name}.jsonl", "\n".join(map(json.dumps, words)).encode())
    for name, size in (("chat", TRAIN + TEST), ("other-chat", TRAIN)):
        pairs = ({"prompt": f"p{row}"[: 2 + row % 3], "completion": f"{row}"} for row in range(size))
        _write(data / f"{name}.jsonl", "\n".join(map(json.dumps, pairs)).encode())
    for write in told_of("write_files"):
        write(data)


def _idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
