"""make sweep SWEEP=NAME: train the runs of defconfigs/sweeps/NAME.yaml and tabulate their results.

make sweep-yaml: write the configuration as an experiment file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from lib import atomic, kconf
from lib.errors import ConfigError, ToolkitError, run_main
from lib.sweeps import runner
from lib.sweeps.concurrency import Concurrency, predict_host_memory
from lib.sweeps.experiment import Experiment, Range, read_experiment
from lib.sweeps.experiment_writer import as_yaml
from lib.sweeps.optuna_search import run_search
from lib.sweeps.paired_comparison import Comparison, parse_looks
from lib.sweeps.result_table import best_of, check_same_data, main_effects, objective, table
from lib.sweeps.runner import Result, Run, format_settings
from lib.units import counted, setting, whole_number

ROOT = Path(__file__).resolve().parents[1]
SWEEPS = ROOT / "defconfigs" / "sweeps"
Compare: TypeAlias = Callable[[list[tuple[Run, Run]]], Comparison]


def main() -> int:
    """Train the sweep of the command line and print its table, or write an experiment file."""
    parser = study_parser("sweep", __doc__)
    parser.add_argument("sweep", nargs="?", default="", help="name in defconfigs/sweeps, or path of a file")
    looks = partial(parse_looks, variable="CONFIRM")
    parser.add_argument("--confirm", type=looks, default=[], help="numbers of fresh seeds to judge by")
    parser.add_argument("--yaml", action="store_true", help="write the configuration as an experiment file")
    options = parser.parse_args()
    if options.yaml:
        return write_yaml(options.out)
    if options.first_seed and not options.confirm:
        why = "the seeds of a sweep are in its file; FIRST_SEED= is the first that judges its best point"
        raise ConfigError("FIRST_SEED= needs CONFIRM=", why=why, todo="give both, or leave it out")
    experiment = read_experiment(file_of(options.sweep))
    first = options.first_seed or max(experiment.seeds) + 1
    if first <= max(experiment.seeds):
        why = f"the best point is chosen by seeds up to {max(experiment.seeds)}"
        raise ConfigError(f"FIRST_SEED={first} is not fresh", why=why, todo="give a larger one")
    concurrency = Concurrency(options.jobs, partial(predict_host_memory, root=ROOT, log=log))
    out = (options.out or options.runs / "sweeps" / experiment.name).absolute()
    for line in (*experiment.notices, ": ".join(filter(None, (experiment.name, experiment.about)))):
        log(line)
    experiment, results = train_points(experiment, out=out, all_runs=options.runs, concurrency=concurrency)
    runner.write_results(out, results)
    compare = partial(Comparison, out=out, runs=options.runs, root=ROOT, concurrency=concurrency, log=log)
    note = judge_best(experiment, results, options.confirm, first=first, compare=compare)
    for line in table(experiment, results, note=note):
        print(line)
    number, count = best_of(experiment, results)
    if count > 1:
        point = format_settings(experiment.points[number])
        print(f"Best of {count} by {objective(experiment, results)[0]}: {point}")
        draw_main_effects(experiment, results, out / "main_effects.png")
    if failed := [result for result in results if result.reason]:
        why = "; ".join(f"{result.identity}: {result.reason}" for result in failed)
        raise ToolkitError(f"{len(failed)} of {len(results)} runs failed", why=why)
    return 0


def study_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that make sweep and make ab have in common."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    jobs, first = (partial(whole_number, variable=name) for name in ("JOBS", "FIRST_SEED"))
    parser.add_argument("--jobs", type=jobs, help="runs at a time; default: as many as fit")
    parser.add_argument("--first-seed", type=first, help="first seed to judge by; default: one that is fresh")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder of all runs")
    parser.add_argument("--out", type=Path, help="folder of the new runs; default: a folder in RUNS")
    return parser


def train_points(
    experiment: Experiment, *, out: Path, all_runs: Path, concurrency: Concurrency
) -> tuple[Experiment, list[Result]]:
    """Return the experiment with its points, those of a search included, and the results of their runs."""
    adopt = partial(runner.adopt, out=out, folder=all_runs, log=log)
    train_all = partial(runner.train_all, root=ROOT, out=out, concurrency=concurrency, log=log)
    seeds = counted(len(experiment.seeds), "seed")
    if experiment.search is None:
        runs = runner.resolved_runs(experiment, root=ROOT)
        wanted = {str(run.resolved.values["BEST_METRIC"]) for run in runs}
        experiment = replace(experiment, best_metric=wanted.pop() if len(wanted) == 1 else "")
        log(f"{counted(len(experiment.points), 'point')}, {seeds}, in {out}")
        adopt(runs)
        if new := [run.resolved for run in runs if runner.known_result(run, out) is None]:
            log(concurrency.choose(new, runs=len(new)))
        return experiment, train_all(runs)
    log(f"{counted(experiment.search.samples, 'sample')}, {seeds}, in {out}")

    def begin(ends: Sequence[Run]) -> None:
        log(concurrency.choose([run.resolved for run in ends], runs=len(experiment.seeds)))

    def train(runs: Sequence[Run], *, later: int) -> list[Result]:
        adopt(runs)
        return train_all(runs, later=later)

    return run_search(experiment, root=ROOT, train=train, begin=begin)


def judge_best(
    experiment: Experiment, results: Sequence[Result], looks: Sequence[int], *, first: int, compare: Compare
) -> str:
    """Train the best point and the first with fresh seeds from `first`, and judge them after each of `looks`.

    Returns what is known of the best point, also without looks. compare: makes the comparison of pairs.
    """
    number, count = best_of(experiment, results)
    if count < 2 or number == 0:
        if looks:
            log(f"CONFIRM: no point is better than the first, of {count} with results; none is judged")
        return f"best of {count}: none is better than the first" if count > 1 else ""
    points = experiment.points[0], experiment.points[number]
    seeds = tuple(range(first, first + max(looks, default=1)))
    fresh = runner.resolved_runs(replace(experiment, points=points, seeds=seeds), root=ROOT)
    comparison = compare(list(zip(fresh[: len(seeds)], fresh[len(seeds) :], strict=True)))
    metric, maximize = objective(experiment, results)
    if looks:
        check_same_data([each for each in results if each.number in (0, number)], metric)
        log(f"A: the first point, {format_settings(points[0])}; B: the best, {format_settings(points[1])}")
        comparison.judge(looks, metric, maximize=maximize)
    entries = [one for one in comparison.judged() if one["metric"] == metric]
    answers = [one["answer"] for one in entries if one["first_seed"] > max(experiment.seeds)]
    known = f"; with fresh seeds, against the first: {', then '.join(answers)}"
    return f"best of {count}{known if answers else ', not confirmed (CONFIRM=5 judges it with fresh seeds)'}"


def draw_main_effects(experiment: Experiment, results: Sequence[Result], file: Path) -> None:
    """Draw the mean objective for each value of each axis that has several, and print the path."""
    from lib.scaling.pictures import draw_page  # only here, since matplotlib takes long to import

    metric, _ = objective(experiment, results)
    effects = {name: effect for name, effect in main_effects(experiment, results).items() if len(effect) > 1}

    def draw(axes: Any, name: str) -> None:
        axis = experiment.search.axes[name] if experiment.search else ()
        means, errors = zip(*effects[name].values(), strict=True)
        places = [float(value) if isinstance(axis, Range) else value for value in effects[name]]
        axes.errorbar(places, means, yerr=errors, fmt="o", color="#2a6f97", markersize=5, capsize=3)
        axes.set(xlabel=name, ylabel=f"mean {metric}")
        if isinstance(axis, Range) and axis.log:
            axes.set_xscale("log")

    draws = [partial(draw, name=name) for name in effects]
    seeds = counted(len(experiment.seeds), "seed")
    title = f"{experiment.name}: mean over the other axes, standard error over {seeds}"
    inches = (max(7.0, 3.5 * len(draws)), 3.5)
    page = draw_page(draws, rows=1, inches=inches, fontsize=7, title=title)
    atomic.save(file, page, action="write a plot")
    print(file)


def write_yaml(out: Path | None) -> int:
    """Write the configuration as an experiment file to stdout or to a new file `out`. Raises ConfigError."""
    if out is not None:
        atomic.check_writable(out, "OUT", log=print, suffixes=[".yaml"])  # by which make sweep recognises it
    text = as_yaml(kconf.from_environment(ROOT), root=ROOT)
    if out is None:
        print(text, end="")
        return 0
    if atomic.is_stream(out):
        atomic.save(out, text)
        return 0
    if out.is_file() and out.read_text(encoding="utf-8", errors="replace") != text:
        raise ConfigError(f"{out} exists", todo="remove it, or give another OUT=")
    atomic.save(out, text)
    print(f"{out}: written; make sweep {setting('SWEEP', out)} trains it")
    return 0


def log(text: str) -> None:
    """Print a line in one write, since concurrent runs log at the same time."""
    print(f"{text}\n", end="", flush=True)


def file_of(name: str) -> Path:
    """Return the experiment file called `name`. Raises ConfigError, with the known names, without one."""
    file = Path(name) if name.endswith(".yaml") else SWEEPS / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(path.stem for path in sorted(SWEEPS.glob("*.yaml")))
        what = f"there is no sweep {name!r}" if name else "there is no SWEEP="
        raise ConfigError(what, todo=f"SWEEP= is one of {known}, or a file")
    return file


if __name__ == "__main__":
    raise SystemExit(run_main(main))
