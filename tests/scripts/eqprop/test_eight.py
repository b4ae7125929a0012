"""Digits of 8 x 8 pixels as a folder of images."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from lib.errors import ConfigError
from scripts.eqprop.eight import write
from tests.support.datasets import IMAGE_FOLDER, opened

LABELS = np.arange(20) % 4


def stand_in(images: np.ndarray, labels: np.ndarray) -> ModuleType:
    module = ModuleType("sklearn.datasets")
    module.load_digits = lambda: SimpleNamespace(images=images, target=labels)  # type: ignore[attr-defined]
    return module


def test_each_fifth_is_tested_on_and_no_grey_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(0).integers(0, 17, (20, 8, 8)).astype(float)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", stand_in(images, LABELS))
    write(tmp_path / "digits")
    where = {"data_dir": tmp_path / "digits", "cache_dir": tmp_path}
    dataset = opened("image_folder", IMAGE_FOLDER, **where, image_size=8)
    tested = np.arange(20) % 5 == 0
    for part, chosen in ((dataset.train, ~tested), (dataset.test, tested)):
        by_label = np.argsort(LABELS[chosen], kind="stable")  # as folders are read
        assert np.array_equal(part.targets, LABELS[chosen][by_label])
        assert np.array_equal(part.inputs[:, 0], 15 * images[chosen][by_label])


def test_without_the_package_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        write(tmp_path)
