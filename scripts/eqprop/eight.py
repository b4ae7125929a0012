"""The handwritten digits of scikit-learn as a folder of images: python -m scripts.eqprop.eight FOLDER

1,797 pictures of 8 x 8 pixels with values of 0 to 16, the test part of the set of that name at the UCI.
Each fifth is kept for the test: 1,437 to train on and 360 to test on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from lib.errors import ConfigError, run_main

TEST_EVERY = 5
LOUDEST, WHITE = 16, 240  # of a pixel there, and of one in the files


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.eqprop.eight", description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
    return 0


def write(folder: Path) -> None:
    """folder/train/DIGIT/NUMBER.png and folder/val/DIGIT/NUMBER.png. ConfigError without the package."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "the digits come with scikit-learn, which is not installed", todo="pip install scikit-learn"
        ) from error
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = "train" if number % TEST_EVERY else "val"
        path = folder / part / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * (WHITE // LOUDEST)).astype(np.uint8)).save(path)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
