"""make sweep SWEEP=NAME: train the runs of defconfigs/sweeps/NAME.yaml and put what came out in a table."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from lib.errors import ConfigError, ToolkitError, run_main
from lib.studies.experiment import read_experiment
from lib.studies.runner import resolved_runs, table, train_all, write_results
from lib.studies.search import run_search, verdict

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
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=None, help="where to; default: runs/sweeps/NAME")
    options = parser.parse_args()
    if options.jobs < 1:
        raise ConfigError(f"JOBS={options.jobs} is no number of runs at a time")
    experiment = read_experiment(file_of(options.sweep))
    out = (options.out or ROOT / "runs" / "sweeps" / experiment.name).absolute()
    print(f"{experiment.name}: {experiment.about}", flush=True)
    train = partial(train_all, root=ROOT, out=out, workers=options.jobs, say=partial(print, flush=True))
    if experiment.search is None:
        runs = resolved_runs(experiment, root=ROOT, scratch=out)
        print(f"{len(experiment.points)} points, {len(experiment.seeds)} seeds, in {out}", flush=True)
        results = train(runs)
    else:
        print(f"{experiment.search.samples} tries, {len(experiment.seeds)} seeds, in {out}", flush=True)
        experiment, results = run_search(experiment, root=ROOT, scratch=out, train=train)
    write_results(out, results)
    for line in table(experiment, results):
        print(line)
    if experiment.search is not None:
        print(verdict(experiment, results))
    if failed := [result for result in results if result.reason]:
        why = "; ".join(f"{result.identity}: {result.reason}" for result in failed)
        raise ToolkitError(f"{len(failed)} of {len(results)} runs failed", why=why)
    return 0


def file_of(name: str) -> Path:
    """Raises ConfigError where there is no such file, naming those that there are."""
    file = Path(name) if name.endswith(".yaml") else SWEEPS / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(path.stem for path in sorted(SWEEPS.glob("*.yaml")))
        raise ConfigError(f"there is no sweep {name!r}", todo=f"SWEEP= is one of {known}, or a file")
    return file


if __name__ == "__main__":
    raise SystemExit(run_main(main))
