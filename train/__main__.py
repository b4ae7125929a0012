"""`python -m train`: what the make targets train, resume, eval and plan call."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from lib.errors import run_main
from train.stop import ended_by_interrupt

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="directory of run directories")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "train", help="train what .config says; go on with the same run if it was interrupted"
    )
    resume = commands.add_parser("resume", help="go on with an interrupted run, by its own configuration")
    evaluate = commands.add_parser("eval", help="evaluate a run's checkpoint")
    for command in (resume, evaluate):
        command.add_argument("run", nargs="?", default="", help="path or unique prefix; default: the newest")
    evaluate.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    commands.add_parser("plan", help="print what would be decided for this machine, and why")
    options = parser.parse_args()
    # Below, because it imports torch, and a wrong command line should be told at once.
    with ended_by_interrupt():
        from train import commands as run

    if options.command == "train":
        return run.train(root=ROOT, runs=options.runs, started=started)
    if options.command == "resume":
        return run.resume(options.run, root=ROOT, runs=options.runs, started=started)
    if options.command == "eval":
        return run.evaluate(options.run, root=ROOT, runs=options.runs, best=options.best)
    return run.plan(root=ROOT)


if __name__ == "__main__":
    sys.exit(run_main(main))
