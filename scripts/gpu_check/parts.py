"""One part of the checks on a real GPU: its measurements in order, until the time is up.

`python -m scripts.gpu_check.parts 1|2|3|4 OUTDIR`, by scripts/gpu_check.sh.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from lib.devices.host import allocator_setting
from lib.errors import ConfigError, run_main
from lib.plan.gpus import find_gpu
from lib.plan.probe_search import smallest_near_best
from lib.plan.types import Precision
from scripts.gpu_check.cases import CASES, Setting
from scripts.gpu_check.layouts import RUN_SECONDS, layout_row, shipped_cases
from scripts.gpu_check.trials import installed, largest
from scripts.gpu_check.worker import Answer, Child

GIB = 2**30
CARDS_GIB = (8, 16, 24, 40, 80)
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
PART_SECONDS = 510.0  # of the nine minutes that a part may take
TRIAL_SECONDS = 120.0  # after which a measurement is given up
COMPILE_SECONDS = 240.0
MAX_SAMPLES = 1 << 16
COMPARED = ("resnet50", "gpt2")  # with Lightning
COMPARED_CARD_GIB = 40

# Micro-batches at which prediction and measurement are compared.
SIZES = {
    "lenet5": (512, 4096, 32768),
    "resnet18": (128, 512, 2048),
    "resnet50": (32, 64, 128),
    "gpt2": (2, 4, 8),
}
# For throughput and compilation: about as many as saturate a large GPU.
BUSY = {"lenet5": 8192, "resnet18": 2048, "resnet50": 256, "gpt2": 32}


class Bench:
    """Environment of the parts: the file of rows, the process that measures, and the seconds left."""

    def __init__(self, file: TextIO, child: Child, *, part: int, seconds: float) -> None:
        self.child = child
        self._file, self._part, self._end = file, part, time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def add(self, kind: str, **values: Any) -> None:
        """Print a row of JSON, and append it to the file, flushed to the disk."""
        row = {"part": self._part, "kind": kind, **values}
        line = json.dumps(row, default=dataclasses.asdict)
        print(line, file=self._file, flush=True)
        os.fsync(self._file.fileno())
        print(line, flush=True)

    def ask(self, what: str, *, seconds: float = TRIAL_SECONDS, **arguments: Any) -> Answer:
        """Return the worker's answer, which must come before the time is up."""
        return self.child.ask({"what": what, **arguments}, seconds=min(seconds, self.left_seconds))

    def in_time(self, *things: Any) -> Iterator[Any]:
        """Yield `things` until the time is up, and report those that are left out."""
        for number, thing in enumerate(things):
            if self.left_seconds == 0:
                self.add("out_of_time", left_out=[str(rest) for rest in things[number:]])
                return
            yield thing


def ladder(size: int, *, step: int) -> tuple[int, ...]:
    """Return an eighth, a quarter, a half and all of `size`, in multiples of `step`, in ascending order."""
    sizes = {max(step, size // part // step * step) for part in (8, 4, 2, 1)}
    return tuple(sorted(sizes))


def part_1(bench: Bench) -> None:
    """Measure the device's own memory, the simulated allocator, and predicted against allocated memory."""
    for dtype in bench.in_time("float32", "bfloat16", "float16"):
        bench.child.close()  # what a first use takes is only seen in a process that has used nothing
        bench.add("context", dtype=dtype, **bench.ask("context", dtype=dtype))
    for case, expandable in bench.in_time(*((case, each) for case in CASES for each in (True, False))):
        bench.child.close()
        setting = Setting(case=case, micro_batch=SIZES[case][0])
        answer = bench.ask("history", setting=setting, expandable=expandable)
        bench.add("history", **dataclasses.asdict(setting), expandable=expandable, **answer)
    settings = (
        Setting(case=case, micro_batch=size, precision=precision, accumulation=accumulation)
        for case in CASES
        for size in SIZES[case]
        for precision in PRECISIONS
        for accumulation in (1, 2)
    )
    for setting in bench.in_time(*settings):
        measured = bench.ask("measure", setting=setting)
        predicted = bench.ask("predict", setting=setting)
        bench.add("predicted_vs_allocated", setting=setting, measured=measured, predicted=predicted)


def part_2(bench: Bench) -> None:
    """Measure the largest micro-batch of each case and card, beside the choices of table and prediction."""
    outside = bench.ask("context", dtype="bfloat16")
    bench.add("context", dtype="bfloat16", **outside)
    # The limit of a process is on its allocator; a real card of that size holds the context, too.
    outside_bytes = max(outside["outside_allocator_bytes"].values()) if outside["status"] == "ok" else 0
    for case in bench.in_time(*reversed(CASES)):  # the large models first: time may be up before the end
        setting = Setting(case=case, micro_batch=CASES[case].step)
        cards_bytes = [card * GIB for card in CARDS_GIB]
        chosen = bench.ask("choose", setting=setting, free_bytes=cards_bytes, most=MAX_SAMPLES)
        bench.add("chosen", case=case, cards_gib=CARDS_GIB, **chosen)
        starts = chosen["predicted"] if chosen["status"] == "ok" else [CASES[case].step] * len(CARDS_GIB)
        for card, start in bench.in_time(*zip(CARDS_GIB, starts, strict=True)):
            limit_bytes = card * GIB - outside_bytes
            found, trials = largest_under(bench, setting, limit_bytes=limit_bytes, start=start)
            complete = all(trial["status"] in ("ok", "out_of_memory") for trial in trials)
            bench.add(
                "largest",
                card_gib=card,
                limit_bytes=limit_bytes,
                case=case,
                largest=found if complete else None,
                trials=trials,
            )


def largest_under(
    bench: Bench, setting: Setting, *, limit_bytes: int, start: int
) -> tuple[int, list[dict[str, Any]]]:
    """Return the largest micro-batch of `setting` that fits, and all sizes that were measured."""
    trials: list[dict[str, Any]] = []

    def works(size: int) -> bool:
        answer = bench.ask(
            "measure", setting=dataclasses.replace(setting, micro_batch=size), limit_bytes=limit_bytes
        )
        trials.append({"micro_batch": size, **answer})
        return bool(answer["status"] == "ok")

    found = largest(works, start=start, step=CASES[setting.case].step, most=MAX_SAMPLES)
    return found, trials


def part_3(bench: Bench) -> None:
    """Measure compilation, the throughput rule, estimated step times, and Lightning's finder."""
    for case in bench.in_time(*CASES):
        rates: dict[int, float] = {}
        for size in bench.in_time(*ladder(BUSY[case], step=CASES[case].step)):
            answer = bench.ask("measure", setting=Setting(case=case, micro_batch=size), timed=True)
            bench.add("throughput", case=case, micro_batch=size, **answer)
            if answer["status"] == "ok":
                rates[size] = answer["samples_per_second"]
        if rates:
            bench.add("throughput_rule", case=case, rates=rates, chosen=smallest_near_best(rates))
    for case in bench.in_time(*CASES):
        for compiled, cuda_graphs in ((False, False), (True, False), (True, True)):
            own: dict[str, Any] = {"compile": compiled, "cuda_graphs": cuda_graphs}
            setting = Setting(case=case, micro_batch=BUSY[case], **own)
            answer = bench.ask("measure", setting=setting, timed=True, seconds=COMPILE_SECONDS)
            bench.add("compile", **dataclasses.asdict(setting), **answer)
            if cuda_graphs:  # times are estimated without them
                continue
            estimated = bench.ask("estimate", setting=setting)
            bench.add("step_time", setting=setting, measured=answer.get("step_seconds"), estimated=estimated)
    if installed() is None:
        bench.add("lightning", status="not_installed")
        return
    for case, mode in bench.in_time(*((case, mode) for case in COMPARED for mode in ("power", "binsearch"))):
        bench.child.close()
        setting = Setting(case=case, micro_batch=CASES[case].step, any_batch=True)
        arguments = {"setting": setting, "mode": mode, "limit_bytes": COMPARED_CARD_GIB * GIB}
        bench.add("lightning", **arguments, **bench.ask("lightning", **arguments))


def part_4(bench: Bench, *, devices: int | None = None) -> None:
    """Train with each parallelism strategy on all devices, beside one device.

    devices: None for the GPUs of this machine.
    """
    devices = torch.cuda.device_count() if devices is None else devices
    bench.child.close()  # what it holds is memory that the runs need
    with tempfile.TemporaryDirectory(prefix="anneal-layouts-") as folder:
        for case in shipped_cases():
            one: list[float] = []
            for strategy in bench.in_time("single", *case.strategies):
                limits: dict[str, Any] = {"seconds": min(RUN_SECONDS, bench.left_seconds), "devices": devices}
                own = Path(folder, case.defconfig)
                row = layout_row(case, strategy, one=one, folder=own, **limits)
                one = row.get("losses", []) if strategy == "single" else one
                bench.add("layout", **row)


PARTS = {1: part_1, 2: part_2, 3: part_3, 4: part_4}


def main(arguments: Sequence[str]) -> int:
    """Run one part of the checks. Raises ConfigError without a GPU."""
    options = parse(arguments)
    machine = describe_machine()
    options.directory.mkdir(parents=True, exist_ok=True)
    name = options.directory / f"part{options.part}"
    with (
        name.with_suffix(".jsonl").open("a", encoding="utf-8") as rows,
        name.with_suffix(".log").open("a", encoding="utf-8") as log,
        Child(log=log) as child,
    ):
        bench = Bench(rows, child, part=options.part, seconds=options.seconds)
        bench.add("machine", **machine)
        PARTS[options.part](bench)
        bench.add("end", left_seconds=bench.left_seconds)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments: part (1 to 4), directory, and seconds after which nothing new is begun."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__)
    parser.add_argument("part", type=int, choices=PARTS)
    parser.add_argument("directory", type=Path, metavar="OUTDIR")
    parser.add_argument("--seconds", type=float, default=PART_SECONDS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def describe_machine() -> dict[str, Any]:
    """Describe the first GPU and its software. Raises ConfigError where there is none."""
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
        "allocator": allocator_setting(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
