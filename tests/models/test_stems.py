"""Stems of ResNets suit the size of the images, unless one is chosen."""

from __future__ import annotations

import pytest

from lib.kconf import load_written
from tests.support.configs import ROOT


@pytest.mark.parametrize("model", ["RESNET18", "RESNET50"])
@pytest.mark.parametrize(
    ("settings", "stem"),
    [
        ({"DATASET_IMAGE_FOLDER": "y"}, "imagenet"),
        ({"DATASET_IMAGE_FOLDER": "y", "IMAGE_SIZE": "32"}, "cifar"),
        ({"DATASET_IMAGE_FOLDER": "y", "IMAGE_SIZE": "64"}, "cifar"),
        ({"DATASET_IMAGE_FOLDER": "y", "IMAGE_SIZE": "96"}, "imagenet"),
        ({"DATASET_CIFAR10": "y"}, "cifar"),
    ],
)
def test_the_stem_suits_the_images(model: str, settings: dict[str, str], stem: str) -> None:
    requested = {f"MODEL_{model}": "y", **settings}
    overrides = {f"CONFIG_{name}": value for name, value in requested.items()}
    assert load_written("", root=ROOT, overrides=overrides).values[f"{model}_STEM"] == stem
