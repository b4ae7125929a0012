"""`make scaling` by the command line of document 004: run_scaling_experiments.py --quick --epochs 3."""

import sys
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # run as a file, Python would look beside this one

from lib.errors import run_main  # noqa: E402
from scripts import scaling  # noqa: E402

OPTIONS = {"--quick": "--shapes=64,128x4,8", "--batch-size": "--batch", "--output-dir": "--out"}
DEFAULTS = ("all", "--epochs=5", "--batch=32", "--corpus=wikitext2")


def arguments_of(words: list[str]) -> list[str]:
    """Return the command line of scripts.scaling for one of the document."""
    parts = (word.partition("=") for word in words)
    return [*DEFAULTS, *(OPTIONS.get(name, name) + equals + value for name, equals, value in parts)]


if __name__ == "__main__":
    raise SystemExit(run_main(partial(scaling.main, arguments_of(sys.argv[1:]))))
