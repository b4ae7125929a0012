"""What a plan knows of data that nobody has opened, and that training refuses before it makes data."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lib import kconf, tiers
from lib.config import config_from_values
from lib.data import Dataset
from lib.data.cache import cached_folder, checked_before
from lib.data.datasets.published import Remote
from lib.errors import ConfigError, DataError, PlanError
from lib.plan.gpus import parse_gpu
from tests.support.configs import ROOT
from tests.support.datasets import IMAGE_FOLDER, looked, opened, place_of
from tests.support.tokens import small_lm_config
from tests.support.training import CPU, random_data, small_config
from train import commands, profiling
from train.planning import run_plan
from train.planning.run_plan import refuse
from train.preflight import command as preflight
from train.training_data import (
    TrainingData,
    check_sizes,
    describe_training_data,
    open_to_train,
    open_training_data,
)

SILENT = [].append
IMAGE_SIZE = 16


def folder_of_images(root: Path, *, classes: int = 3, train: int = 4, val: int = 2) -> None:
    for part, count in (("train", train), ("val", val)):
        for label in range(classes):
            (root / part / f"class{label}").mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (9, 9)).save(root / part / f"class{label}" / f"{number}.png")


def test_a_missing_folder_of_images_is_told_with_what_is_planned(tmp_path: Path) -> None:
    found = looked("image_folder", IMAGE_FOLDER, data_dir=tmp_path / "nothing", image_size=IMAGE_SIZE)
    assert found is not None
    assert f"{tmp_path}/nothing has no images; planned as ImageNet has them" in found.source


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
    "image_folder": (folder_of_images, IMAGE_FOLDER),
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


@pytest.mark.parametrize(("name", "sizes"), [("train", (7, 10_000)), ("t10k", (60_000, 3))])
def test_files_of_mnist_are_counted_and_only_those_that_are_missing_are_as_published(
    name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    mnist(tmp_path)
    for file in tmp_path.iterdir():
        if not file.name.startswith(name):
            file.unlink()
    seen = looked("mnist", data_dir=tmp_path)
    assert seen is not None and (seen.train.size, seen.test.size) == sizes


@pytest.mark.slow
def test_images_are_counted_and_not_decoded(tmp_path: Path) -> None:
    folder_of_images(tmp_path)
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"no image")
    config = small_config(
        "resnet18", dataset="image_folder", data_options=IMAGE_FOLDER, image_size=16, data_dir=str(tmp_path)
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
        "data_options": IMAGE_FOLDER,
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
    with pytest.raises(DataError, match=r"class0 has no images.*, and 2 more"):
        looked("image_folder", IMAGE_FOLDER, data_dir=tmp_path, image_size=16)
    (tmp_path / "train.bin").write_bytes(b"odd")
    with pytest.raises(DataError, match=r"no \*val\*\.bin"):
        looked("token_bins", {"vocab_size": 100}, data_dir=tmp_path, block_size=4)
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "val.bin")
    with pytest.raises(ConfigError, match="CONFIG_BLOCK_SIZE=5 is too large for token_bins"):
        looked("token_bins", {"vocab_size": 100}, data_dir=tmp_path, block_size=5)


@pytest.mark.parametrize(
    ("make", "file", "size", "why"),
    [
        (cifar10, "data_batch_4.bin", 0, "0 bytes are no whole number of records of 3073"),
        (cifar10, "test_batch.bin", 3072, "3072 bytes are no whole number of records of 3073"),
        (partial(mnist, test=0), "t10k-images-idx3-ubyte", None, "it holds no samples"),
    ],
)
def test_a_damaged_file_is_named_by_a_plan_as_by_training(
    make: Callable[[Path], None], file: str, size: int | None, why: str, tmp_path: Path
) -> None:
    make(tmp_path)
    if size is not None:
        (tmp_path / file).write_bytes(bytes(size))
    for find in (looked, opened):
        with pytest.raises(DataError, match=f"^{tmp_path / file} is damaged: {why}"):
            find("cifar10" if make is cifar10 else "mnist", data_dir=tmp_path)


@pytest.mark.slow
def test_too_large_a_batch_is_refused_before_anything_is_packed(tmp_path: Path) -> None:
    folder_of_images(tmp_path)
    requested = {
        "dataset": "image_folder",
        "data_options": IMAGE_FOLDER,
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
    refused = {"hyper_param": "manual", "batch_size": 8, "target_effective_batch": 12, "norm_batch": 5}
    for changes, message in (
        (refused, "CONFIG_BATCH_SIZE=8 is not a multiple of CONFIG_NORM_BATCH=5"),
        ({"target_effective_batch": 12, "norm_batch": 5}, "it is not a multiple of CONFIG_NORM_BATCH=5"),
    ):
        config = small_config("resnet18", **requested | changes)
        with pytest.raises(PlanError, match=message):
            open_to_train(config, root=tmp_path, log=SILENT, refuse=refuse)
    assert not (tmp_path / "data").exists()
    open_to_train(small_config("resnet18", **requested, target_effective_batch=12), root=tmp_path, log=SILENT)
    assert (tmp_path / "data").exists()


@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of_images(tmp_path)
    told = list[TrainingData]()

    def no_room(config: Any, data: TrainingData, hardware: Any) -> None:  # noqa: ARG001
        told.append(data)
        raise PlanError("it does not fit")

    images = {
        "dataset": "image_folder",
        "data_options": IMAGE_FOLDER,
        "image_size": 16,
        "data_dir": str(tmp_path),
    }
    config = small_config("resnet18", **images, target_effective_batch=12, norm_batch=4)
    with monkeypatch.context() as small:
        small.setattr(run_plan, "predicted_plan", no_room)
        with pytest.raises(PlanError, match="it does not fit"):
            open_to_train(config, root=tmp_path, log=SILENT, refuse=refuse)
        assert not (tmp_path / "data").exists() and told[0].facts.train_size == 12
    open_to_train(config, root=tmp_path, log=SILENT, refuse=refuse)
    monkeypatch.setattr(run_plan, "predicted_plan", no_room)
    open_to_train(config, root=tmp_path, log=SILENT, refuse=refuse)  # packed: the plan itself refuses
    assert len(told) == 1


def test_a_check_comes_once_before_whatever_is_made(tmp_path: Path) -> None:
    made = list[str]()

    def fill(folder: Path) -> None:
        made.append(folder.name)
        (folder / "x").touch()

    def open_(name: str) -> Path:
        return cached_folder(tmp_path / "cache" / name, identity="x", fill=fill, log=SILENT)

    def refusing() -> None:
        raise PlanError("no")

    with checked_before(refusing), pytest.raises(PlanError, match="no"):
        open_("a")
    assert not (tmp_path / "cache").exists()
    remotes = (Remote("file", "0" * 64, ("https://localhost/nowhere",)),)
    place = place_of("mnist", {"data_dir": tmp_path / "files", "download": True})
    with checked_before(refusing), pytest.raises(PlanError, match="no"):
        place.find_all(remotes, ("mnist",), name="a set", instead="another")
    assert not (tmp_path / "files").exists()
    with checked_before(lambda: made.append("checked")):
        for name in ("a", "b", "a"):
            open_(name)
    assert made == ["checked", ".a.new", ".b.new"]
    with checked_before(refusing):
        open_("b")
    open_("c")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hyper_param": "manual", "batch_size": 8, "gradient_accumulation": 2, "num_devices": 1},
            "CONFIG_TARGET_EFFECTIVE_BATCH=9 contradicts CONFIG_BATCH_SIZE=8 x ",
        ),
        ({"warmup_unit": "steps", "warmup_steps": 3, "max_steps": 3}, "is a warm-up of 3 of 3 steps"),
        ({"device": "cuda"}, "CONFIG_DEVICE_CUDA is not possible"),
    ],
)
def test_options_alone_are_refused_before_a_text_is_read(changes: dict[str, Any], message: str) -> None:
    if "device" in changes and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = small_lm_config(**{"device": "cpu", "target_effective_batch": 9} | changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_to_train(config, root=Path("nowhere"), log=SILENT, refuse=refuse)


@pytest.mark.slow
@pytest.mark.parametrize("name", [path.name for path in (ROOT / "defconfigs").iterdir() if path.is_file()])
@pytest.mark.parametrize("method", ["predict", "table", "probe"])
def test_options_of_shipped_configurations_are_refused_on_no_machine(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name)
    config = config_from_values(resolved.values).replace(auto_method=method)
    if method == "table" and config.table_scale is None:
        pytest.skip(f"{config.model} has no TABLE_SCALE, which is an error of its own")
    if method == "table" and (config.norm_batch or 0) > 32:
        pytest.skip("the table gives a CPU no micro-batch for such a group, which is an error of its own")
    for machine in ("cpu-24g", "h100-80g", "rtx4090", "h100-80gx4"):
        hardware = parse_gpu(machine)
        monkeypatch.setattr(run_plan, "probe", lambda _, found=hardware: found)
        refuse(config, None)
        if config.elastic_policy:
            refuse(
                config.replace(elastic_policy="latentwire", elastic_base_batch=64, elastic_target_util=75),
                None,
            )
    monkeypatch.setattr(run_plan, "probe", lambda _: pytest.fail("of all nodes nothing is known"))
    refuse(config.replace(dist_nnodes="2"), None)


def test_only_the_model_tells_whether_it_has_batch_normalisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of timm and transformers the options do not: a transformer takes any effective batch."""
    monkeypatch.setattr(run_plan, "probe", lambda _: CPU)
    batch: dict[str, Any] = {"target_effective_batch": 16, "norm_batch": 32}
    config = small_config("resnet18", **batch)
    refuse(config, None)
    data = random_data(config, shape=(3, 32, 32), train_size=64)
    with pytest.raises(
        ConfigError, match="16 cannot be planned: it is not a multiple of CONFIG_NORM_BATCH=32"
    ):
        refuse(config, data)


@pytest.mark.parametrize("command", ["train", "probe", "preflight", "profile"])
def test_every_command_that_trains_refuses_before_it_opens_data(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened(Exception):
        pass

    def opens(*_: Any, refuse: Any, **__: Any) -> None:
        raise Opened(refuse)

    config, resolved = small_config(device="cpu"), SimpleNamespace(values={})
    where = {"root": Path("nowhere")}
    calls: dict[str, tuple[Any, Callable[[], object]]] = {
        "train": (
            commands,
            lambda: commands._plan_and_train(
                commands.RunRequest(resolved=resolved, config=config, **where, runs=Path(), started=0.0)
            ),
        ),
        "probe": (run_plan, lambda: run_plan.probe_command(resolved, **where)),
        "preflight": (preflight, lambda: preflight.candidate_of(resolved, **where, runs=Path(), log=print)),
        "profile": (profiling, lambda: profiling.profile(resolved, **where, steps=1, out=Path())),
    }
    module, call = calls[command]
    monkeypatch.setattr(module, "open_to_train", opens)
    if command != "train":
        monkeypatch.setattr(module, "config_from_values", lambda _: config)
        for owner in (module, tiers):
            monkeypatch.setattr(owner, "with_tier", lambda *_, **__: resolved, raising=False)
    with pytest.raises(Opened) as raised:
        call()
    assert raised.value.args == (refuse,)


@pytest.mark.parametrize(
    "changes", [{"batch_table_strict": True}, {"elastic_policy": "latentwire"}, {"target_effective_batch": 9}]
)
def test_what_a_machine_may_still_plan_is_not_refused(changes: dict[str, Any]) -> None:
    check_sizes(small_config(**{"target_effective_batch": 10} | changes), 9)
