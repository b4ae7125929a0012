"""Bounds of what is unpacked or sent: what would fill memory or the disk is refused before it does."""

from __future__ import annotations

import dataclasses
import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data.datasets import download, text_files
from lib.data.datasets.cifar import data as cifar
from lib.data.datasets.mnist import data as mnist
from lib.data.datasets.published import Remote
from lib.errors import DataError
from lib.plugins import DATASETS


def idx_file(file: Path, shape: tuple[int, ...], content: bytes) -> Path:
    header = bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()
    file.write_bytes(gzip.compress(header + content))
    return file


def test_no_more_is_unpacked_than_a_header_promises(tmp_path: Path) -> None:
    bomb = idx_file(tmp_path / "images.gz", (2, 28, 28), bytes(50_000_000))
    assert bomb.stat().st_size < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="1585 bytes, its header promises 1584"):
            mnist.parse_images(mnist.read_idx(bomb), bomb, height=28, width=28)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    bomb = idx_file(tmp_path / "images.gz", (2**31, 28, 28), b"")
    with pytest.raises(
        DataError, match=rf"would unpack to \d+ bytes, and at most {mnist.LARGEST_BYTES} are read"
    ):
        mnist.read_idx(bomb)
    huge = idx_file(tmp_path / "labels.gz", (60_000,), bytes(60_000))
    assert len(mnist.read_idx(huge)) == 60_008 and mnist.count_samples(huge) == 60_000


def archive(file: Path, sizes: dict[str, int], *, pax: int = 0) -> Path:
    with tarfile.open(file, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name, size in sizes.items():
            member = tarfile.TarInfo(name)
            member.size = size
            member.pax_headers = {"comment": "x" * pax} if pax else {}
            tar.addfile(member, io.BytesIO(bytes(size)))
    return file


@pytest.mark.parametrize(
    ("sizes", "pax"),
    [({"test.bin": 2_000_000}, 0), ({"beside": 2_000_000, "test.bin": 10}, 0), ({"test.bin": 10}, 2_000_000)],
)
def test_an_archive_is_unpacked_up_to_a_bound(sizes: dict[str, int], pax: int, tmp_path: Path) -> None:
    bomb = archive(tmp_path / "set.tar.gz", sizes, pax=pax)
    with pytest.raises(DataError, match="is damaged: it would unpack to more than 1000000 bytes"):
        cifar.unpack(bomb, tmp_path, names=["test.bin"], max_bytes=1_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["set.tar.gz"]
    cifar.unpack(bomb, tmp_path, names=["test.bin"], max_bytes=5_000_000)
    assert (tmp_path / "test.bin").stat().st_size == sizes["test.bin"]


def remotes_in(value: Any) -> Iterator[Remote]:
    """Every Remote in a constant of a module, however deep."""
    if isinstance(value, Remote):
        yield value
    elif isinstance(value, tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from remotes_in(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from remotes_in(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))


def test_every_address_of_a_data_set_is_encrypted() -> None:
    modules = [DATASETS.load(name) for name in DATASETS.names()] + [text_files]
    constants = (value for module in modules for name, value in vars(module).items() if name.isupper())
    urls = {url for value in constants for remote in remotes_in(value) for url in remote.urls}
    assert len(urls) > 10 and {url.partition("://")[0] for url in urls} == {"https"}


def test_the_largest_download_is_larger_than_any_set() -> None:
    assert sum(cifar.PUBLISHED_SIZES) * cifar.record_bytes(2) < download.LARGEST_BYTES
