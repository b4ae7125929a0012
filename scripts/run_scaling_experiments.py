"""The command of document 004: train sixteen sizes of a language model, fit scaling laws and report."""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # run as a file, Python would look beside this one

from lib.errors import run_main  # noqa: E402
from scripts import scaling  # noqa: E402


def arguments_of(words: list[str] | None = None) -> list[str]:
    """Return the command line of scripts.scaling for one of the document."""
    more = "make scaling does the same; its --corpus (default: wikitext2), --device, --shapes, --budget and"
    parser = argparse.ArgumentParser(
        prog="run_scaling_experiments.py",
        description=__doc__,
        epilog=f"{more} --compare are taken, too: python -m scripts.scaling --help",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="four of the sizes, 64,128x4,8")
    parser.add_argument("--epochs", default="5", help="passes over the corpus; default: 5")
    parser.add_argument("--batch-size", default="32", help="samples of an optimizer step; default: 32")
    parser.add_argument(
        "--output-dir", default=scaling.OUT, help="folder of the results; default: %(default)s"
    )
    own, others = parser.parse_known_args(words)
    shapes = ["--shapes=64,128x4,8"] if own.quick else []
    given = [f"--epochs={own.epochs}", f"--batch={own.batch_size}", f"--out={own.output_dir}"]
    return ["all", "--corpus=wikitext2", *given, *shapes, *others]


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: scaling.main(arguments_of())))
