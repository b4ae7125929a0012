"""Readers of idx, CIFAR and image folders: what they find, and what they say of damaged files."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib import atomic
from lib.data import Dataset
from lib.data.datasets.mnist import data as mnist_module
from lib.errors import DataError, ToolkitError
from tests.support.datasets import IMAGE_FOLDER, opened

RNG = np.random.default_rng(0)


def _open(name: str, data_dir: Path, said: list[str] | None = None, **options: Any) -> Dataset:
    log = [].append if said is None else said.append
    defaults = {"cache_dir": data_dir / "cache", "download": False, "log": log}
    return opened(name, data_dir=data_dir, **{**defaults, **options})


def _folder(data_dir: Path, said: list[str] | None = None, **requested: Any) -> Dataset:
    return _open("image_folder", data_dir, said, options=IMAGE_FOLDER, **requested)


def _idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def _mnist(folder: Path, *, pack: bool = True, dot: bool = False, train: int = 5) -> dict[str, np.ndarray]:
    """Write a tiny set in the layout of MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": RNG.integers(0, 256, (train, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": RNG.integers(0, 10, train, dtype=np.uint8),
        "t10k-images-idx3-ubyte": RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": RNG.integers(0, 10, 3, dtype=np.uint8),
    }
    for name, array in arrays.items():
        file = folder / (name.replace("-idx", ".idx") if dot else name)
        if pack:
            file.with_name(file.name + ".gz").write_bytes(gzip.compress(_idx(array)))
        else:
            file.write_bytes(_idx(array))
    return arrays


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dot", [True, False])
@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
def test_mnist_is_found_in_its_spellings(tmp_path: Path, pack: bool, dot: bool, below: str) -> None:
    arrays = _mnist(tmp_path / below, pack=pack, dot=dot)
    dataset = _open("mnist", tmp_path)
    assert np.array_equal(dataset.train.inputs[:, 0], arrays["train-images-idx3-ubyte"])
    assert np.array_equal(dataset.test.targets, arrays["t10k-labels-idx1-ubyte"])
    assert dataset.train.inputs.shape == (5, 1, 28, 28) and dataset.train.targets.dtype == np.int64
    assert "5 + 3 images" in dataset.source and "published" not in dataset.source
    assert not dataset.spec.synthetic


def _replace(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_bytes(change(file.read_bytes()))

    return damage


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda raw: raw[:-1], "3935 bytes, its header promises 3936"),
        (IMAGES, lambda raw: raw + b"x", "3937 bytes, its header promises 3936"),
        (IMAGES, lambda _: b"", "begins with nothing"),
        (IMAGES, lambda raw: b"\x00\x00\x0d\x03" + raw[4:], "begins with 00000d03"),
        (IMAGES, lambda raw: raw[:9], "less than the header"),
        (IMAGES, lambda _: _idx(np.zeros((5, 27, 28), np.uint8)), "27x28 pixels, 28x28 expected"),
        (IMAGES, lambda _: _idx(np.zeros((0, 28, 28), np.uint8)), "no samples"),
        (IMAGES, lambda raw: raw[:4] + b"\xff" * 12, "its header promises"),
        (IMAGES, lambda raw: gzip.compress(raw)[:-20], "not a complete gzip file"),
        (IMAGES, lambda raw: gzip.compress(raw)[:-8] + b"\0" * 8, "not a complete gzip file"),
        (IMAGES, lambda _: b"\x1f\x8b nonsense and more nonsense", "not a complete gzip file"),
        (LABELS, lambda raw: raw[:-1] + b"\x0a", "label 10 of sample 2 is not below 10"),
        (LABELS, lambda _: _idx(np.zeros(4, np.uint8)), "4 labels for the 3 images"),
        (LABELS, lambda _: _idx(np.zeros((3, 28, 28), np.uint8)), "begins with 00000803"),
    ],
)
def test_a_damaged_idx_file_is_named(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    _mnist(tmp_path, pack=False)
    _replace(name, change)(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        _open("mnist", tmp_path)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_fashion_prefers_its_own_folder_and_refuses_mnist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = _mnist(tmp_path)
    labels = _idx(arrays["train-labels-idx1-ubyte"])
    known = dict(mnist_module.MNIST_CONTENT) | {
        "train-labels-idx1-ubyte": mnist_module.hashlib.sha256(labels).hexdigest()
    }
    monkeypatch.setattr(mnist_module, "MNIST_CONTENT", known)
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz is a file of MNIST"):
        _open("fashion_mnist", tmp_path)
    own = _mnist(tmp_path / "fashion_mnist", train=7)
    found = _open("fashion_mnist", tmp_path).train
    assert np.array_equal(found.targets, own["train-labels-idx1-ubyte"])


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_a_missing_set_names_three_ways_out_and_goes_none_of_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("downloads are off")

    monkeypatch.setattr("lib.data.datasets.download.fetch", fetch)
    with pytest.raises(DataError) as caught:
        _open(name, tmp_path)
    text = str(caught.value)
    assert str(tmp_path / name) in text and "CONFIG_DATA_DOWNLOAD" in text and "CONFIG_DATASET_DIGITS" in text


def _records(count: int, *, label_bytes: int = 1, classes: int = 10) -> np.ndarray:
    records = RNG.integers(0, 256, (count, label_bytes + 3072), dtype=np.uint8)
    records[:, :label_bytes] = RNG.integers(0, classes, (count, label_bytes))
    return records


@pytest.mark.parametrize("below", ["", "cifar10", "cifar10/cifar-10-batches-bin", "cifar-10-batches-bin"])
@pytest.mark.parametrize("test", ["test_batch.bin", "test_first1000.bin"])
def test_any_batches_of_cifar10_will_do(tmp_path: Path, below: str, test: str) -> None:
    folder = tmp_path / below
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"data_batch_1.bin": _records(4), "data_batch_4.bin": _records(2), test: _records(3)}
    for name, records in parts.items():
        records.tofile(folder / name)
    dataset = _open("cifar10", tmp_path)
    both = np.concatenate((parts["data_batch_1.bin"], parts["data_batch_4.bin"]))
    assert np.array_equal(dataset.train.inputs.reshape(6, -1), both[:, 1:])
    assert np.array_equal(dataset.train.targets, both[:, 0])
    assert np.array_equal(dataset.test.targets, parts[test][:, 0])
    assert "6 (of 50000) + 3 (of 10000) images" in dataset.source


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    records = _records(5, label_bytes=2, classes=20)
    records[:, 1] = [99, 0, 50, 7, 98]
    records.tofile(tmp_path / "train.bin")
    records.tofile(tmp_path / "test.bin")
    dataset = _open("cifar100", tmp_path)
    assert dataset.train.targets.tolist() == [99, 0, 50, 7, 98] and dataset.spec.classes == 100
    assert np.array_equal(dataset.test.inputs.reshape(5, -1), records[:, 2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], "no whole number of records of 3073"),
        (lambda _: b"", "0 bytes are no whole number"),
        (lambda raw: raw[:3073] + b"\x0b" + raw[3074:], "label 11 of sample 1 is not below 10"),
    ],
)
def test_a_damaged_cifar_file_is_named(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    for name in ("data_batch_2.bin", "test_batch.bin"):
        _records(3).tofile(tmp_path / name)
    _replace("data_batch_2.bin", change)(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        _open("cifar10", tmp_path)
    assert str(tmp_path / "data_batch_2.bin") in str(caught.value)


def _archive(file: Path, names: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            content = _records(2).tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_a_missing_set_is_told_by_the_files_that_are_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data_batch_1\.bin with test_batch\.bin in .*cifar10 or "):
        _open("cifar10", tmp_path)


def test_an_archive_in_place_is_unpacked_and_then_removed(tmp_path: Path) -> None:
    archive = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    _archive(archive, ["readme.html", "test_batch.bin", *names])
    dataset = _open("cifar10", tmp_path)
    assert dataset.train.size == 10 and dataset.test.size == 2
    assert sorted(path.name for path in archive.parent.iterdir()) == [*names, "test_batch.bin"]


def test_unpacking_that_breaks_off_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    _archive(archive, ["test_batch.bin", *names])
    write, written = atomic.write_bytes, []

    def write_three(file: Path, content: bytes) -> None:
        if len(written) == 3:
            raise OSError(28, "No space left on device", str(file))
        written.append(file)
        write(file, content)

    monkeypatch.setattr(atomic, "write_bytes", write_three)
    with pytest.raises(ToolkitError, match="No space left"):
        _open("cifar10", tmp_path)
    monkeypatch.setattr(atomic, "write_bytes", write)
    assert _open("cifar10", tmp_path).train.size == 10


def test_a_damaged_archive_is_named_and_gives_no_part_of_a_set(tmp_path: Path) -> None:
    archive = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    _archive(archive, ["test_batch.bin", "data_batch_1.bin"])
    with pytest.raises(DataError, match=r"tar\.gz is damaged: data_batch_2\.bin.* missing"):
        _open("cifar10", tmp_path)
    archive.write_bytes(archive.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"tar\.gz is damaged"):
        _open("cifar10", tmp_path)
    assert [path.name for path in archive.parent.iterdir()] == [archive.name]


def _image(file: Path, size: tuple[int, int], colour: tuple[int, int, int] | int = (200, 30, 90)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(file)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        _image(tmp_path / part / "cat" / "a.png", (40, 20))
        _image(tmp_path / part / "cat" / "b.JPEG", (64, 300))
        _image(tmp_path / part / "dog" / "c.png", (16, 16), 77)
    _image(tmp_path / "train" / "dog" / "d.jpg", (8, 8), (0, 255, 0))
    return tmp_path


def test_a_folder_of_images_is_packed_once(photographs: Path) -> None:
    dataset = _folder(photographs, image_size=16)
    assert dataset.train.inputs.shape == (4, 3, 16, 16) and isinstance(dataset.train.inputs, np.memmap)
    assert dataset.train.targets.tolist() == [0, 0, 1, 1] and dataset.test.targets.tolist() == [0, 0, 1]
    assert dataset.spec.classes == 2 and (dataset.spec.height, dataset.spec.width) == (16, 16)
    assert (dataset.train.inputs[0] == np.array([200, 30, 90])[:, None, None]).all()
    assert (dataset.test.inputs[2] == 77).all()
    said: list[str] = []
    again = _folder(photographs, said, image_size=16)
    assert said == [] and np.array_equal(again.train.inputs, dataset.train.inputs)


def test_a_folder_is_normalised_by_what_is_trained_on(photographs: Path) -> None:
    for _ in range(2):  # packed, and read again
        dataset = _folder(photographs, image_size=16)
        pixels = np.asarray(dataset.train.inputs) / 255
        assert dataset.spec.mean == pytest.approx(pixels.mean((0, 2, 3)), rel=1e-12)
        assert dataset.spec.std == pytest.approx(pixels.std((0, 2, 3)), rel=1e-12)
    for part in ("train", "val"):
        for file in (photographs / part).rglob("*.*"):
            _image(file, (8, 8), (9, 9, 9))
    assert _folder(photographs, image_size=16).spec.std == (1 / 255,) * 3


def test_the_shorter_side_is_resized_and_the_longer_cropped_at_the_centre(photographs: Path) -> None:
    pixels = np.zeros((32, 96, 3), np.uint8)
    pixels[:, 30:66] = 255  # the centre square, and what the filter sees around it
    Image.fromarray(pixels).save(photographs / "train" / "cat" / "a.png")
    dataset = _folder(photographs, image_size=16)
    assert (dataset.train.inputs[0] == 255).all()


def test_a_change_of_files_or_size_packs_again(photographs: Path) -> None:
    _folder(photographs, image_size=8)
    file = photographs / "train" / "dog" / "d.jpg"
    changes: list[Callable[[], object]] = [
        lambda: os.utime(file, (1, 1)),
        lambda: _image(file, (9, 9), (0, 0, 255)),
        lambda: file.rename(file.with_name("e.jpg")),
    ]
    for change in changes:
        change()
        said: list[str] = []
        _folder(photographs, said, image_size=8)
        assert any("made from something else" in line for line in said)
    assert _folder(photographs, image_size=12).train.inputs.shape[2] == 12


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n and then nothing"])
def test_a_broken_image_is_named(photographs: Path, content: bytes) -> None:
    file = photographs / "val" / "dog" / "broken.png"
    file.write_bytes(content)
    with pytest.raises(DataError, match="cannot be decoded") as caught:
        _folder(photographs, image_size=8)
    assert str(file) in str(caught.value)


def test_a_truncated_jpeg_is_named(photographs: Path) -> None:
    file = photographs / "train" / "cat" / "b.JPEG"
    noise = RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(
        DataError, match=r"1 of 7 images cannot be decoded: .*b\.JPEG: image file is truncated"
    ):
        _folder(photographs, image_size=8)


def test_what_is_wrong_with_the_folders_is_said(photographs: Path) -> None:
    (photographs / "train" / "cat" / "notes.txt").write_text("not an image")
    said: list[str] = []
    _folder(photographs, said, image_size=8)
    assert any("1 files that are no images of a class are left out" in line for line in said)
    (photographs / "val" / "bird").mkdir()
    with pytest.raises(DataError, match=r"val/bird has no images"):
        _folder(photographs, image_size=8)
    _image(photographs / "val" / "bird" / "a.png", (16, 16))
    with pytest.raises(DataError, match=r"different classes: only one of them has bird"):
        _folder(photographs, image_size=8)
    with pytest.raises(DataError, match="image_folder is not there"):
        _folder(photographs / "nowhere", image_size=8)


@pytest.mark.skipif(
    not os.environ.get("ANNEAL_TEST_DATA"), reason="ANNEAL_TEST_DATA names no directory with the real MNIST"
)
def test_the_real_mnist() -> None:
    dataset = _open("mnist", Path(os.environ["ANNEAL_TEST_DATA"]))
    assert (dataset.train.size, dataset.test.size) == (60_000, 10_000)
    assert "content as published" in dataset.source
    pixels = dataset.train.inputs / np.float32(255)
    assert abs(pixels.mean() - dataset.spec.mean[0]) < 1e-4 and abs(pixels.std() - dataset.spec.std[0]) < 1e-4
