"""Compare predictions with published lists of the largest batches that trained on a 24 GiB RTX 3090.

    python -m scripts.bench.check_published NCHW.csv NHWC.csv ROWS.jsonl [--most N] [--out FILE.json]

The lists are timm's results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv and the one for nhwc, with the
columns model, train_batch_size, train_img_size and param_count (millions). For each model the batch listed
ran, and the next of the ladder is taken to have run out of memory. Models come from the timm of that time,
which must be installed (pip install --no-deps timm==0.6.7): later ones have other code under the same names.
Rows whose number of parameters is not that of the model are dropped. Models are in the order of the hash of
their names, so that the first N are a sample, and so is their half. ROWS.jsonl holds a line for each model;
lines that are there are not computed again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lib.errors import ToolkitError, run_main
from lib.memory import simulation
from lib.memory.allocator import least_capacity
from lib.memory.any_module import built
from lib.memory.live import CUDA_GRANULARITY, LiveBytes, Trace
from lib.memory.twin import RealConstants, without_contents
from lib.nn.packages import import_extra
from lib.plan.tables import GPU_RESERVE_BYTES, PEAK_FACTOR

LADDER = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
CARD_BYTES = 25_447_170_048  # of an RTX 3090, as its driver reports them
CLASSES = 1000
TIMM_VERSION = "0.6.7"  # of July 2022, with all models of the list
SCALES = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25)
SAME_PARAMETERS = 0.01  # relative difference up to which a model is the listed one


def main() -> int:
    """Predict for the listed models that have no row yet, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("nchw", "nhwc", "rows"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--most", type=int, default=10_000, help="models of the sample")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    version = import_extra("timm").__version__
    if version != TIMM_VERSION:
        raise ToolkitError(
            f"this is timm {version}",
            why="the list was made with models that take other memory today",
            todo=f"pip install --no-deps timm=={TIMM_VERSION}",
        )
    torch.set_num_threads(1)
    lists = {name: _listed(getattr(options, name)) for name in ("nchw", "nhwc")}
    both = lists["nchw"].keys() & lists["nhwc"]
    names = sorted(both, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[: options.most]
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    known: dict[str, dict[str, Any]] = {row["model"]: row for row in map(json.loads, lines)}
    with options.rows.open("a") as stream:
        for name in [name for name in names if name not in known]:
            batches = sorted({size for rows in lists.values() for size in tried(rows[name]) if size})
            known[name] = _predict(name, lists["nchw"][name], batches)
            print(json.dumps(known[name]), file=stream, flush=True)
    made_with = {
        "command": f"python -m scripts.bench.check_published NCHW.csv NHWC.csv ROWS --most {len(names)}",
        "versions": {"torch": torch.__version__, "timm": version, "python": platform.python_version()},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
    }
    result = json.dumps({**made_with, **scores([known[name] for name in names], lists)}, indent=1)
    print(result)
    if options.out:
        options.out.write_text(result + "\n")
    return 0


def _listed(file: Path) -> dict[str, dict[str, str]]:
    with file.open() as stream:
        return {row["model"]: row for row in csv.DictReader(stream)}


def tried(row: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the batch that ran, and the one taken to have run out of memory; None above the ladder."""
    batch = int(row["train_batch_size"])
    return batch, LADDER[LADDER.index(batch) - 1] if batch in LADDER[1:] else None


def half(name: str) -> str:
    """Return the half of the list, "first" or "second", that a model belongs to."""
    return "first" if hashlib.sha256(name.encode()).digest()[-1] % 2 else "second"


def scores(
    rows: Sequence[Mapping[str, Any]], lists: Mapping[str, Mapping[str, Mapping[str, str]]]
) -> dict[str, Any]:
    """Return right, refused and unsafe decisions by the plan's rule: on each list, and where both agree.

    Where both agree also for the half of the models that the rule was not chosen on, with all predictions
    scaled, and for the naive count of activations against the whole card.
    """
    needs = {row["model"]: row["needs"] for row in rows if "needs" in row}
    agreed = [name for name in needs if len({tried(listed[name]) for listed in lists.values()}) == 1]
    cases = {name: (listed, [*needs]) for name, listed in lists.items()}
    cases["agreed"] = lists["nchw"], agreed
    cases["agreed, second half"] = lists["nchw"], [name for name in agreed if half(name) == "second"]

    def decide(case: str, need_of: Callable[[Mapping[str, int]], float]) -> dict[str, Any]:
        listed, names = cases[case]
        fits, over = {}, {}
        for name in names:
            ran, failed = tried(listed[name])
            fits[name] = need_of(needs[name][str(ran)]) <= CARD_BYTES
            if failed is not None:
                over[name] = need_of(needs[name][str(failed)]) > CARD_BYTES
        decisions, right = len(fits) + len(over), sum(fits.values()) + sum(over.values())
        return {
            "models": len(names),
            "decisions": decisions,
            "right": right,
            "percent": round(100 * right / max(1, decisions), 1),
            "refused": [name for name in fits if not fits[name]],
            "unsafe": [name for name in over if not over[name]],
        }

    def rule(sizes: Mapping[str, int], scale: float = 1.0) -> float:
        return scale * (sizes["peak"] * PEAK_FACTOR + sizes["gaps"]) + GPU_RESERVE_BYTES

    scaled = {scale: decide("agreed", partial(rule, scale=scale)) for scale in SCALES}
    return {
        "dropped": dict(Counter(row["dropped"] for row in rows if "dropped" in row)),
        "rule": {case: decide(case, rule) for case in cases},
        "scaled": {
            scale: {**each, "refused": len(each["refused"]), "unsafe": len(each["unsafe"])}
            for scale, each in scaled.items()
        },
        "naive": decide("agreed", lambda sizes: sizes["naive"]),
    }


def _predict(name: str, row: Mapping[str, str], batches: Sequence[int]) -> dict[str, Any]:
    timm = import_extra("timm")
    if not timm.is_model(name):
        return {"model": name, "dropped": "unknown to this timm"}
    # torch 1.12 left what is scaled in half precision.
    in_fp32 = [each for each in simulation.AUTOCAST_ON_CUDA["fp32"] if "upsample" not in each]
    lists = mock.patch.dict(simulation.AUTOCAST_ON_CUDA, fp32=in_fp32)
    with lists, simulation.simulation("cuda"):
        try:
            with RealConstants():
                model = built(partial(timm.create_model, name, num_classes=CLASSES)).train()
        except (RuntimeError, TypeError, ImportError) as error:
            return {"model": name, "dropped": "cannot be built", "error": str(error)[:200]}
        model = without_contents(model)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        if abs(millions - float(row["param_count"])) > SAME_PARAMETERS * millions:
            return {"model": name, "dropped": "another model under the name", "millions": millions}
        try:
            needs = {size: _need(model, int(row["train_img_size"]), size) for size in batches}
        # As fake tensors refuse, or without a package of kernels; a mistake of ours must not look like that.
        except (RuntimeError, ImportError) as error:
            return {"model": name, "dropped": "cannot be traced", "error": str(error)[:200]}
    return {"model": name, "needs": {str(size): need for size, need in needs.items()}}


def _need(model: nn.Module, pixels: int, batch: int) -> dict[str, int]:
    """Bytes at the peak of training `model` as timm's benchmark.py does, of the gaps, and counted naively."""
    model.zero_grad()
    live, outputs = LiveBytes(granularity=CUDA_GRANULARITY), [0]
    with live:
        live.add([*model.parameters(), *model.buffers()], "parameters")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        images = torch.zeros(batch, 3, pixels, pixels)  # one batch of single precision for all steps
        for first in (True, False):
            start = live.mark()
            hooks = [_count(each, outputs) for each in model.modules() if first and not [*each.children()]]
            with torch.autocast("cpu", dtype=torch.float16):
                output = model(images)
                if isinstance(output, tuple):  # of a model with a second head, to be distilled
                    output = output[0]
                value = F.cross_entropy(output.float(), torch.zeros(batch, dtype=torch.int64))
                del output
            for hook in hooks:
                hook.remove()
            value.backward()  # type: ignore[no-untyped-call]
            del value
            if first:
                optimizer.step()
        # In torch 1.12 zero_grad() kept the gradients' memory from one step to the next.
        live.repeat(start, live.mark())
    # Weights, gradients and momentum in single precision, and each module's output in half.
    naive = 12 * sum(weight.numel() for weight in model.parameters()) + 2 * outputs[0]
    return {**_sizes(live.trace()), "naive": naive}


def _sizes(trace: Trace) -> dict[str, int]:
    peak = trace.peak_bytes
    # The list was made with the default of the allocator.
    return {"peak": peak, "gaps": least_capacity(trace.history(), expandable=False) - peak}


def _count(module: nn.Module, count: list[int]) -> RemovableHandle:
    def add(_: nn.Module, __: Any, output: Any) -> None:
        count[0] += output.numel() if isinstance(output, Tensor) else 0

    return module.register_forward_hook(add)


if __name__ == "__main__":
    sys.exit(run_main(main))
