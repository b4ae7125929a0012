"""`python -m train`: what train, resume, rerun, eval, sample, export, plan and probe of make call."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import NoReturn

from lib import kconf
from lib.distributed.launcher import is_worker
from lib.errors import ConfigError, run_main
from train.signals import importing

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    started = time.monotonic()
    parser = _Parser(prog="python -m train", description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="directory of run directories")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "train", help="train what .config says; go on with the same run if it was interrupted"
    )
    resume = commands.add_parser("resume", help="go on with an interrupted run, by its own configuration")
    rerun = commands.add_parser("rerun", help="train a run again by its own configuration")
    evaluate = commands.add_parser("eval", help="evaluate a run's checkpoint")
    sample = commands.add_parser("sample", help="let a language model continue a text")
    export = commands.add_parser("export", help="write weights in the layout of Hugging Face transformers")
    for command in (resume, rerun, evaluate, sample, export):
        command.add_argument("run", nargs="?", default="", help="path or unique prefix; default: the newest")
    for command in (evaluate, sample, export):
        command.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    sample.add_argument("--prompt", default="\n", help="the text to continue; default: a new line")
    sample.add_argument("--temperature", type=not_negative, default=0.8, help="0: the likeliest token")
    sample.add_argument("--top-k", type=natural, default=0, help="draw among this many tokens; 0: all")
    sample.add_argument("--seed", type=natural, default=1, help="of the draws")
    sample.add_argument("--tokens", type=natural, default=200, help="how many to add")
    export.add_argument("--directory", type=Path, required=True, help="where to; made if it is missing")
    plan = commands.add_parser("plan", help="print what would be decided, and why")
    plan.add_argument("--gpu", default="", help="for a machine that is only named: NAME[xN][:FREE], or all")
    plan.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("probe", help="measure which micro-batch trains fastest here")
    for name in ("trial", "demand"):  # processes that probe, and a sweep, start
        commands.add_parser(name).add_argument("order", type=Path)
    preflight = commands.add_parser("preflight", help="check the configured run on a few samples")
    preflight.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    # Torch takes seconds to import: what is wrong with words and files is told before.
    if options.command in ("train", "plan", "probe", "preflight") and not is_worker():
        return by_configuration(options, kconf.from_environment(ROOT), started=started)
    if options.command == "trial":
        with importing():
            from train.planning.trial import run_trial

        return run_trial(options.order, root=ROOT)
    if options.command == "demand":
        with importing():
            from train.planning.host_memory import run_demand

        return run_demand(options.order, root=ROOT)
    with importing():
        from train import commands as run

    if is_worker():
        return run.work(root=ROOT, runs=options.runs, started=started)
    if options.command == "resume":
        return run.resume(options.run, root=ROOT, runs=options.runs, started=started)
    if options.command == "rerun":
        return run.rerun(options.run, root=ROOT, runs=options.runs, started=started)
    return on_stored_run(options)


def by_configuration(options: argparse.Namespace, asked: kconf.Resolved, *, started: float) -> int:
    """The commands that do what .config says."""
    if options.command == "plan":
        with importing():
            from train.planning.command import plan

        return plan(asked, root=ROOT, gpu=options.gpu, as_json=options.json)
    if options.command == "probe":
        with importing():
            from train.planning.autotune import probe_command

        return probe_command(asked, root=ROOT)
    if options.command == "preflight":
        with importing():
            from train.preflight.command import preflight

        return preflight(asked, root=ROOT, runs=options.runs, as_json=options.json)
    with importing():
        from train.commands import train

    return train(asked, root=ROOT, runs=options.runs, started=started)


def on_stored_run(options: argparse.Namespace) -> int:
    """The commands eval, sample and export."""
    from train import stored_run
    from train.generate import Sampling

    which = {"root": ROOT, "runs": options.runs, "best": options.best}
    if options.command == "eval":
        return stored_run.evaluate(options.run, **which)
    if options.command == "export":
        return stored_run.export(options.run, **which, directory=options.directory)
    sampling = Sampling(
        temperature=options.temperature, top_k=options.top_k, tokens=options.tokens, seed=options.seed
    )
    return stored_run.sample(options.run, **which, prompt=options.prompt, sampling=sampling)


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line: make wrote the command line, and its usage is not the user's."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def natural(text: str) -> int:
    """A whole number that is not negative, for argparse."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def not_negative(text: str) -> float:
    """A number that is neither negative nor infinite, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number


if __name__ == "__main__":
    sys.exit(run_main(main))
