"""Combinations of a model and options that must train alike on any number of processes, in float64.

`python -m tests.e2e.device_combinations [WORLD...]` runs all of them, by default on 2, 3, 5 and 7 processes,
and prints the largest difference to one process. `make test` runs `fullest` of most models on three
processes, `make test-long` their `pairwise` on two, three, five and seven, with `sharded` of some.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lib.devices.base import Backend
from lib.plan.types import Strategy
from tests.e2e.ddp_worker import Case, Outcome, outcome, outcomes
from tests.support.examples import merged
from tests.support.training import largest_difference

EXACT = 1e-12
LARGE = ("resnet50",)  # a few seconds each; of its parts only the width differs from those of resnet18
WORLDS = (2, 3, 5, 7)
OPTIONS: dict[str, dict[str, Any]] = {
    "clipping": {"grad_clip": 0.05},
    "EMA": {"ema": True, "ema_decay": 0.5},
    "label smoothing": {"label_smoothing": 0.1},
    "mixing": {"augment_mixup_alpha": 0.8, "augment_cutmix_alpha": 1.0, "augment_erase_pct": 30},
}
# The first shards no weight. HSDP needs four processes: test_sharded.py.
STRATEGIES: tuple[Strategy, ...] = ("zero1", "zero2", "fsdp")
PADDING, DROPOUT = "padding", "dropout"
IMAGES = ("clipping", "EMA", "label smoothing", "mixing", PADDING)
OTHERS = ("clipping", "EMA", PADDING)
# Batch normalisation of few values amplifies rounding: hence groups of four, and a low rate.
SLOWER = {"learning_rate": 0.001}
NORMALISED = Case(model="resnet18", norm_batch=4, effective=28, micro_batch=8, settings=SLOWER)
MODELS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "lenet5": (Case(micro_batch=5, settings={}), IMAGES),
    "resnet18": (NORMALISED, (DROPOUT, *IMAGES)),
    "resnet50": (dataclasses.replace(NORMALISED, model="resnet50"), IMAGES),
    "airbench": (dataclasses.replace(NORMALISED, model="airbench"), IMAGES),
    "mlp": (Case(model="mlp", micro_batch=5, settings={}), (DROPOUT, *OTHERS)),
    "gpt2": (Case(model="gpt2", micro_batch=5, settings={}), (DROPOUT, *OTHERS)),
    "vit": (Case(model="vit", micro_batch=5, settings={}), IMAGES),
    "resnet_bk": (Case(model="resnet_bk", micro_batch=5, scalars=True, settings={}), (DROPOUT, *OTHERS)),
    **{name: (Case(**case), OTHERS) for name, case in merged("DISTRIBUTED").items()},
}


def combined(model: str, options: Iterable[str]) -> Case:
    """Return the case of `model` with `options`, and without the others."""
    case, _ = MODELS[model]
    settings = {**case.settings, "grad_clip": 0.0, "ema": False}
    for name in options:
        settings |= OPTIONS.get(name, {})
    dropout = 0.2 if DROPOUT in options else 0.0
    return dataclasses.replace(case, settings=settings, padded=PADDING in options, dropout=dropout)


def everything(models: Iterable[str] = tuple(MODELS)) -> dict[str, Case]:
    """Return all combinations of `models`: "MODEL + OPTION + OPTION" -> case."""
    return {
        " + ".join((model, *chosen)): combined(model, chosen)
        for model in models
        for options in MODELS[model][1:]
        for count in range(len(options) + 1)
        for chosen in itertools.combinations(options, count)
    }


def sharded(models: Iterable[str] = tuple(MODELS)) -> dict[str, Case]:
    """Return the cases with sharded state: "MODEL + STRATEGY + OPTION..." with all options of the model."""
    plain = {model: case for model in models if not (case := combined(model, MODELS[model][1])).layout}
    return {
        " + ".join((model, strategy, *MODELS[model][1])): dataclasses.replace(case, strategy=strategy)
        for model, case in plain.items()
        for strategy in STRATEGIES[: 1 if case.scalars else None]
    }


def pairs_of(name: str) -> set[tuple[tuple[str, bool], tuple[str, bool]]]:
    """Return the pairs that a combination covers: of its model and an option, and of two options."""
    model, *chosen = name.split(" + ")
    facts = [(model, True), *((option, option in chosen) for option in MODELS[model][1])]
    return set(itertools.combinations(sorted(facts), 2))


def pairwise(models: Iterable[str]) -> dict[str, Case]:
    """Return combinations that together cover every pair that `everything` covers, chosen greedily."""
    cases = everything(models)
    covered = {name: pairs_of(name) for name in cases}
    missing, chosen = set[Any]().union(*covered.values()), list[str]()
    while missing:
        chosen.append(max(cases, key=lambda name: len(covered[name] & missing)))
        missing -= covered[chosen[-1]]
    return {name: cases[name] for name in chosen}


def fullest(models: Iterable[str]) -> dict[str, Case]:
    """Return those of `pairwise`, one for each model, that have the most options."""
    cases = pairwise(models)
    of_model = {name.split(" + ")[0]: name for name in sorted(cases, key=lambda name: name.count(" + "))}
    return {name: cases[name] for name in of_model.values()}


def difference(one: Outcome, other: Outcome) -> float:
    """Return the largest difference between two outcomes: of weights, averaged weights and losses."""
    losses = [abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)]
    states = [largest_difference(one[part], other[part]) for part in ("model", "ema") if one[part]]
    return max(losses + states)


def main() -> int:
    """Run all combinations. Returns 1 if one differs by more than EXACT."""
    cases, worst = everything() | sharded(), 0.0
    one = {name: outcome(case, Backend("cpu")) for name, case in cases.items()}
    for world in map(int, sys.argv[1:] or WORLDS):
        with tempfile.TemporaryDirectory() as folder:
            ranks = outcomes(cases, world, Path(folder))
        for model in MODELS:
            names = [name for name in cases if name.split(" + ")[0] == model]
            apart = max(difference(one[name], rank[name]) for name in names for rank in ranks)
            print(f"{world} processes  {model:<10} {len(names):>3} combinations  {apart:.1e}", flush=True)
            worst = max(worst, apart)
    return int(worst > EXACT)


if __name__ == "__main__":
    sys.exit(main())
