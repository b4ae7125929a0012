"""Handwritten digits of scikit-learn as a folder of images: python -m scripts.eqprop.eight FOLDER

1,797 images of 8 x 8 pixels with values 0 to 16; every fifth is for testing (1,437 + 360).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from lib.errors import ConfigError, run_main

TEST_EVERY = 5
MAX_VALUE, WHITE = 16, 240  # largest value of a pixel in scikit-learn and in the files


def main() -> int:
    """Train the eight configurations and write their table."""
    parser = argparse.ArgumentParser(prog="scripts.eqprop.eight", description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
    return 0


def write(folder: Path) -> None:
    """Write folder/{train,val}/DIGIT/NUMBER.png. Raises ConfigError without scikit-learn."""
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
        Image.fromarray((image * (WHITE // MAX_VALUE)).astype(np.uint8)).save(path)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
