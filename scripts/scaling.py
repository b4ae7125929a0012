"""make scaling: plan a sweep over model sizes, check for leaks, train, fit scaling laws and report."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lib.devices.probe import probe
from lib.errors import ConfigError, PlanError, run_main
from lib.scaling.experiments import ScalingExperiments, format_cost, raise_failures
from lib.scaling.planning import (
    FULL,
    HEADINGS,
    QUICK,
    Grid,
    PlannedRun,
    configs_of,
    parse_budget,
    plan_runs,
    plan_warnings,
    within_budget,
)
from lib.scaling.results import ARCHITECTURES, ScalingConfig
from lib.units import whole_number

COMMANDS = ("all", "plan", "run", "fit", "plot", "report")
DEVICES = ("cpu", "cuda", "mps")
OUT = Path("benchmark_results/scaling")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scaling command of the command line, or of `arguments`."""
    options = parse(arguments)
    experiments = ScalingExperiments(options.out, corpus=options.corpus)
    if options.command in ("all", "plan", "run"):
        plan = whole = make_plan(options, experiments)
        if options.budget:
            plan = within_budget(whole, seconds=options.budget, workers=experiments.workers)
        show(plan, experiments)
        reduced = {f"{name.upper()}=": vars(options)[name] for name in ("shapes", "epochs", "budget")}
        given = ["QUICK=1"] * options.quick + [name for name, value in reduced.items() if value]
        for line in plan_warnings(plan, whole, workers=experiments.workers, given=given):
            print(line)
        if options.command == "plan":
            return 0
        experiments.check_gate(each.config for each in plan)
        experiments.run([each.config for each in plan])
    if options.command in ("all", "fit"):
        experiments.analyze_scaling_laws()
    if options.command in ("all", "plot"):
        for path in experiments.plot_scaling_laws():
            print(path)
    if options.command in ("all", "report"):
        print(experiments.report(), end="")
    raise_failures(experiments.results())
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Raises ConfigError for invalid values before anything is opened or timed."""
    parser = argparse.ArgumentParser(prog="scaling", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="four small shapes, minutes of a processor")
    parser.add_argument("--shapes", type=shapes_of, help="widths and numbers of layers: 64,128x4,8")
    parser.add_argument("--budget", type=parse_budget, help="wall time that the sweep may take: 90s, 10m, 2h")
    parser.add_argument("--compare", type=compared, help="a second architecture at every point")
    epochs, batch = (partial(whole_number, variable=name) for name in ("EPOCHS", "BATCH"))
    parser.add_argument("--epochs", type=epochs, help="passes over the corpus, instead of tokens")
    parser.add_argument("--batch", type=batch, help="samples of an optimizer step")
    parser.add_argument("--device", type=available_device, default="cpu", help=", ".join(DEVICES))
    parser.add_argument("--corpus", default="synthetic", help="synthetic, pysource, wikitext2 or file:PATH")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results; default: %(default)s")
    return parser.parse_args(arguments)


def shapes_of(text: str) -> tuple[tuple[int, int], ...]:
    """Parse every width with every number of layers. Raises ConfigError for anything but 64,128x4,8."""
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*x[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise ConfigError(f"SHAPES={text} is not possible", todo="SHAPES=64,128x4,8: widths x layers")
    widths, layers = (tuple(map(int, part.split(","))) for part in text.split("x"))
    return tuple(dict.fromkeys(itertools.product(widths, layers)))


def compared(name: str) -> str:
    """Check the name of a second architecture. Raises ConfigError if it is unknown."""
    if name not in ARCHITECTURES[1:]:
        raise ConfigError(f"COMPARE={name} is not known", todo=f"one of {', '.join(ARCHITECTURES[1:])}")
    return name


def available_device(device: str) -> str:
    """Check that this machine has the device. Raises ConfigError if it has not."""
    if device not in DEVICES:
        raise ConfigError(f"DEVICE={device} is not known", todo=f"one of {', '.join(DEVICES)}")
    try:
        probe(device)  # type: ignore[arg-type]
    except PlanError as error:
        raise ConfigError(f"DEVICE={device} is not there", why=error.why, todo="DEVICE=cpu is") from error
    return device


def make_plan(options: argparse.Namespace, experiments: ScalingExperiments) -> list[PlannedRun]:
    """Return all runs of the grid with their costs. Raises ConfigError for impossible values."""
    grid = grid_of(options, experiments)
    base = ScalingConfig(
        *grid.shapes[0],
        batch_size=grid.batch_size,
        epochs=options.epochs or 1,
        device=options.device,
        corpus=options.corpus,
        data_sha256=experiments.corpus.sha256,
    )
    architectures = [ARCHITECTURES[0], *([options.compare] if options.compare else [])]
    configs = configs_of(grid, architectures=architectures, base=base)
    return plan_runs(configs, experiments.corpus.spec, train_tokens=experiments.corpus.train_tokens)


def grid_of(options: argparse.Namespace, experiments: ScalingExperiments) -> Grid:
    """Return the requested grid, scaled down to one pass over the corpus, which is reported."""
    whole = QUICK if options.quick else FULL
    if options.shapes:
        whole = dataclasses.replace(whole, shapes=options.shapes, repeated=options.shapes[0])
    tokens = () if options.epochs else whole.tokens
    requested = dataclasses.replace(whole, tokens=tokens, batch_size=options.batch or whole.batch_size)
    one_pass = experiments.corpus.train_tokens
    grid = requested.fitted(one_pass)
    if grid != requested:
        before, after = (", ".join(f"{tokens:,}" for tokens in each.tokens) for each in (requested, grid))
        experiments.log(
            f"One pass over the corpus is {one_pass:,} tokens: runs train on {after} instead of {before}"
        )
    return grid


def show(plan: Sequence[PlannedRun], experiments: ScalingExperiments) -> None:
    """Print the plan as a table with its total cost."""
    print(f"Corpus: {experiments.corpus.dataset.source}")
    print(HEADINGS)
    for each in plan:
        print(each.line())
    print(format_cost(plan, workers=experiments.workers))
    if (device := plan[0].config.device) != "cpu":
        print(f"Times are for one thread of this CPU; on {device} nothing was timed")


if __name__ == "__main__":
    raise SystemExit(run_main(main))
