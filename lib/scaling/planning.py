"""Which models a sweep trains, and what each will cost, before any is trained."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lib.cross_entropy import cross_entropy
from lib.data.types import TextSpec
from lib.errors import ConfigError
from lib.memory.facts import model_facts
from lib.registry import build_model
from lib.scaling.counts import Counts, count, training_flops
from lib.scaling.results import ScalingConfig

DOCUMENT_WIDTHS, DOCUMENT_LAYERS = (64, 128, 256, 512), (4, 8, 12, 16)
_BASE_RATE, _BASE_WIDTH, _LARGEST_RATE = 0.016, 32, 0.02
_TIMED_STEPS, _TIMED_ROWS = 5, 4
_START_SECONDS = 4.0  # of a process, before its first step
_PROCESS_BYTES = 400_000_000  # of Python and torch
_STATE_BYTES = 12  # a parameter and Adam's two averages of it, in a checkpoint
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a sweep crosses. One shape at one amount of data is trained with every seed, the rest with one."""

    shapes: tuple[tuple[int, int], ...]  # d_model, n_layers
    tokens: tuple[int, ...]  # none: whole passes over the corpus
    batch_size: int
    seeds: tuple[int, ...]
    repeated: tuple[int, int]


QUICK = Grid(
    shapes=((16, 2), (32, 2), (64, 2), (64, 4)),
    tokens=(300_000, 600_000, 1_200_000),
    batch_size=4,
    seeds=(1, 2, 3),
    repeated=(32, 2),
)
DOCUMENT = Grid(
    shapes=tuple(itertools.product(DOCUMENT_WIDTHS, DOCUMENT_LAYERS)),
    tokens=(2_000_000, 4_000_000, 8_000_000),
    batch_size=16,
    seeds=(1, 2, 3),
    repeated=(64, 4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One run, and what it will cost."""

    name: str
    config: ScalingConfig
    counts: Counts
    flops: int
    seconds: float
    disk_bytes: int
    ram_bytes: int

    def line(self) -> str:
        return (
            f"{self.name:28} {self.config.arch:18} {self.counts.total:>11,} {self.counts.nonembedding:>11,} "
            f"{self.counts.active:>11,} {self.config.tokens:>10,} {self.flops:>9.2e} {self.seconds:>7.0f} s "
            f"{self.disk_bytes / 1e6:>6.0f} MB {self.ram_bytes / 1e6:>6.0f} MB"
        )


HEADINGS = (
    f"{'run':28} {'architecture':18} {'parameters':>11} {'non-emb.':>11} {'active':>11} {'tokens':>10} "
    f"{'FLOPs':>9} {'seconds':>9} {'disk':>9} {'RAM':>9}"
)


def learning_rate(width: int) -> float:
    """Found best at a width of 32, and falling with the width; narrower models take no more than 0.02."""
    return min(_LARGEST_RATE, _BASE_RATE * _BASE_WIDTH / width)


def configs_of(grid: Grid, *, architectures: Sequence[str], base: ScalingConfig) -> list[ScalingConfig]:
    """Every run of `grid`; architectures are paired at every point. base: what all of them share."""
    middle = sorted(grid.tokens)[(len(grid.tokens) - 1) // 2] if grid.tokens else 0
    found = []
    for (width, layers), tokens, arch in itertools.product(grid.shapes, grid.tokens or (0,), architectures):
        repeated = (width, layers) == grid.repeated and tokens == middle
        found += [
            dataclasses.replace(
                base,
                d_model=width,
                n_layers=layers,
                lr=learning_rate(width),
                tokens=tokens,
                arch=arch,
                seed=seed,
            )
            for seed in (grid.seeds if repeated else grid.seeds[:1])
        ]
    return found


def names_of(configs: Sequence[ScalingConfig]) -> list[str]:
    """d64_l4 for the first seed at the most data of the first architecture; what differs is added."""
    most = max(config.tokens for config in configs)
    names = []
    for config in configs:
        parts = [f"d{config.d_model}_l{config.n_layers}"]
        parts += [f"{config.tokens // 1000}k"] if config.tokens != most else []
        parts += [f"s{config.seed}"] if config.seed != configs[0].seed else []
        parts += [config.arch] if config.arch != configs[0].arch else []
        names.append("_".join(parts))
    assert len(set(names)) == len(names)
    return names


def planned(configs: Sequence[ScalingConfig], spec: TextSpec, *, train_tokens: int) -> list[Planned]:
    """What each will cost on this machine, on one thread. train_tokens: of one pass over the corpus."""
    rates: dict[tuple[int, int, str], float] = {}
    found = []
    for name, config in zip(names_of(configs), configs, strict=True):
        model, options = config.model()
        build = partial(build_model, model, options, spec, seed=config.seed)
        shape = config.d_model, config.n_layers, config.arch
        if shape not in rates:
            rates[shape] = seconds_per_token(build, spec, rows=min(_TIMED_ROWS, config.batch_size))
        tokens = config.tokens or config.epochs * train_tokens
        counts = count(build)
        facts = model_facts(build, spec, name=model, train_size=1)
        found.append(
            Planned(
                name=name,
                config=config,
                counts=counts,
                flops=tokens * training_flops(build, block_size=config.n_seq),
                # A pass over the evaluation part costs a third of training on as much.
                seconds=_START_SECONDS + rates[shape] * (tokens + spec.validation_tokens / 3),
                disk_bytes=_STATE_BYTES * counts.total,
                ram_bytes=_PROCESS_BYTES
                + 16 * counts.total
                + config.batch_size * (facts.bytes_per_sample or 0),
            )
        )
    return found


def within(plan: Sequence[Planned], *, seconds: float, workers: int) -> list[Planned]:
    """`plan` without its dearest cells, as many as it takes; a cell goes with all architectures and seeds."""
    kept = list(plan)
    while kept and sum(each.seconds for each in kept) / workers > seconds:
        dearest = max(kept, key=lambda each: each.seconds).config
        kept = [
            each
            for each in kept
            if (each.config.d_model, each.config.n_layers, each.config.tokens)
            != (dearest.d_model, dearest.n_layers, dearest.tokens)
        ]
    if not kept:
        raise ConfigError(f"BUDGET is {seconds:.0f} s", why="not one run takes as little")
    return kept


def seconds_of(budget: str) -> float:
    """90s, 10m or 2h in seconds. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+)([smh])", budget)
    if match is None:
        raise ConfigError(f"BUDGET={budget} is no time", todo="write for example 90s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2]]


def seconds_per_token(build: Callable[[], nn.Module], spec: TextSpec, *, rows: int) -> float:
    """Of training on one thread, from five steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens_BT = torch.zeros(rows, spec.block_size, dtype=torch.long)
        taken = []
        for _ in range(_TIMED_STEPS):
            started = time.perf_counter()
            loss_BT = cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
            torch.autograd.backward(loss_BT.mean())
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return sorted(taken)[_TIMED_STEPS // 2] / tokens_BT.numel()
