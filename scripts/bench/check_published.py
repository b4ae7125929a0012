"""Compare predictions with a published list of the largest batches that trained on a 24 GiB RTX 3090.

    python -m scripts.bench.check_published LIST.csv ROWS.jsonl [--half first|second] [--most N]

LIST.csv has the columns model, train_batch_size, train_img_size and param_count (millions) of timm's
results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv. For each model the batch listed ran, and the next
one of the ladder is taken to have run out of memory. Models come from the timm of that time, which must be
installed (pip install --no-deps timm==0.6.7): later ones have other code under the same names. torchvision,
which it imports and these models do not use, is left out. Rows whose number of parameters is not that of the
model are dropped. A model's half is decided by the hash of its name. ROWS.jsonl holds a line for each model;
lines that are there are not computed again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.abc
import importlib.machinery
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.errors import ToolkitError
from lib.memory import predict_peak, simulation
from lib.memory.allocator import least_capacity
from lib.memory.twin import without_contents
from lib.plan.tables import GPU_RESERVE_BYTES, PEAK_FACTOR

LADDER = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
CARD_BYTES = 25_447_170_048  # of an RTX 3090, as its driver reports them
CLASSES = 1000
TIMM_VERSION = "0.6.7"  # of July 2022, with all models of the list
SAME_PARAMETERS = 0.01  # relative difference up to which a model is the listed one


class _NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision with anything in them."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002
        if fullname.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = mock.MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__ = [], spec, "0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> int:
    """Predict for the listed models that have no row yet, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("list", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--half", choices=("first", "second"))
    parser.add_argument("--most", type=int, default=10_000, help="models to predict for in this call")
    options = parser.parse_args()
    sys.meta_path.insert(0, _NoTorchvision())
    import timm  # type: ignore[import-not-found]  # not among the toolkit's packages

    if timm.__version__ != TIMM_VERSION:
        raise ToolkitError(
            f"this is timm {timm.__version__}",
            why="the list was made with models that take other memory today",
            todo=f"pip install --no-deps timm=={TIMM_VERSION}",
        )
    torch.set_num_threads(1)
    rows = csv.DictReader(options.list.open())
    listed = {row["model"]: row for row in rows if options.half in (None, half(row["model"]))}
    # In an order that has nothing to do with the list's, so that a part of them is a sample.
    names = sorted(listed, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    known: dict[str, dict[str, Any]] = {row["model"]: row for row in map(json.loads, lines)}
    with options.rows.open("a") as stream:
        for name in [name for name in names if name not in known][: options.most]:
            known[name] = _predict(listed[name])
            print(json.dumps(known[name]), file=stream, flush=True)
    for line in report([row for name, row in known.items() if name in listed]):
        print(line)
    return 0


def half(name: str) -> str:
    """Return the half of the list, "first" or "second", that a model belongs to."""
    return "first" if hashlib.sha256(name.encode()).digest()[-1] % 2 else "second"


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the decisions by the rule of plans, and by others."""
    used = [row for row in rows if "fits" in row]
    dropped = Counter(row["dropped"] for row in rows if "dropped" in row)
    reasons = ", ".join(f"{count} {why}" for why, count in sorted(dropped.items()))
    yield f"{len(rows)} models, {len(used)} used: {reasons}"
    for name, gaps, factor, reserve in (
        ("the plan's rule", 1, PEAK_FACTOR, GPU_RESERVE_BYTES),
        ("without gaps between tensors", 0, PEAK_FACTOR, GPU_RESERVE_BYTES),
        ("no reserve", 0, 1.0, 0),
    ):
        room = CARD_BYTES - reserve
        need = {
            (row["model"], batch): row[batch]["peak"] * factor + row[batch]["gaps"] * gaps
            for row in used
            for batch in ("fits", "fails")
            if row[batch] is not None
        }
        refused = [model for (model, batch), size in need.items() if batch == "fits" and size > room]
        unsafe = [model for (model, batch), size in need.items() if batch == "fails" and size <= room]
        right = len(need) - len(refused) - len(unsafe)
        yield f"{name}: {right} of {len(need)} decisions right ({right / len(need):.1%})"
        yield f"  {len(refused)} refused that ran: {', '.join(refused)}"
        yield f"  {len(unsafe)} allowed that did not: {', '.join(unsafe)}"


def _predict(row: dict[str, str]) -> dict[str, Any]:
    import timm

    name, batch, size = row["model"], int(row["train_batch_size"]), int(row["train_img_size"])
    if not timm.is_model(name):
        return {"model": name, "dropped": "unknown to this timm"}
    try:
        model = timm.create_model(name, num_classes=CLASSES)
    except (RuntimeError, TypeError, ImportError) as error:
        return {"model": name, "dropped": "cannot be built", "error": str(error)[:200]}
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    if abs(millions - float(row["param_count"])) > SAME_PARAMETERS * millions:
        return {"model": name, "dropped": "another model under the name", "millions": millions}
    above = LADDER[LADDER.index(batch) - 1] if batch in LADDER[1:] else None
    try:
        fits = _need(model, size, batch)
        fails = _need(model, size, above) if above is not None else None
    # As fake tensors refuse, or without a package of kernels; a mistake of ours must not look like that.
    except (RuntimeError, ImportError) as error:
        return {"model": name, "dropped": "cannot be traced", "error": str(error)[:200]}
    return {"model": name, "batch": batch, "fits": fits, "fails": fails}


def _need(model: nn.Module, size: int, batch: int) -> dict[str, int]:
    """Bytes at the peak of training `model` as timm's benchmark.py does, and of the gaps between them."""
    held: list[Tensor] = []  # one batch of single precision for all steps

    def loss(model: nn.Module, rows: int) -> Tensor:
        if not held:
            held.append(torch.zeros(rows, 3, size, size))
        output = model(held[0])
        if isinstance(output, tuple):  # of a model with a second head, to be distilled
            output = output[0]
        return F.cross_entropy(output.float(), torch.zeros(rows, dtype=torch.int64))

    # torch 1.12 left what is scaled in half precision.
    in_fp32 = [name for name in simulation.AUTOCAST_ON_CUDA["fp32"] if "upsample" not in name]
    with mock.patch.dict(simulation.AUTOCAST_ON_CUDA, fp32=in_fp32):
        trace = predict_peak(
            lambda: without_contents(model),
            loss,
            micro_batch=batch,
            precision="fp16",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
            # In torch 1.12 zero_grad() kept the gradients' memory from one step to the next: as between two
            # micro-batches.
            accumulation=2,
        )
    peak = trace.peak_bytes
    # The list was made with the default of the allocator.
    return {"peak": peak, "gaps": least_capacity(trace.history(), expandable=False) - peak}


if __name__ == "__main__":
    sys.exit(main())
