"""Write a small folder of images: `python -m scripts.sample_images DIRECTORY`.

Synthetic scenes by the shape in them: five classes, 40 images of each in train/ and 80 in val/.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from PIL import Image

from lib.data.datasets.scenes.data import SHAPES, TEXTURES, generate
from lib.errors import ConfigError, os_errors, run_main

SIZES = {"train": 40, "val": 80}  # images of a class


def write(directory: Path) -> int:
    """Write the images to `directory`, which must not exist. Raises ConfigError, ToolkitError."""
    if directory.exists():
        raise ConfigError(f"{directory} exists", todo="name a directory that does not exist")
    images, labels = generate("test")  # of which no run on the scenes has trained
    written = Counter[str]()
    for image, label in zip(images, labels, strict=True):
        shape = SHAPES[label // len(TEXTURES)]
        part = "train" if written[shape] < SIZES["train"] else "val"
        if written[shape] < sum(SIZES.values()):
            file = directory / part / shape / f"{written[shape]:03}.png"
            with os_errors("write an image"):
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.transpose(1, 2, 0)).save(file)
            written[shape] += 1
    print(f"{written.total()} images of {len(written)} classes in {directory}")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    raise SystemExit(run_main(lambda: write(directory)))
