"""Predicted and measured peaks of compiled steps on the CPU, for shipped configurations.

    python -m scripts.bench.compiled_memory DEFCONFIG ... [CONFIG_NAME=VALUE ...] [--micro-batch N]

Two optimizer steps and a batch of evaluation run twice: simulated, and compiled and computed. Both times the
storages of tensors are counted, in bytes. A C++ compiler is needed, for the second.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.probe import probe
from lib.errors import ConfigError, run_main
from lib.memory.simulation import replaced
from lib.plan.compile_parts import choose_parts
from lib.plan.fitting import StepSettings, plan_of
from lib.plan.types import Plan, Precision
from train.planning import memory_estimate
from train.planning.memory_estimate import trace_memory
from train.training_data import TrainingData, open_training_data

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Print a row for each defconfig of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", help="defconfigs, and CONFIG_NAME=VALUE for all of them")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32")
    options = parser.parse_args()
    settings = dict(name.split("=", 1) for name in options.names if "=" in name)
    case = f"defconfig, {options.micro_batch}, {options.precision}"
    print(f"| {case} | not compiled | predicted | measured | off | CPU |")
    print("|---|---|---|---|---|---|")
    for name in options.names:
        if "=" not in name:
            print(row(name, settings, options.micro_batch, options.precision), flush=True)
    return 0


def row(name: str, settings: Mapping[str, str], micro_batch: int, precision: Precision) -> str:
    """Return the row of defconfig `name`."""
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides=settings)
    config = config_from_values(resolved.values).replace(data_placement="stream")
    if micro_batch % (config.norm_batch or 1):
        what = f"--micro-batch {micro_batch} is not a multiple of CONFIG_NORM_BATCH={config.norm_batch}"
        raise ConfigError(f"{what} of {name}", todo="give one that is")
    data = open_training_data(config, root=ROOT, trained=False, log=lambda _: None)
    step = StepSettings(
        device="cpu", several_devices=False, micro_batch=micro_batch, precision=precision, compile=True,
        norm_batch=config.norm_batch or 0, channels_last=False,
    )  # fmt: skip
    eager = plan_of(dataclasses.replace(step, compile=False))
    not_compiled = peak(config, eager, data)
    parts = choose_parts(config, data.facts)
    compiled = dataclasses.replace(plan_of(step), compile_parts=parts.value)
    began = time.process_time()
    predicted = peak(config, compiled, data)
    took = time.process_time() - began
    real = measured(config, compiled, data)
    sizes = " | ".join(f"{size / 1e6:.3f} MB" for size in (not_compiled, predicted, real))
    return f"| {name} | {sizes} | {predicted / real - 1:+.2%} | {took:.1f} s |"


def peak(config: Config, plan: Plan, data: TrainingData) -> int:
    """Return the bytes of storages at the peak of steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor uses what torch deprecates
        try:
            return trace_memory(config, plan, data, hardware=probe("cpu")).trace.peak_bytes
        finally:
            torch.compiler.reset()  # what was compiled for simulated tensors is for no others


def measured(config: Config, plan: Plan, data: TrainingData) -> int:
    """Return `peak` of steps that run, compiled by Inductor, whose allocations torch's dispatcher sees."""
    import torch._inductor.config  # slow

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    real = replaced(memory_estimate, simulation=lambda _: contextlib.nullcontext())
    cache = torch._inductor.config.patch(fx_graph_cache=False)
    with real, cache, replaced(torch._C._dynamo.guards, _empty_strided_cpu=empty):
        return peak(config, plan, data)


if __name__ == "__main__":
    sys.exit(run_main(main))
