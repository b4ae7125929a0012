"""`python -m scripts.gpu_check 1|2|3 OUTDIR`: one part of the checks on a real GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, run_main
from lib.plan.gpus import find_gpu

PART_SECONDS = 510.0  # of the nine minutes that a part may take


def main(arguments: Sequence[str]) -> int:
    """Run one part of the checks. Raises ConfigError without a GPU."""
    options = parse(arguments)
    machine = describe_machine()
    from scripts.gpu_check.parts import PARTS, Bench, Deadline, Rows
    from scripts.gpu_check.worker import Child

    deadline = Deadline(options.seconds)
    options.directory.mkdir(parents=True, exist_ok=True)
    with (
        Rows(options.directory / f"part{options.part}.jsonl", part=options.part) as rows,
        (options.directory / f"part{options.part}.log").open("a", encoding="utf-8") as log,
        Child(log=log) as child,
    ):
        rows.add("machine", **machine)
        PARTS[options.part](Bench(rows, child, deadline))
        rows.add("end", left_seconds=deadline.left_seconds)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments: part (1, 2 or 3), directory, and seconds after which nothing new is begun."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument("part", type=int, choices=(1, 2, 3))
    parser.add_argument("directory", type=Path, metavar="OUTDIR")
    parser.add_argument("--seconds", type=float, default=PART_SECONDS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def describe_machine() -> dict[str, Any]:
    """Describe the first GPU and its software. Raises ConfigError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA or ROCm GPU to check on", why=f"torch {torch.__version__} finds none"
        )
    properties = torch.cuda.get_device_properties(0)
    known = find_gpu(properties.name)
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "catalogue": known.key if known else None,
        "catalogue_bytes": known.total_bytes if known else None,
        "capability": [properties.major, properties.minor],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
