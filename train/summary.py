"""Run summary: final messages about memory and the trained model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from lib.config import Config
from lib.data.sampler import HasLengths, sample_stream
from lib.data.types import Dataset, TextSpec, TokenPart, TokensSpec, TokenTagSpec
from lib.devices.host import given_to_make, make_in
from lib.errors import DataError
from lib.plan.fitting import TARGET_UTIL, advised_micro_batch, step_settings
from lib.plan.types import COLLECTIVE_FORWARD, Hardware
from lib.plugin_folders import ROOT
from lib.runs.metrics import format_value
from lib.units import bytes_text, setting
from train.job import Job
from train.signals import Stopped
from train.tasks.base import optional_function
from train.training_data import TrainingData, cache_of, make_training_data

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 100
_PROMPT_CHARACTERS = 12  # of a text without blanks


@runtime_checkable
class HasRunNote(Protocol):
    """A model with a note on its last call that the user should read."""

    def run_note(self) -> str | None:
        """Return the note, None for none."""


def eval_part(config: Config, dataset: Dataset) -> str:
    """Return a description of the data that evaluation uses."""
    spec = dataset.spec
    whole = "validation part" if isinstance(spec, TokensSpec) else "test part"
    part = "held-out training samples" if config.holdout else whole
    return f"{part} of {spec.name}{', synthetic' if spec.synthetic else ''}"


def baseline_of(
    config: Config, dataset: Dataset, *, cache_dir: Path, log: Callable[[str], None]
) -> str | None:
    """Return the baseline of the task as a line of text, cached in `cache_dir`; None if there is none.

    Raises ToolkitError if the cache cannot be written.
    """
    baseline = optional_function(config, "baseline")
    return None if baseline is None else baseline(dataset, cache_dir=cache_dir, log=log)


@contextlib.contextmanager
def report_memory(job: Job, hardware: Hardware) -> Iterator[None]:
    """Report the device's peak memory when training ends, also by a signal."""
    try:
        yield
    except Stopped:
        _log_memory(job, hardware)
        raise
    _log_memory(job, hardware)


def _log_memory(job: Job, hardware: Hardware) -> None:
    """Print the peak beside the prediction, or a micro-batch that would have used the memory better."""
    peak_bytes = job.backend.peak_memory_bytes() if job.backend.is_main else None
    if peak_bytes is None:
        return
    config, plan, total_bytes = job.config, job.plan, hardware.devices[0].total_bytes
    filled = peak_bytes / total_bytes
    line = (
        f"Memory: tensors took {bytes_text(peak_bytes)} of {bytes_text(total_bytes)} at most ({filled:.0%})"
    )
    percent = config.elastic_target_util  # of LatentWire's policy, whose batches come from its own table
    if percent is None and config.auto_method in ("predict", "probe"):
        predicted = "nothing" if plan.memory is None else bytes_text(plan.memory.peak_bytes)
        job.record.log(f"{line}; predicted: {predicted}")
        return
    size = advised_micro_batch(
        plan.micro_batch,
        share=plan.shares[0],
        norm_batch=plan.norm_batch,
        filled=filled,
        target=TARGET_UTIL if percent is None else percent / 100,
    )
    if size != plan.micro_batch:
        by_hand = f"CONFIG_BATCH_SIZE={size} CONFIG_TARGET_EFFECTIVE_BATCH={plan.effective_batch}"
        line += f"; {size} at a time instead of {plan.micro_batch} would use it better at the next start"
        line += f", with the same effective batch: CONFIG_HYPER_PARAM_MANUAL=y {by_hand}"
    job.record.log(line)


def log_speed(job: Job, data: TrainingData, hardware: Hardware, *, step: int) -> None:
    """Record the speed measured and estimated, as a row of kind "speed" of metrics.jsonl and in words."""
    if not (row := dict(job.record.speed())):
        return
    rate = row["samples_per_second"]
    if job.task.targets_per_sample > 1:
        row["tokens_per_second"] = rate * _tokens_per_sample(job, data.dataset, steps=step)
    row |= {} if hardware.kind == "cpu" else _estimated_speed(job, data, hardware, rate=rate)
    job.record.row("speed", step=step, **row)
    named = (f"{name.replace('_', ' ')} {format_value(name, value)}" for name, value in row.items())
    missing = []
    if job.plan.world > 1 and "gradient_wait" not in row:
        missing.append(f"communication is not measured with {job.plan.strategy}: make profile shows it")
    if hardware.kind != "cpu" and "model_flop_utilization" not in row:  # of CPUs there is no catalogue
        missing += [
            f"no estimate and no FLOP utilization: {hardware.devices[0].name} is not in the catalogue"
        ]
    job.record.log("; ".join([f"Speed: {', '.join(named)}", *missing]))


def _tokens_per_sample(job: Job, dataset: Dataset, *, steps: int) -> float:
    """Return the mean number of tokens without padding in the samples of the first `steps`."""
    spec, part = dataset.spec, dataset.train
    if isinstance(spec, HasLengths):
        lengths_N = spec.lengths(part)
    elif isinstance(spec, TokenTagSpec):
        lengths_N = (part.take()[0] != spec.pad).sum(axis=1)
    else:
        return job.task.targets_per_sample
    count = min(steps * job.plan.effective_batch, part.size)  # each epoch has the same samples
    _, seen_N = sample_stream(start=0, count=count, seed=job.config.seed, size=part.size)
    return float(lengths_N[seen_N].mean())


def _estimated_speed(job: Job, data: TrainingData, hardware: Hardware, *, rate: float) -> dict[str, float]:
    """Return the estimated range of samples per second, and the utilization by `rate`; empty without them."""
    from lib.plan.roofline import peak_flop_per_second  # a run on a CPU does without these modules
    from train.planning.memory_estimate import MemoryTraces
    from train.planning.step_estimate import gpu_of_hardware, step_time_of

    plan, gpu, flop = job.plan, gpu_of_hardware(hardware), data.flop_per_sample or 0
    if job.config.grad_checkpoint not in (None, "none"):  # what is computed again is no FLOP of the model
        plain = job.config.replace(grad_checkpoint="none")
        flop = make_training_data(plain, data.dataset).flop_per_sample or 0
    if gpu is None:
        return {}
    found = MemoryTraces(job.config, data).of(step_settings(plan), hardware)
    time = step_time_of(plan, found, data, job.config, hardware)
    assert time is not None, "the GPU is in the catalogue"
    peak = peak_flop_per_second(gpu, precision=plan.precision) * plan.layout.devices
    ends = zip(time.exposed_seconds, (time.fastest_seconds, time.slowest_seconds), strict=True)
    waits = sorted(exposed / seconds for exposed, seconds in ends)
    measured = bool(job.backend.waited_seconds())
    return {
        "least_samples_per_second": plan.effective_batch / time.slowest_seconds,
        "most_samples_per_second": plan.effective_batch / time.fastest_seconds,
        **({"least_gradient_wait": waits[0], "most_gradient_wait": waits[1]} if measured else {}),
        "model_flop_utilization": rate * flop / peak,
    }


def log_summary(job: Job, dataset: Dataset, *, root: Path) -> None:
    """Print the model's note on the last batch of evaluation, a sample of its text, and its baseline."""
    is_main = job.backend.is_main
    run_note = job.model.run_note() if is_main and isinstance(job.model, HasRunNote) else None
    if run_note is not None:
        job.record.log(run_note)
    if is_main or job.plan.strategy in COLLECTIVE_FORWARD:  # with those a forward pass is collective
        _log_sample(job, dataset)
    baseline = None
    if is_main:
        baseline = baseline_of(job.config, dataset, cache_dir=cache_of(root), log=job.record.log)
    if baseline is not None:
        job.record.log(baseline)


def next_commands(run: Path, config: Config, dataset: Dataset, *, root: Path) -> str:
    """Format three commands that look at the run in directory `run`, which is the newest of its directory."""
    where, is_default = run.parents[1], run.parents[1].absolute() == root / "runs"
    given = "" if is_default else f" {setting('O', where.parent)}"
    given += _environment()
    evaluate = "eval BEST=1" if config.checkpoints.keep_best else "eval"
    prompt = _prompt(dataset)
    commands = {
        "report": "write a page about it",
        f"sample {setting('PROMPT', prompt)}" if prompt else evaluate: (
            "continue a text with it" if prompt else "evaluate it again, from its checkpoint"
        ),
        "runs": "list it with the others",
    }
    width = max(map(len, commands)) + len(given)
    return "\n".join(
        ["Next:", *(f"  {make_in(ROOT)} {name + given:<{width}}  {what}" for name, what in commands.items())]
    )


def resume_command(run: Path) -> str:
    """Return the shell command that resumes the run in directory `run`."""
    return f"{make_in(ROOT)} resume {setting('RUN', run)}{_environment()}"


def _environment() -> str:
    """Return what chose the Python environment of this run, for further commands."""
    return "".join(f" {word}" for word in given_to_make("VENV", "PYTHON"))


def _prompt(dataset: Dataset) -> str:
    """Return a beginning that a language model can continue, from its data if they lack "The"; else ""."""
    if not isinstance(dataset.spec, TextSpec) or dataset.tokenizer is None:
        return ""
    with contextlib.suppress(DataError):  # of characters that the data do not have
        dataset.tokenizer.encode("The")
        return "The"
    inputs_1T, _ = dataset.test.take(np.zeros(1, np.int64))
    text = dataset.tokenizer.decode(inputs_1T[0])
    words = re.findall(r"\w+", text) or text.split()
    return words[0][:_PROMPT_CHARACTERS] if words else ""


def _log_sample(job: Job, dataset: Dataset) -> None:
    """Print the language model's continuation of the beginning of its evaluation part."""
    if not isinstance(dataset.test, TokenPart) or dataset.tokenizer is None:
        return
    from train.generate import Sampling, continued_text

    inputs_1T, _ = dataset.test.take(np.zeros(1, np.int64))
    prompt = inputs_1T[0, :PROMPT_TOKENS].tolist()
    sampling = Sampling(temperature=0.8, top_k=0, tokens=SAMPLE_TOKENS, seed=job.config.seed)
    job.record.log(f"Sample: {continued_text(job, dataset.tokenizer, prompt, sampling=sampling)}")
