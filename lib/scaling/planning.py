"""Plan of a sweep: the runs, what each will cost, and what the plan cannot show, before any training."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lib.data.types import TextSpec
from lib.errors import ConfigError
from lib.scaling.costs import Counts, Shape, builder, costs_of, count, shape_of
from lib.scaling.isoflop import NO_SEEDS, budget_shortfall
from lib.scaling.judge import TITLES, missing_requirements, points_for
from lib.scaling.laws import Point
from lib.scaling.noise import seed_noise
from lib.scaling.results import BLOCK, ScalingConfig

WIDTHS, LAYERS = (64, 128, 256, 512), (4, 8, 12, 16)
_BASE_RATE, _BASE_WIDTH, _MAX_RATE = 0.016, 32, 0.02
_START_SECONDS = 4.0  # of a process, before its first step
_PROCESS_BYTES = 400_000_000  # Python and torch
_STATE_BYTES = 12  # per parameter in a checkpoint: the weight and Adam's two averages
_UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cross product of a sweep.

    One shape at one amount of data is trained with every seed, others with one.
    """

    shapes: tuple[tuple[int, int], ...]  # d_model, n_layers
    tokens: tuple[int, ...]  # empty: whole passes over the corpus
    batch_size: int
    seeds: tuple[int, ...] = (1, 2, 3)
    repeated: tuple[int, int]  # the shape with several seeds

    def fitted(self, one_pass: int) -> Grid:
        """Scale all amounts of data down in proportion if the largest exceeds one pass of `one_pass` tokens.

        Repeated text is worth less than new text. Raises ConfigError if an amount falls below one optimizer
        step.
        """
        step = self.batch_size * BLOCK
        most = max(self.tokens, default=one_pass)
        longest = min(most, one_pass // step * step)
        tokens = tuple(amount * longest // most for amount in self.tokens)
        if (smallest := min(tokens, default=longest)) < step:
            raise ConfigError(
                f"BATCH={self.batch_size} is too large for this corpus",
                why=f"an optimizer step takes {step} tokens, and the least amount of data is {smallest}",
                todo="give a smaller BATCH= or a longer text",
            )
        return dataclasses.replace(self, tokens=tokens)


QUICK = Grid(
    shapes=((16, 2), (32, 2), (64, 2), (64, 4)),
    tokens=(300_000, 600_000, 1_200_000),
    batch_size=4,
    repeated=(32, 2),
)
FULL = Grid(
    shapes=tuple(itertools.product(WIDTHS, LAYERS)),
    tokens=(2_000_000, 4_000_000, 8_000_000),
    batch_size=16,
    repeated=(64, 4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run with its estimated costs. tokens: trained on."""

    name: str
    config: ScalingConfig
    counts: Counts
    tokens: int
    flops: int
    seconds: float
    disk_bytes: int
    ram_bytes: int

    @property
    def cell(self) -> tuple[int, int, int]:
        """Shape and amount of data, which runs of other seeds and architectures share."""
        return self.config.d_model, self.config.n_layers, self.config.tokens

    def line(self) -> str:
        """Return the row of the run in the table below HEADINGS."""
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
    """Return the learning rate for a width: tuned at 32, inversely proportional above, at most 0.02."""
    return min(_MAX_RATE, _BASE_RATE * _BASE_WIDTH / width)


def configs_of(grid: Grid, *, architectures: Sequence[str], base: ScalingConfig) -> list[ScalingConfig]:
    """Return every run of `grid` for each architecture; `base` has the settings that all of them share."""
    middle = sorted(grid.tokens)[(len(grid.tokens) - 1) // 2] if grid.tokens else 0
    configs = []
    for (width, layers), tokens, arch in itertools.product(grid.shapes, grid.tokens or (0,), architectures):
        cell = dataclasses.replace(
            base, d_model=width, n_layers=layers, lr=learning_rate(width), tokens=tokens, arch=arch
        )
        repeated = (width, layers) == grid.repeated and tokens == middle
        seeds = grid.seeds if repeated else grid.seeds[:1]
        configs += [dataclasses.replace(cell, seed=seed) for seed in seeds]
    return configs


def names_of(configs: Sequence[ScalingConfig]) -> list[str]:
    """Return names such as d64_l4; tokens, seed and architecture are appended where they are not the default.

    Raises ConfigError if `configs` is empty or two of them would have the same name.
    """
    if not configs:
        raise ConfigError("there is nothing to train")
    most = max(config.tokens for config in configs)
    names = []
    for config in configs:
        amount = str(config.tokens) if config.tokens % 1000 else f"{config.tokens // 1000}k"
        parts = [f"d{config.d_model}_l{config.n_layers}"]
        parts += [amount] if config.tokens != most else []
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


def plan_runs(configs: Sequence[ScalingConfig], spec: TextSpec, *, train_tokens: int) -> list[PlannedRun]:
    """Estimate the costs of every run on one thread of this machine. train_tokens: of one pass."""
    costs = costs_of(configs, spec)
    counts: dict[Shape, Counts] = {}
    runs = []
    for name, config in zip(names_of(configs), configs, strict=True):
        shape = shape_of(config)
        if shape not in counts:
            counts[shape] = count(builder(config, spec))
        total, cost = counts[shape].total, costs[shape]
        tokens = config.trained_tokens if config.tokens else config.epochs * train_tokens
        runs.append(
            PlannedRun(
                name=name,
                config=config,
                counts=counts[shape],
                tokens=tokens,
                flops=round(tokens * cost.flops_per_token),
                # Evaluation costs a third of training per token.
                seconds=_START_SECONDS + cost.seconds_per_token * (tokens + spec.validation_tokens / 3),
                disk_bytes=_STATE_BYTES * total,
                ram_bytes=round(_PROCESS_BYTES + 16 * total + config.batch_size * cost.bytes_per_sample),
            )
        )
    return runs


def wall_seconds(plan: Sequence[PlannedRun], *, workers: int) -> float:
    """Return the wall time of all runs with `workers` processes."""
    return sum(each.seconds for each in plan) / workers


def reductions(plan: Sequence[PlannedRun]) -> Iterator[list[PlannedRun]]:
    """Yield `plan`, then without its most expensive cell (all seeds and architectures), and so on."""
    kept = list(plan)
    while kept:
        yield kept
        dearest = max(kept, key=lambda each: each.seconds).cell
        kept = [each for each in kept if each.cell != dearest]


def within_budget(plan: Sequence[PlannedRun], *, seconds: float, workers: int) -> list[PlannedRun]:
    """Drop the most expensive cells until the plan fits into `seconds`.

    Raises ConfigError if none is left.
    """
    needed = 0.0
    for kept in reductions(plan):
        needed = wall_seconds(kept, workers=workers)
        if needed <= seconds:
            return kept
    raise ConfigError(
        f"BUDGET is {seconds:.0f} s",
        why="not one run takes as little",
        todo=f"the cheapest takes about {format_budget(needed)}",
    )


def format_budget(seconds: float) -> str:
    """Return BUDGET= for at least `seconds`."""
    return f"BUDGET={math.ceil(seconds)}s" if seconds < 60 else f"BUDGET={math.ceil(seconds / 60)}m"


def parse_budget(budget: str) -> float:
    """Return 90s, 10m or 2h in seconds. Raises ConfigError for anything else and for zero."""
    match = re.fullmatch(r"([0-9]+)([smh])", budget)
    if match is None or not int(match[1]):
        raise ConfigError(
            f"BUDGET={budget} is not a time", todo="it takes seconds, minutes or hours: 90s, 10m or 2h"
        )
    return float(match[1]) * _UNITS[match[2]]


def plan_warnings(
    plan: Sequence[PlannedRun], whole: Sequence[PlannedRun], *, workers: int, given: Sequence[str]
) -> Iterator[str]:
    """Yield a line for each law that `plan` is insufficient for, with the reason and a remedy.

    whole: the grid before it was reduced to `plan`. given: the variables that reduced it.
    """
    for arch, missing in insufficient(plan).items():
        for title, reasons in missing.items():
            enough: Sequence[PlannedRun] = ()  # the cheapest reduction that is sufficient
            for kept in reductions(whole):
                if title in insufficient(kept).get(arch, {}):
                    break
                enough = kept
            todo = f"about {format_budget(wall_seconds(enough, workers=workers))} is enough"
            if not enough:
                todo = f"the whole grid has what it needs: leave out {' and '.join(given)}"
            yield f"{arch}: the plan is insufficient for {title}: {'; '.join(reasons)}; {todo}"


def insufficient(plan: Sequence[PlannedRun]) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Return, by architecture and title of a law, the requirements that the plan lacks."""
    points: dict[str, list[Point]] = defaultdict(list)
    for each in plan:
        point = Point(parameters=each.counts.nonembedding, tokens=each.tokens, loss=math.nan)
        points[each.config.arch].append(point)
    found: dict[str, dict[str, list[str]]] = {}
    for arch, own in points.items():
        missing = {title: missing_requirements(points_for(name, own), name) for name, title in TITLES.items()}
        seeds = [NO_SEEDS] if seed_noise(own) is None else []
        missing["isoFLOP"] = [*filter(None, [budget_shortfall(own)]), *seeds]
        missing["telling whether the loss falls with size"] = seeds
        found[arch] = {title: reasons for title, reasons in missing.items() if reasons}
    return found
