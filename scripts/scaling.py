"""make scaling: plan a sweep over model sizes, check for leaks, run it, fit its law, say what it shows."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lib.errors import ConfigError, ToolkitError, run_main
from lib.scaling.experiments import ScalingExperiments, cost_of
from lib.scaling.planning import (
    DOCUMENT,
    HEADINGS,
    QUICK,
    Planned,
    configs_of,
    planned,
    seconds_of,
    within,
)
from lib.scaling.results import ARCHITECTURES, ScalingConfig
from lib.scaling.sweep import failures

COMMANDS = ("all", "plan", "run", "fit", "plot", "report")


def main() -> int:
    options = parse()
    experiments = ScalingExperiments(options.out, corpus=options.corpus)
    if options.command in ("all", "plan", "run"):
        plan = make_plan(options, experiments)
        show(plan, experiments)
        if options.command == "plan":
            return 0
        experiments.check_gate(list(dict.fromkeys(each.config.arch for each in plan)))
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
    parser = argparse.ArgumentParser(prog="scaling", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--quick", action="store_true", help="four small shapes, minutes of a processor")
    parser.add_argument("--budget", default="", help="wall time that the sweep may take: 90s, 10m, 2h")
    parser.add_argument("--compare", default="", help="a second architecture at every point")
    parser.add_argument("--epochs", type=int, default=0, help="passes over the corpus, instead of tokens")
    parser.add_argument("--batch", type=int, default=0, help="samples of an optimizer step")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or mps")
    parser.add_argument("--corpus", default="synthetic", help="synthetic, pysource, wikitext2 or file:PATH")
    parser.add_argument("--out", type=Path, default=Path("benchmark_results/scaling"), help="where to")
    return parser.parse_args(arguments)


def make_plan(options: argparse.Namespace, experiments: ScalingExperiments) -> list[Planned]:
    """The runs of the grid that the budget has room for. Raises ConfigError for what cannot be."""
    if options.compare and options.compare not in ARCHITECTURES[1:]:
        raise ConfigError(
            f"COMPARE={options.compare} is not known", todo=f"one of {', '.join(ARCHITECTURES[1:])}"
        )
    grid = QUICK if options.quick else DOCUMENT
    if options.epochs:
        grid = dataclasses.replace(grid, tokens=())
    one_pass = experiments.corpus.train_tokens
    if grid.tokens and max(grid.tokens) > one_pass:
        # Text that is seen again is worth less: the amount of data would not be what it says.
        amounts = tuple(tokens for tokens in grid.tokens if tokens <= one_pass) or (one_pass,)
        experiments.say(f"One pass over the corpus is {one_pass} tokens: no run is longer; EPOCHS= allows it")
        grid = dataclasses.replace(grid, tokens=amounts)
    base = ScalingConfig(
        grid.shapes[0][0],
        grid.shapes[0][1],
        batch_size=options.batch or grid.batch_size,
        epochs=options.epochs or 1,
        device=options.device,
        corpus=options.corpus,
        data_sha256=experiments.corpus.sha256,
    )
    architectures = [ARCHITECTURES[0], *([options.compare] if options.compare else [])]
    configs = configs_of(grid, architectures=architectures, base=base)
    plan = planned(configs, experiments.corpus.spec, train_tokens=one_pass)
    if options.budget:
        return within(plan, seconds=seconds_of(options.budget), workers=experiments.workers)
    return plan


def show(plan: Sequence[Planned], experiments: ScalingExperiments) -> None:
    print(f"Corpus: {experiments.corpus.dataset.source}")
    print(HEADINGS)
    for each in plan:
        print(each.line())
    print(cost_of(plan, workers=experiments.workers))


def status(experiments: ScalingExperiments) -> int:
    """1 where a run is no result, which is told."""
    results = experiments.results()
    if failed := failures(results):
        why = "; ".join(failed)
        raise ToolkitError(f"{len(failed)} of {len(results)} runs are no result", why=why)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
