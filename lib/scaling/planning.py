"""Which models a sweep trains, and what each will cost, before any is trained."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lib.data.types import TextSpec
from lib.errors import ConfigError
from lib.nn.model_code import build_model
from lib.scaling.costs import Shape, costs_of, shape_of
from lib.scaling.counts import Counts, count
from lib.scaling.results import BLOCK, ScalingConfig

DOCUMENT_WIDTHS, DOCUMENT_LAYERS = (64, 128, 256, 512), (4, 8, 12, 16)
_BASE_RATE, _BASE_WIDTH, _LARGEST_RATE = 0.016, 32, 0.02
_START_SECONDS = 4.0  # of a process, before its first step
_PROCESS_BYTES = 400_000_000  # of Python and torch
_STATE_BYTES = 12  # a parameter and Adam's two averages of it, in a checkpoint
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a sweep crosses. One shape at one amount of data is trained with every seed, the rest with one."""

    shapes: tuple[tuple[int, int], ...]  # d_model, n_layers
    tokens: tuple[int, ...]  # where the corpus has as many; none: whole passes over it
    batch_size: int
    seeds: tuple[int, ...]
    repeated: tuple[int, int]

    def fitted(self, one_pass: int) -> Grid:
        """With less data, in proportion, where one pass over the corpus is less than the most of it.

        Text that is seen again is worth less: the amount of data would not be what it says. one_pass: in
        tokens. Raises ConfigError where the least is less than one optimizer step.
        """
        step = self.batch_size * BLOCK
        most = max(self.tokens, default=one_pass)
        longest = min(most, one_pass // step * step)
        tokens = tuple(amount * longest // most for amount in self.tokens)
        if (least := min(tokens, default=longest)) < step:
            raise ConfigError(
                f"BATCH={self.batch_size} is too large for this corpus",
                why=f"an optimizer step takes {step} tokens, and the least amount of data is {least}",
                todo="give a smaller BATCH= or a longer text",
            )
        return dataclasses.replace(self, tokens=tokens)


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
    """One run, and what it will cost. tokens: that it will be trained on."""

    name: str
    config: ScalingConfig
    counts: Counts
    tokens: int
    flops: int
    seconds: float
    disk_bytes: int
    ram_bytes: int

    def line(self) -> str:
        return (
            f"{self.name:28} {self.config.arch:18} {self.counts.total:>11,} {self.counts.nonembedding:>11,} "
            f"{self.counts.active:>11,} {self.tokens:>10,} {self.flops:>9.2e} {self.seconds:>7.0f} s "
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
    """d64_l4 for the first seed at the most data of the first architecture; what differs is added.

    Raises ConfigError where there is nothing to name, and where nothing tells two configurations apart.
    """
    if not configs:
        raise ConfigError("there is nothing to train")
    most = max(config.tokens for config in configs)
    names = []
    for config in configs:
        parts = [f"d{config.d_model}_l{config.n_layers}"]
        parts += [_amount(config.tokens)] if config.tokens != most else []
        parts += [f"s{config.seed}"] if config.seed != configs[0].seed else []
        parts += [config.arch] if config.arch != configs[0].arch else []
        names.append("_".join(parts))
    if twins := sorted(name for name in set(names) if names.count(name) > 1):
        raise ConfigError(
            f"{names.count(twins[0])} configurations would be kept as {twins[0]}",
            why="a sweep tells models apart by width, layers, tokens, seed and architecture",
            todo="keep what differs in something else in folders of its own",
        )
    return names


def _amount(tokens: int) -> str:
    return str(tokens) if tokens % 1000 else f"{tokens // 1000}k"


def planned(configs: Sequence[ScalingConfig], spec: TextSpec, *, train_tokens: int) -> list[Planned]:
    """What each will cost on this machine, on one thread. train_tokens: of one pass over the corpus."""
    costs = costs_of(configs, spec)
    counts: dict[Shape, Counts] = {}
    found = []
    for name, config in zip(names_of(configs), configs, strict=True):
        shape = shape_of(config)
        if shape not in counts:
            model, options = config.model()
            counts[shape] = count(partial(build_model, model, options, spec, seed=config.seed))
        total, cost = counts[shape].total, costs[shape]
        tokens = config.trained_tokens if config.tokens else config.epochs * train_tokens
        found.append(
            Planned(
                name=name,
                config=config,
                counts=counts[shape],
                tokens=tokens,
                flops=round(tokens * cost.flops_per_token),
                # A pass over the evaluation part costs a third of training on as much.
                seconds=_START_SECONDS + cost.seconds_per_token * (tokens + spec.validation_tokens / 3),
                disk_bytes=_STATE_BYTES * total,
                ram_bytes=round(_PROCESS_BYTES + 16 * total + config.batch_size * cost.bytes_per_sample),
            )
        )
    return found


def wall_seconds(plan: Sequence[Planned], *, workers: int) -> float:
    """Of all runs, shared among as many processes."""
    return sum(each.seconds for each in plan) / workers


def reductions(plan: Sequence[Planned]) -> Iterator[list[Planned]]:
    """`plan`, then without its dearest cell, and so on. A cell goes with its seeds and all architectures."""
    kept = list(plan)
    while kept:
        yield kept
        dearest = max(kept, key=lambda each: each.seconds).config
        kept = [
            each
            for each in kept
            if (each.config.d_model, each.config.n_layers, each.config.tokens)
            != (dearest.d_model, dearest.n_layers, dearest.tokens)
        ]


def within(plan: Sequence[Planned], *, seconds: float, workers: int) -> list[Planned]:
    """`plan` without its dearest cells, as many as it takes. Raises ConfigError where none is left."""
    least = 0.0
    for kept in reductions(plan):
        least = wall_seconds(kept, workers=workers)
        if least <= seconds:
            return kept
    raise ConfigError(
        f"BUDGET is {seconds:.0f} s",
        why="not one run takes as little",
        todo=f"the cheapest takes about {budget_of(least)}",
    )


def budget_of(seconds: float) -> str:
    """What BUDGET= has to be for as many seconds."""
    return f"BUDGET={math.ceil(seconds)}s" if seconds < 60 else f"BUDGET={math.ceil(seconds / 60)}m"


def seconds_of(budget: str) -> float:
    """90s, 10m or 2h in seconds. Raises ConfigError for anything else, also for no time at all."""
    match = re.fullmatch(r"([0-9]+)([smh])", budget)
    if match is None or not int(match[1]):
        raise ConfigError(
            f"BUDGET={budget} is no time", todo="it takes seconds, minutes or hours: 90s, 10m or 2h"
        )
    return float(match[1]) * _UNITS[match[2]]
