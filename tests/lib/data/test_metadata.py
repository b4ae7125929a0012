"""What a plan knows of data that nobody has opened, and that training refuses before it makes data."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib.data import Dataset
from lib.errors import ConfigError, DataError, PlanError
from tests.support.datasets import looked, opened
from tests.support.training import small_config
from train.training_data import check_sizes, describe_training_data, open_to_train, open_training_data

SILENT = [].append
IMAGE_SIZE = 16
ERRORS = {"on_bad_sample": "error"}


def folder_of_images(root: Path, *, classes: int = 3, train: int = 4, val: int = 2) -> None:
    for part, count in (("train", train), ("val", val)):
        for label in range(classes):
            (root / part / f"class{label}").mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (9, 9)).save(root / part / f"class{label}" / f"{number}.png")


def mnist(root: Path, *, train: int = 7, test: int = 3) -> None:
    for name, size in (("train", train), ("t10k", test)):
        for kind, shape in (("images-idx3", (size, 28, 28)), ("labels-idx1", (size,))):
            head = bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()
            content = head + bytes(int(np.prod(shape)))
            if name == "train":
                (root / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
            else:
                (root / f"{name}-{kind}-ubyte").write_bytes(content)


def cifar10(root: Path) -> None:
    for name, size in (("data_batch_2", 6), ("data_batch_4", 5), ("test_batch", 4)):
        (root / f"{name}.bin").write_bytes(bytes(size * 3073))


def tokens(root: Path) -> None:
    for name, size in (("train_1", 40), ("train_2", 21), ("val", 13)):
        np.arange(size, dtype=np.uint16).tofile(root / f"{name}.bin")


SETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "image_folder": (folder_of_images, ERRORS),
    "mnist": (mnist, {}),
    "cifar10": (cifar10, {}),
    "token_bins": (tokens, {"vocab_size": 100}),
}


@pytest.mark.parametrize("name", SETS)
def test_a_look_at_files_tells_what_opening_them_does(name: str, tmp_path: Path) -> None:
    make, options = SETS[name]
    make(tmp_path)
    seen = looked(name, options, data_dir=tmp_path, image_size=IMAGE_SIZE, block_size=4)
    assert isinstance(seen, Dataset) and str(tmp_path) in seen.source and "not opened" in seen.source
    there = opened(
        name,
        options,
        data_dir=tmp_path,
        cache_dir=tmp_path / "cache",
        image_size=IMAGE_SIZE,
        block_size=4,
    )
    assert (seen.train.size, seen.test.size) == (there.train.size, there.test.size)
    assert seen.spec.input_shape == there.spec.input_shape
    for number in ("classes", "vocab_size", "validation_tokens"):
        assert getattr(seen.spec, number, None) == getattr(there.spec, number, None)


@pytest.mark.parametrize(("name", "sizes"), [("mnist", (60_000, 10_000)), ("cifar10", (50_000, 10_000))])
def test_of_what_is_not_there_the_published_is_known(
    name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    for data_dir in (None, tmp_path):
        seen = looked(name, data_dir=data_dir)
        assert seen is not None and (seen.train.size, seen.test.size) == sizes


@pytest.mark.slow
def test_images_are_counted_and_not_decoded(tmp_path: Path) -> None:
    folder_of_images(tmp_path)
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"no image")
    config = small_config(
        "resnet18", dataset="image_folder", data_options=ERRORS, image_size=16, data_dir=str(tmp_path)
    )
    said = list[str]()
    data = describe_training_data(config, root=tmp_path, log=said.append)
    assert (data.facts.train_size, data.dataset.spec.classes) == (12, 3)  # type: ignore[union-attr]
    assert said == [f"Data: image_folder: 12 + 6 files of 3 classes in {tmp_path}, not opened"]


@pytest.mark.slow
def test_a_plan_takes_limit_and_holdout_as_training_does(tmp_path: Path) -> None:
    folder_of_images(tmp_path)
    requested = {
        "dataset": "image_folder",
        "data_options": ERRORS,
        "image_size": 16,
        "data_dir": str(tmp_path),
        "data_limit": 5,
        "holdout": 3,
    }
    config = small_config("resnet18", **requested)
    looked, opened = (
        find(config, root=tmp_path, log=SILENT).dataset
        for find in (describe_training_data, open_training_data)
    )
    assert (looked.train.size, looked.test.size) == (opened.train.size, opened.test.size) == (5, 3)
    with pytest.raises(ConfigError, match="need more samples than there are"):
        describe_training_data(
            small_config("resnet18", **requested | {"data_limit": 10}), root=tmp_path, log=SILENT
        )


def test_what_is_wrong_with_files_is_told_by_a_plan(tmp_path: Path) -> None:
    folder_of_images(tmp_path, val=0)
    with pytest.raises(DataError, match="class0 has no images"):
        looked("image_folder", ERRORS, data_dir=tmp_path, image_size=16)
    (tmp_path / "train.bin").write_bytes(b"odd")
    with pytest.raises(DataError, match=r"no \*val\*\.bin"):
        looked("token_bins", {"vocab_size": 100}, data_dir=tmp_path, block_size=4)
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "val.bin")
    with pytest.raises(ConfigError, match="CONFIG_BLOCK_SIZE=5 is too large for token_bins"):
        looked("token_bins", {"vocab_size": 100}, data_dir=tmp_path, block_size=5)


@pytest.mark.slow
def test_too_large_a_batch_is_refused_before_anything_is_packed(tmp_path: Path) -> None:
    folder_of_images(tmp_path)
    requested = {
        "dataset": "image_folder",
        "data_options": ERRORS,
        "image_size": 16,
        "data_dir": str(tmp_path),
    }
    for changes, message in (
        ({"target_effective_batch": 13}, "batch of 13 cannot be planned: there are only 12 .*BATCH=12"),
        ({"hyper_param": "manual", "batch_size": 7, "gradient_accumulation": 2}, "batch of 14 cannot"),
        ({"target_effective_batch": 12, "data_limit": 11}, "there are only 11 training samples"),
    ):
        with pytest.raises(PlanError, match=message):
            open_to_train(small_config("resnet18", **requested | changes), root=tmp_path, log=SILENT)
    warm = {"target_effective_batch": 6, "warmup_unit": "steps", "warmup_steps": 3}
    with pytest.raises(ConfigError, match="CONFIG_WARMUP_STEPS=3 is a warm-up of 3 of 3 steps"):
        open_to_train(small_config("resnet18", **requested | warm), root=tmp_path, log=SILENT)
    assert not (tmp_path / "data").exists()
    open_to_train(small_config("resnet18", **requested, target_effective_batch=12), root=tmp_path, log=SILENT)
    assert (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "changes", [{"batch_table_strict": True}, {"elastic_policy": "latentwire"}, {"target_effective_batch": 9}]
)
def test_what_a_machine_may_still_plan_is_not_refused(changes: dict[str, Any]) -> None:
    check_sizes(small_config(**{"target_effective_batch": 10} | changes), 9)
