"""Model cards: the lines of Python in them do what the run did."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lib.data.datasets.image_folder.data import decode
from lib.data.types import ImageSpec
from train import export_card


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_is_read_as_in_a_folder_of_images(channels: int, tmp_path: Path) -> None:
    spec = ImageSpec.square("photos", 20, 2, mean=(0.5,) * channels, std=(0.2,) * channels)
    wanted = export_card._preprocessing(spec)
    assert wanted and wanted["resize"] == [20, 20]
    section = export_card._reading({"preprocessing": wanted, "spec": dataclasses.asdict(spec)})
    code: dict[str, Any] = {}
    exec(section.split("```python")[1].split("```")[0], code)
    generator = np.random.default_rng(1)
    colours, grey = (generator.integers(0, 256, shape, np.uint8) for shape in ((161, 190, 4), (161, 190)))
    deep = Image.fromarray(generator.integers(0, 65536, (161, 190), np.uint16))
    images = {"deep.png": deep, "deep.tif": deep, "grey.png": Image.fromarray(grey)}
    if channels == 3:
        images |= {"clear.png": Image.fromarray(colours), "plain.jpg": Image.fromarray(colours[..., :3])}
    for name, image in images.items():
        for orientation in (1, 6):  # as it is, and a quarter turn
            exif, file = Image.Exif(), tmp_path / name
            exif[0x0112] = orientation
            image.save(file, exif=exif)
            assert np.array_equal(code["read"](file), decode(file, spec.width)[:channels]), (
                name,
                orientation,
            )


def test_other_data_and_oblong_images_have_no_such_section() -> None:
    spec = ImageSpec.square("photos", 20, 2, mean=(0.5,), std=(0.2,))
    for other in (dataclasses.replace(spec, width=spec.height + 1), object()):
        assert export_card._preprocessing(other) is None
    assert export_card._reading({"preprocessing": None}) == ""
