"""make sweep SWEEP=NAME: train the runs of defconfigs/sweeps/NAME.yaml and put what came out in a table.

make sweep-yaml: write the configuration as such a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lib import atomic, kconf
from lib.errors import ConfigError, ToolkitError, run_main
from lib.sweeps.concurrency import Crew, predicted
from lib.sweeps.experiment import read_experiment
from lib.sweeps.optuna_search import run_search, verdict
from lib.sweeps.runner import Run, known_result, resolved_runs, table, train_all, write_results
from lib.sweeps.writer import as_yaml

ROOT = Path(__file__).resolve().parents[1]
SWEEPS = ROOT / "defconfigs" / "sweeps"


def main() -> int:
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__)
    parser.add_argument(
        "sweep",
        metavar="SWEEP",
        nargs="?",
        default="",
        help="a name of defconfigs/sweeps, or the path of a file",
    )
    parser.add_argument("--jobs", type=jobs_of, default=None, help="runs at a time; default: as many as fit")
    parser.add_argument("--out", type=Path, default=None, help="where to; default: runs/sweeps/NAME")
    parser.add_argument("--yaml", action="store_true", help="write the configuration as such a file")
    options = parser.parse_args()
    if options.yaml:
        return write_yaml(options.out)
    crew = Crew(options.jobs, partial(predicted, root=ROOT, say=say))
    experiment = read_experiment(file_of(options.sweep))
    out = (options.out or ROOT / "runs" / "sweeps" / experiment.name).absolute()
    say(": ".join(filter(None, (experiment.name, experiment.about))))
    train = partial(train_all, root=ROOT, out=out, crew=crew, say=say)
    seeds = len(experiment.seeds)
    if experiment.search is None:
        runs = resolved_runs(experiment, root=ROOT)
        say(f"{len(experiment.points)} points, {seeds} seeds, in {out}")
        ahead = [run.resolved for run in runs if known_result(run, out) is None]
        if ahead:
            say(crew.choose(ahead, most=len(ahead)))
        results = train(runs)
    else:
        say(f"{experiment.search.samples} tries, {seeds} seeds, in {out}")

        def begin(ends: Sequence[Run]) -> None:
            say(crew.choose([run.resolved for run in ends], most=seeds))

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
    """The configuration as an experiment file: to standard output, or to a file that is not there yet."""
    if out is not None and out.suffix != ".yaml":
        raise ConfigError(f"OUT={out} does not end in .yaml", why="make sweep takes such a SWEEP= for a file")
    text = as_yaml(kconf.from_environment(ROOT), root=ROOT)
    if out is None:
        print(text, end="")
        return 0
    if out.exists() and out.read_text(encoding="utf-8", errors="replace") != text:
        raise ConfigError(f"{out} is there already", todo="remove it, or name another OUT=")
    atomic.write_text(out, text)
    print(f"{out}: written; make sweep SWEEP={out} trains it")
    return 0


def jobs_of(text: str) -> int:
    """JOBS=. Raises ConfigError for what is no whole number; that 0 is too few is for the crew to say."""
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"JOBS={text} is no number of runs at a time", todo="without it as many as fit")
    return int(text)


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)  # in one piece, for runs end at the same time


def file_of(name: str) -> Path:
    """Raises ConfigError where there is no such file, naming those that there are."""
    file = Path(name) if name.endswith(".yaml") else SWEEPS / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(path.stem for path in sorted(SWEEPS.glob("*.yaml")))
        raise ConfigError(f"there is no sweep {name!r}", todo=f"SWEEP= is one of {known}, or a file")
    return file


if __name__ == "__main__":
    raise SystemExit(run_main(main))
