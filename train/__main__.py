"""`python -m train`: the program behind make train, resume, rerun, eval, report, plan and others."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from lib import kconf
from lib.devices.host import set_up_allocator
from lib.distributed.launcher import is_worker
from lib.errors import ConfigError, ToolkitError, outlast_readers, run_main
from lib.units import non_negative, whole_number
from train.signals import importing

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run one command; an exception from the code of a plug-in is reported with its file and line."""
    try:
        return _command()
    except ToolkitError:
        raise
    except Exception as error:
        from lib.nn.model_code import fault_of_plugin  # imports torch

        if (fault := fault_of_plugin(error)) is not None:
            raise fault from error
        raise


def _command() -> int:
    """Run one command. Torch takes seconds to import, so arguments and .config are checked first."""
    started = time.monotonic()
    set_up_allocator()
    options = _parser().parse_args()
    command = options.command
    if command in ("train", "resume", "rerun") or is_worker():
        outlast_readers()
    if command in ("train", "plan", "probe", "preflight", "data-check") and not is_worker():
        return _with_configuration(options, kconf.from_environment(ROOT), started=started)
    if command in ("eval", "sample", "predict", "export"):
        return _with_stored_run(options)
    if command == "profile":
        requested = None if is_worker() else kconf.from_environment(ROOT)
        with importing():
            from train.profiling import profile
        return profile(requested, root=ROOT, steps=options.steps, out=options.out)
    if command == "report":
        from train.report import report

        return report(options.run, root=ROOT, runs=options.runs, out=options.out)
    with importing():
        if command == "trial":
            from train.planning.probe_run import run_probe as run_request
        elif command == "host_memory":
            from train.planning.host_memory import estimate_host_memory as run_request
        else:
            from train import commands as run
    if command in ("trial", "host_memory"):
        return run_request(options.request, root=ROOT)
    where = {"root": ROOT, "runs": options.runs, "verbose": options.verbose}
    if is_worker():
        return run.work(**where, started=started)
    return (run.resume if command == "resume" else run.rerun)(options.run, **where, started=started)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m train", description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="directory of run directories")
    parser.add_argument("--verbose", action="store_true", help="show the whole plan before training")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train .config; resume its run if that was interrupted")
    resume = commands.add_parser("resume", help="resume an interrupted run with its own configuration")
    rerun = commands.add_parser("rerun", help="train a run again with its own configuration")
    evaluate = commands.add_parser("eval", help="evaluate a run's checkpoint")
    sample = commands.add_parser("sample", help="continue a text with a language model")
    predict = commands.add_parser("predict", help="predict files with a run")
    export = commands.add_parser("export", help="write a run's model for use without this project")
    report = commands.add_parser("report", help="write a page about a run")
    for command in (resume, rerun, evaluate, sample, predict, export, report):
        command.add_argument("run", nargs="?", default="", help="path or unique prefix; default: the newest")
    for command in (evaluate, sample, predict, export):
        command.add_argument("--best", action="store_true", help="the best checkpoint instead of the latest")
    sample.add_argument("--prompt", default="\n", help="the text to continue; default: a new line")
    temperature = partial(non_negative, variable="TEMPERATURE")
    top_k, seed, tokens = (partial(whole_number, variable=v, least=0) for v in ("TOP_K", "SEED", "TOKENS"))
    seed = partial(seed, below=2**64)  # of torch
    # By default greedy are answers, which are compared, and sampled is text.
    for command, warmth in ((sample, 0.8), (predict, None)):
        command.add_argument("--temperature", type=temperature, default=warmth, help="0: greedy")
        rest = (("--top-k", top_k, 0), ("--seed", seed, 1), ("--tokens", tokens, 200))
        for option, kind, usual in rest:
            command.add_argument(option, type=kind, default=usual if command is sample else None)
    predict.add_argument("--input", default="", help="files, a folder, or - for standard input")
    predict.add_argument(
        "--out", type=Path, help="file to write: .csv, .json or .jsonl; default: print a few"
    )
    top = partial(whole_number, variable="TOP")
    predict.add_argument("--top", type=top, default=0, help="number of likeliest classes; default: each")
    export.add_argument("--directory", type=Path, help="target; created if it is missing")
    export.add_argument(
        "--format", default="huggingface", help="safetensors, pt2, onnx, huggingface or adapter"
    )
    export.add_argument("--merge", choices=("y", "n"), default="n", help="add adapters to the weights")
    report.add_argument("--out", type=Path, help="file to write; default: report.html in the run directory")
    plan = commands.add_parser("plan", help="print the decisions and their reasons")
    plan.add_argument("--gpu", default="", help="plan for named hardware: NAME[xN][:FREE], or all")
    plan.add_argument("--json", action="store_true", help="machine-readable output")
    plan.add_argument("--price", default="", help="of one device and hour: a number, or list")
    commands.add_parser("probe", help="measure which micro-batch trains fastest here")
    for name in ("trial", "host_memory"):  # processes started by probe runs and sweeps
        commands.add_parser(name).add_argument("request", type=Path)
    profile = commands.add_parser("profile", help="trace steps of the training loop, and summarize the trace")
    steps = partial(whole_number, variable="STEPS")
    profile.add_argument("--steps", type=steps, default=20, help="steps of the trace")
    profile.add_argument("--out", type=Path, default=ROOT / "build" / "profile", help="folder to write to")
    check = commands.add_parser("data-check", help="show what the configured data set holds")
    check.add_argument(
        "--out", type=Path, help="PNG of the contact sheet; default: below build/data-check, or O="
    )
    preflight = commands.add_parser("preflight", help="check the configured run on a few samples")
    preflight.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def _with_configuration(options: argparse.Namespace, requested: kconf.Resolved, *, started: float) -> int:
    """Run a command on .config."""
    with importing():
        if options.command == "plan":
            import torch._dynamo  # noqa: F401 - the first trace would, while garbage is collected

            from train.planning.command import plan
        elif options.command == "probe":
            from train.planning.run_plan import probe_command
        elif options.command == "preflight":
            from train.preflight.command import preflight
        elif options.command == "data-check":
            from train.data_check import data_check
        else:
            from train.commands import train
    if options.command == "plan":
        return plan(requested, root=ROOT, gpu=options.gpu, as_json=options.json, price=options.price)
    if options.command == "probe":
        return probe_command(requested, root=ROOT)
    if options.command == "data-check":
        return data_check(requested, root=ROOT, out=options.out)
    if options.command == "preflight":
        return preflight(requested, root=ROOT, runs=options.runs, as_json=options.json)
    return train(requested, root=ROOT, runs=options.runs, started=started, verbose=options.verbose)


def _with_stored_run(options: argparse.Namespace) -> int:
    """Run a command on a stored run."""
    if options.command == "export" and options.directory is None:
        raise ConfigError("there is no DIRECTORY=", todo="name it, as in make export DIRECTORY=exported")
    with importing():
        from train import stored_run
        from train.generate import Sampling

        if options.command == "predict":
            from train import predict
        elif options.command == "export":
            from train import export

    which = {"root": ROOT, "runs": options.runs, "best": options.best}
    if options.command == "eval":
        return stored_run.evaluate(options.run, **which)
    if options.command == "predict":
        own = {name: getattr(options, name) for name in ("temperature", "top_k", "tokens", "seed")}
        which |= {"sampling": {name: value for name, value in own.items() if value is not None}}
        return predict.command(options.run, **which, given=options.input, out=options.out, top=options.top)
    if options.command == "export":
        which |= {"directory": options.directory, "layout": options.format, "merge": options.merge == "y"}
        return export.command(options.run, **which)
    sampling = Sampling(
        temperature=options.temperature, top_k=options.top_k, tokens=options.tokens, seed=options.seed
    )
    return stored_run.sample(options.run, **which, prompt=options.prompt, sampling=sampling)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line without its usage, because make wrote the command line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


if __name__ == "__main__":
    sys.exit(run_main(main))
