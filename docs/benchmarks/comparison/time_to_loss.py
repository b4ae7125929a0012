"""Time to a loss on Tiny Shakespeare: nanoGPT's recipe for a CPU beside defconfig gpt2-shakespeare.

    python -m docs.benchmarks.comparison.time_to_loss --seeds 3

Both train a network of 0.8 million parameters, take turns, and are evaluated on the whole validation split
after every twentieth of their steps. Seconds are of training alone. nanoGPT's recipe (config/
train_shakespeare_char.py with the options that its README gives for a CPU) is a loop by hand here: 12 windows
of 64 characters, AdamW at 1e-3 with betas 0.9 and 0.99 and decay 0.1 of matrices, 100 steps of warmup, cosine
to 1e-4 in 2000 steps, clipping at 1, fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from docs.benchmarks.comparison.peer_models import GPT
from lib import kconf
from lib.config import config_from_values
from lib.data import TextSpec
from lib.errors import run_main
from lib.runs import metrics
from lib.units import counted
from scripts.short_run import ROOT, short_run
from train.training_data import TrainingData, open_training_data

CASE, EVALUATIONS = "gpt2-shakespeare", 20
STEPS, WARMUP, ROWS = 2000, 100, 12
PEAK, LEAST = 1e-3, 1e-4
Curve = list[tuple[float, float]]  # seconds of training, validation loss


def toolkit(settings: dict[str, str], *, seed: int, folder: Path) -> Curve:
    """Train the defconfig in a process of its own, as make train does."""
    whole = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / CASE, overrides=settings).values
    every = int(whole["MAX_STEPS"]) // EVALUATIONS
    given = {"CONFIG_SEED": str(seed), "CONFIG_EVAL_INTERVAL_STEPS": str(every), **settings}
    run = short_run(CASE, given, folder=folder)
    rows = metrics.read(run.metrics)
    seconds = {row["step"]: row["seconds"] for row in rows if row["kind"] == "train"}
    return [(seconds[row["step"]], row["loss"]) for row in rows if row["kind"] == "eval"]


def nanogpt(data: TrainingData, *, seed: int) -> Curve:
    """Train by nanoGPT's recipe."""
    spec, part = data.dataset.spec, data.dataset.train
    assert isinstance(spec, TextSpec)
    torch.manual_seed(seed)
    model = GPT(spec, gelu="none")
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.99))
    seconds, curve = 0.0, Curve()
    for step in range(STEPS):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(len(part.tokens) - spec.block_size, (ROWS,)).tolist()
        x_BT, y_BT = windows(part.tokens, [(start, start + spec.block_size) for start in starts])
        loss_of(model, x_BT, y_BT).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - began
        if (step + 1) % (STEPS // EVALUATIONS) == 0:
            curve.append((seconds, validation_loss(model, data.dataset.test.tokens, spec.block_size)))
    return curve


def learning_rate(step: int) -> float:
    """Return the rate of `step`: a linear warmup, then a cosine."""
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    return LEAST + (PEAK - LEAST) / 2 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def windows(tokens: Any, places: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return windows of `tokens` and the tokens that follow each, int64 (B, T)."""
    x_BT, y_BT = (
        torch.from_numpy(np.stack([tokens[start + k : end + k] for start, end in places]).astype(np.int64))
        for k in (0, 1)
    )
    return x_BT, y_BT


def loss_of(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    """Return the mean loss of a token."""
    logits = model(x_BT)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y_BT.view(-1))


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Any, block: int) -> float:
    """Return the mean loss over all whole windows of `tokens`, which follow each other."""
    starts = range(0, len(tokens) - block, block)
    total = 0.0
    for first in range(0, len(starts), 128):
        places = [(start, start + block) for start in starts[first : first + 128]]
        total += float(loss_of(model, *windows(tokens, places))) * len(places)
    return total / len(starts)


def first_below(curve: Curve, target: float) -> float | None:
    """Return the seconds after which the loss, rounded to hundredths, is `target` or less; None if never."""
    return next((seconds for seconds, loss in curve if round(loss, 2) <= target), None)


def main() -> int:
    """Compare the two, print a table, and write the curves to the JSON file of --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=1.90, help="validation loss")
    parser.add_argument("--data-dir", help="folder of the text (CONFIG_DATA_DIR)")
    parser.add_argument("--out", type=Path, help="JSON file for the curves")
    options = parser.parse_args()
    settings = {"CONFIG_DATA_DIR": str(Path(options.data_dir).absolute())} if options.data_dir else {}
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / CASE, overrides=settings)
    data = open_training_data(config_from_values(resolved.values), root=ROOT, log=lambda _: None)
    curves: dict[str, list[Curve]] = {"the toolkit": [], "nanoGPT's recipe": []}
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            curves["the toolkit"].append(toolkit(settings, seed=seed, folder=Path(folder)))
        curves["nanoGPT's recipe"].append(nanogpt(data, seed=seed))
    reached = f"s to {options.target:.2f}"
    print(f"{counted(options.seeds, 'seed')}, medians{reached:>23}{'s in all':>12}{'last loss':>12}")
    for name, found in curves.items():
        times = [first_below(curve, options.target) for curve in found]
        known = [seconds for seconds in times if seconds is not None]
        median = f"{statistics.median(known):.1f}" if len(known) == len(times) else "not by all"
        whole, last = (statistics.median(curve[-1][column] for curve in found) for column in (0, 1))
        print(f"{name:24}{median:>15}{whole:12.1f}{last:12.4f}")
    print(
        f"{torch.get_num_threads()} threads; load of the machine in the last minute {os.getloadavg()[0]:.1f}"
    )
    if options.out:
        options.out.write_text(json.dumps(curves, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
