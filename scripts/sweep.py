"""make sweep SWEEP=NAME: train the runs of defconfigs/sweeps/NAME.yaml and tabulate their results.

make sweep-yaml: write the configuration as an experiment file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lib import atomic, kconf
from lib.errors import ConfigError, ToolkitError, run_main
from lib.sweeps.concurrency import Concurrency, predict_host_memory
from lib.sweeps.experiment import read_experiment
from lib.sweeps.optuna_search import run_search, verdict
from lib.sweeps.runner import Run, known_result, resolved_runs, table, train_all, write_results
from lib.sweeps.writer import as_yaml

ROOT = Path(__file__).resolve().parents[1]
SWEEPS = ROOT / "defconfigs" / "sweeps"


def main() -> int:
    """Train the sweep of the command line and print its table, or write an experiment file."""
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__)
    what = "a name in defconfigs/sweeps, or the path of a file"
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", default="", help=what)
    parser.add_argument("--jobs", type=jobs_of, default=None, help="runs at a time; default: as many as fit")
    parser.add_argument("--out", type=Path, default=None, help="output folder; default: runs/sweeps/NAME")
    parser.add_argument("--yaml", action="store_true", help="write the configuration as an experiment file")
    options = parser.parse_args()
    if options.yaml:
        return write_yaml(options.out)
    concurrency = Concurrency(options.jobs, partial(predict_host_memory, root=ROOT, log=log))
    experiment = read_experiment(file_of(options.sweep))
    out = (options.out or ROOT / "runs" / "sweeps" / experiment.name).absolute()
    for line in (*experiment.notices, ": ".join(filter(None, (experiment.name, experiment.about)))):
        log(line)
    train = partial(train_all, root=ROOT, out=out, concurrency=concurrency, log=log)
    seeds = len(experiment.seeds)
    if experiment.search is None:
        runs = resolved_runs(experiment, root=ROOT)
        log(f"{len(experiment.points)} points, {seeds} seeds, in {out}")
        if new := [run.resolved for run in runs if known_result(run, out) is None]:
            log(concurrency.choose(new, runs=len(new)))
        results = train(runs)
    else:
        log(f"{experiment.search.samples} samples, {seeds} seeds, in {out}")

        def begin(ends: Sequence[Run]) -> None:
            log(concurrency.choose([run.resolved for run in ends], runs=seeds))

        experiment, results = run_search(experiment, root=ROOT, train=train, begin=begin)
    write_results(out, results)
    for line in table(experiment, results):
        print(line)
    if experiment.search is not None:
        print(verdict(experiment, results))
    if failed := [result for result in results if result.reason]:
        why = "; ".join(f"{result.identity}: {result.reason}" for result in failed)
        raise ToolkitError(f"{len(failed)} of {len(results)} runs failed", why=why)
    return 0


def write_yaml(out: Path | None) -> int:
    """Write the configuration as an experiment file to stdout or to a new file `out`. Raises ConfigError."""
    if out is not None and out.suffix != ".yaml":
        raise ConfigError(f"OUT={out} does not end in .yaml", why="make sweep recognises a file by that")
    text = as_yaml(kconf.from_environment(ROOT), root=ROOT)
    if out is None:
        print(text, end="")
        return 0
    if out.exists() and out.read_text(encoding="utf-8", errors="replace") != text:
        raise ConfigError(f"{out} exists", todo="remove it, or give another OUT=")
    atomic.write_text(out, text)
    print(f"{out}: written; make sweep SWEEP={out} trains it")
    return 0


def jobs_of(text: str) -> int:
    """Parse JOBS=. Raises ConfigError for anything but a whole number; Concurrency refuses 0."""
    if not (text.isascii() and text.isdecimal()):
        todo = "leave it out to run as many as fit"
        raise ConfigError(f"JOBS={text} is not a number of concurrent runs", todo=todo)
    return int(text)


def log(text: str) -> None:
    """Print a line in one write, since concurrent runs log at the same time."""
    print(f"{text}\n", end="", flush=True)


def file_of(name: str) -> Path:
    """Return the experiment file called `name`. Raises ConfigError, with the known names, without one."""
    file = Path(name) if name.endswith(".yaml") else SWEEPS / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(path.stem for path in sorted(SWEEPS.glob("*.yaml")))
        raise ConfigError(f"there is no sweep {name!r}", todo=f"SWEEP= is one of {known}, or a file")
    return file


if __name__ == "__main__":
    raise SystemExit(run_main(main))
