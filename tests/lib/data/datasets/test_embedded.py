"""The embedded sets: reproducible, hard for a linear classifier, cached whole or not at all."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lib.data import Dataset
from lib.data.cache import cached_folder
from lib.data.datasets.digits import data as digits_module
from lib.data.datasets.embedded import rotation
from lib.data.datasets.scenes import data as scenes_module
from lib.errors import DataError, ToolkitError
from tests.support.datasets import opened

ROOT = Path(__file__).resolve().parents[4]

# Scenes are pure arithmetic: the same bytes on every machine. Digits also follow from the font rasteriser.
SCENES_TEST_SHA256 = "b728a97fbc817a5a2da5cc59f1c72655a0ba59de7fdf9d8e0e09fb4b6b60bae9"


def _open(name: str, folder: Path, said: list[str] | None = None) -> Dataset:
    log = (lambda _: None) if said is None else said.append
    return opened(name, data_dir=folder / "none", cache_dir=folder, download=False, log=log)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["digits", "scenes"])
def dataset(request: pytest.FixtureRequest, cache: Path) -> Dataset:
    return _open(request.param, cache)


@pytest.mark.slow
def test_shapes_classes_and_label_of_origin(dataset: Dataset) -> None:
    spec = dataset.spec
    sizes = {"digits": (20_000, 4_000), "scenes": (10_000, 2_000)}[spec.name]
    for part, size in zip((dataset.train, dataset.test), sizes, strict=True):
        assert part.inputs.shape == (size, spec.channels, spec.height, spec.width)
        assert part.inputs.dtype == np.uint8 and part.targets.dtype == np.int64
        assert np.bincount(part.targets).tolist() == [size // 10] * 10
    assert spec.synthetic and "synthetic" in dataset.source and str(sizes[0]) in dataset.source


@pytest.mark.slow
def test_mean_and_std_are_those_of_the_training_part(dataset: Dataset) -> None:
    pixels = dataset.train.inputs.astype(np.float32) / 255
    assert np.allclose(pixels.mean(axis=(0, 2, 3)), dataset.spec.mean, atol=0.002)
    assert np.allclose(pixels.std(axis=(0, 2, 3)), dataset.spec.std, atol=0.002)


@pytest.mark.slow
def test_no_image_is_twice_in_a_set(dataset: Dataset) -> None:
    images = np.concatenate((dataset.train.inputs, dataset.test.inputs))
    assert len({image.tobytes() for image in images}) == len(images)


def test_scenes_are_the_published_bytes() -> None:
    images, labels = scenes_module.generate("test")
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == SCENES_TEST_SHA256


@pytest.mark.long
def test_another_process_draws_the_same_digits_and_imports_matplotlib_only_then() -> None:
    code = """if True:
        import hashlib, sys
        import lib.data
        print([name for name in ("matplotlib", "PIL") if name in sys.modules])
        from lib.data.datasets.digits import data as digits
        print(hashlib.sha256(digits.generate("test")[0].tobytes()).hexdigest())
        print("matplotlib.pyplot" in sys.modules)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "77"}
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    expected = hashlib.sha256(digits_module.generate("test")[0].tobytes()).hexdigest()
    assert output.stdout.split("\n")[:3] == ["[]", expected, "False"]


def test_test_digits_come_from_fonts_that_training_never_shows() -> None:
    assert not set(digits_module.TEST_FONTS) & set(digits_module.TRAIN_FONTS)
    assert len(digits_module.TEST_FONTS) == 5


def test_a_missing_font_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits_module, "TEST_FONTS", ("Papyrus",))
    with pytest.raises(DataError, match=r"Papyrus\.ttf is missing"):
        digits_module.generate("test")


def test_distance_fields_are_distances() -> None:
    ink = np.zeros((1, 30, 30), np.bool_)
    ink[0, 10:13, 5] = ink[0, 20, 20] = True
    found = digits_module._square_distance(ink)[0]
    places = np.argwhere(ink[0])
    for row in range(30):
        for column in range(30):
            nearest = ((places - (row, column)) ** 2).sum(axis=1).min()
            assert found[row, column] == min(nearest, 81)


def test_rotation_is_cosine_and_sine() -> None:
    degrees = np.linspace(-90, 90, 181, dtype=np.float32)
    cosine, sine = rotation(degrees)
    assert np.allclose(cosine, np.cos(np.radians(degrees)), atol=1e-6)
    assert np.allclose(sine, np.sin(np.radians(degrees)), atol=1e-6)


@pytest.mark.slow
def test_a_second_opening_reads_the_cache(
    dataset: Dataset, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (digits_module, scenes_module):
        monkeypatch.setattr(module, "generate", lambda _: pytest.fail("made again"))
    said: list[str] = []
    again = _open(dataset.spec.name, cache, said)
    assert not said and np.array_equal(again.train.inputs, dataset.train.inputs)
    assert np.array_equal(again.test.targets, dataset.test.targets)


def _fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"content")


def _make(folder: Path, identity: str, said: list[str]) -> Path:
    return cached_folder(folder, identity=identity, fill=_fill, log=said.append)


def test_a_stale_or_damaged_cache_is_made_again_and_said(tmp_path: Path) -> None:
    folder, said = tmp_path / "set", list[str]()
    _make(folder, "one", said)
    assert said == []
    manifest = folder / "manifest.json"
    damages = {
        "made from something else": lambda: None,
        "a.bin has another size": lambda: (folder / "a.bin").write_bytes(b"cont"),
        "a.bin has another content": lambda: (folder / "a.bin").write_bytes(b"CONTENT"),
        "a.bin is missing": lambda: (folder / "a.bin").unlink(),
        "manifest.json is missing": manifest.unlink,
        "manifest.json is damaged": lambda: manifest.write_text("{"),
    }
    for reason, damage in damages.items():
        said.clear()
        damage()
        _make(folder, "two", said)
        assert len(said) == 1 and reason in said[0]
        assert (folder / "a.bin").read_bytes() == b"content"
        said.clear()
        _make(folder, "two", said)
        assert said == []
    assert set(json.loads(manifest.read_text())["files"]) == {"a.bin"}


def test_a_failed_making_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise DataError("no")

    with pytest.raises(DataError):
        cached_folder(tmp_path / "set", identity="x", fill=fail, log=print)
    assert [path.name for path in tmp_path.iterdir()] == [".set.lock"]


def test_an_unwritable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolkitError, match="cannot write the data cache") as caught:
        _make(tmp_path / "file" / "set", "x", [])
    assert "\n" not in str(caught.value)


def _count(folder: str, log: str) -> None:
    def fill(new: Path) -> None:
        with Path(log).open("a") as file:
            file.write("made\n")
        time.sleep(0.3)  # so that the others come meanwhile
        _fill(new)

    for _ in range(5):
        path = cached_folder(Path(folder), identity="x", fill=fill, log=lambda _: None)
        assert (path / "a.bin").read_bytes() == b"content"


def test_processes_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "set"), str(tmp_path / "log"))
    processes = [context.Process(target=_count, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "made\n"


@pytest.mark.slow
def test_a_linear_classifier_does_not_solve_it(dataset: Dataset) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = (
        (torch.from_numpy(part.inputs).flatten(1).float() / 255, torch.from_numpy(part.targets))
        for part in (dataset.train, dataset.test)
    )
    mean, std = train[0].mean(), train[0].std()
    model = torch.nn.Linear(train[0].shape[1], 10)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(10):
        for rows in torch.randperm(len(train[1])).split(200):
            loss = torch.nn.functional.cross_entropy(model((train[0][rows] - mean) / std), train[1][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = (model((test[0] - mean) / std).argmax(1) == test[1]).float().mean().item()
    bounds = {"digits": (0.5, 0.9), "scenes": (0.05, 0.3)}[dataset.spec.name]
    assert bounds[0] < right < bounds[1]
