"""make sweep SWEEP=NAME: train the runs of defconfigs/sweeps/NAME.yaml and put what came out in a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from lib.errors import ConfigError, ToolkitError, run_main
from lib.studies.experiment import read_experiment
from lib.studies.runner import resolved_runs, run_all, table

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
    runs = resolved_runs(experiment, root=ROOT, scratch=out)
    print(f"{experiment.name}: {experiment.about}", flush=True)
    print(f"{len(experiment.points)} points, {len(experiment.seeds)} seeds, in {out}", flush=True)
    results = run_all(
        runs, root=ROOT, out=out, workers=options.jobs, say=lambda line: print(line, flush=True)
    )
    for line in table(experiment, results):
        print(line)
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
