"""make scaling: plan a sweep over model sizes, check for leaks, run it, fit its law, say what it shows."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lib.devices.probe import probe
from lib.errors import ConfigError, PlanError, ToolkitError, run_main
from lib.scaling.experiments import ScalingExperiments, cost_of
from lib.scaling.outlook import outlook
from lib.scaling.planning import (
    DOCUMENT,
    HEADINGS,
    QUICK,
    Grid,
    Planned,
    configs_of,
    planned,
    seconds_of,
    within,
)
from lib.scaling.results import ARCHITECTURES, ScalingConfig
from lib.scaling.sweep import failures

COMMANDS = ("all", "plan", "run", "fit", "plot", "report")
DEVICES = ("cpu", "cuda", "mps")


def main() -> int:
    options = parse()
    experiments = ScalingExperiments(options.out, corpus=options.corpus)
    if options.command in ("all", "plan", "run"):
        whole = make_plan(options, experiments)
        plan = within(whole, seconds=options.budget, workers=experiments.workers) if options.budget else whole
        show(plan, experiments)
        for line in outlook(plan, whole, workers=experiments.workers, given=limits(options)):
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
    return status(experiments)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises ConfigError for what a variable does not take, before anything is opened or timed."""
    parser = argparse.ArgumentParser(prog="scaling", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="four small shapes, minutes of a processor")
    parser.add_argument("--budget", type=seconds_of, help="wall time that the sweep may take: 90s, 10m, 2h")
    parser.add_argument("--compare", type=compared, help="a second architecture at every point")
    parser.add_argument(
        "--epochs", type=partial(natural, "EPOCHS"), help="passes over the corpus, instead of tokens"
    )
    parser.add_argument("--batch", type=partial(natural, "BATCH"), help="samples of an optimizer step")
    parser.add_argument("--device", type=there, default="cpu", help=", ".join(DEVICES))
    parser.add_argument("--corpus", default="synthetic", help="synthetic, pysource, wikitext2 or file:PATH")
    parser.add_argument("--out", type=Path, default=Path("benchmark_results/scaling"), help="where to")
    return parser.parse_args(arguments)


def natural(variable: str, text: str) -> int:
    """A whole number from 1 on. Raises ConfigError for anything else."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ConfigError(f"{variable}={text} is not possible", todo="it takes a whole number from 1 on")
    return int(text)


def compared(name: str) -> str:
    """A second architecture. Raises ConfigError for one that is not known."""
    if name not in ARCHITECTURES[1:]:
        raise ConfigError(f"COMPARE={name} is not known", todo=f"one of {', '.join(ARCHITECTURES[1:])}")
    return name


def there(device: str) -> str:
    """A device of this machine. Raises ConfigError for another one."""
    if device not in DEVICES:
        raise ConfigError(f"DEVICE={device} is not known", todo=f"one of {', '.join(DEVICES)}")
    try:
        probe(device)  # type: ignore[arg-type]
    except PlanError as error:
        raise ConfigError(f"DEVICE={device} is not there", why=error.why, todo="DEVICE=cpu is") from error
    return device


def make_plan(options: argparse.Namespace, experiments: ScalingExperiments) -> list[Planned]:
    """All runs of the grid, and what they cost. Raises ConfigError for what cannot be."""
    grid = grid_of(options, experiments)
    base = ScalingConfig(
        grid.shapes[0][0],
        grid.shapes[0][1],
        batch_size=grid.batch_size,
        epochs=options.epochs or 1,
        device=options.device,
        corpus=options.corpus,
        data_sha256=experiments.corpus.sha256,
    )
    architectures = [ARCHITECTURES[0], *([options.compare] if options.compare else [])]
    configs = configs_of(grid, architectures=architectures, base=base)
    return planned(configs, experiments.corpus.spec, train_tokens=experiments.corpus.train_tokens)


def grid_of(options: argparse.Namespace, experiments: ScalingExperiments) -> Grid:
    """What is asked for, with as much data as the corpus has; where that is less, it is told."""
    asked = QUICK if options.quick else DOCUMENT
    asked = dataclasses.replace(
        asked,
        tokens=() if options.epochs else asked.tokens,
        batch_size=options.batch or asked.batch_size,
    )
    one_pass = experiments.corpus.train_tokens
    grid = asked.fitted(one_pass)
    if grid != asked:
        before, after = (", ".join(f"{tokens:,}" for tokens in each.tokens) for each in (asked, grid))
        experiments.say(
            f"One pass over the corpus is {one_pass:,} tokens: runs take {after} of them instead of {before}"
        )
    return grid


def limits(options: argparse.Namespace) -> list[str]:
    """The variables that made the plan smaller than the whole grid."""
    given = {"QUICK=1": options.quick, "EPOCHS=": options.epochs, "BUDGET=": options.budget}
    return [name for name, value in given.items() if value]


def show(plan: Sequence[Planned], experiments: ScalingExperiments) -> None:
    print(f"Corpus: {experiments.corpus.dataset.source}")
    print(HEADINGS)
    for each in plan:
        print(each.line())
    print(cost_of(plan, workers=experiments.workers))
    if (device := plan[0].config.device) != "cpu":
        print(f"The times are those of one thread of this processor; on {device} nothing was timed")


def status(experiments: ScalingExperiments) -> int:
    """1 where a run is no result, which is told."""
    results = experiments.results()
    if failed := failures(results):
        why = "; ".join(failed)
        raise ToolkitError(f"{len(failed)} of {len(results)} runs are no result", why=why)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
