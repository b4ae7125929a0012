"""Probe runs for `make probe` and CONFIG_AUTO_METHOD_PROBE: measure micro-batches on the devices."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lib import kconf
from lib.config import OF_PLUG_INS, Config, config_from_values
from lib.devices.probe import environment, probe, speed_settings
from lib.errors import ConfigError, PlanError, ToolkitError
from lib.hyperparams import apply_hyperparams
from lib.memory.measured import Kept, cache_file, key_of, load, store
from lib.nn.model_code import sources_of
from lib.plan.batch import divisors
from lib.plan.fitting import MemoryEstimator, predicted, smallest_accepted, trial_of
from lib.plan.placement import place, refuse_on_xla
from lib.plan.probing import Failure, Measurement, Probed, search
from lib.plan.show import show
from lib.plan.types import Hardware, Memory, Plan
from lib.tiers import with_tier
from lib.units import bytes_text
from train.planning.memory_estimate import Footprints
from train.stored_run import say
from train.training_data import Subject, open_to_train

MOST_SECONDS = 900.0  # limit of a probe run, start and compilation included
COMMAND = (sys.executable, "-m", "train", "trial")

# Symbols that change neither the memory nor the speed of a step; all others may.
IRRELEVANT = frozenset(
    {
        "auto_method", "data_dir", "data_download", "oom_retry", "seed",
        "learning_rate", "muon_learning_rate", "sign_learning_rate", "weight_decay",
        "lr_scaling", "lr_base_batch", "checkpoint_carry",
        "adam_beta1", "adam_beta2", "adam_eps", "schedule", "lr_min_ratio",
        "warmup_unit", "warmup_pct", "warmup_steps", "warmup_samples",
        "warmup_start_ratio",
        "lr_step_pct_list", "lr_step_gamma", "ema_decay", "norm_momentum",
        "budget", "num_epochs", "max_steps", "max_seconds",
        "eval_interval_steps", "log_interval_steps", "initial_weights",
        "checkpoint_interval_steps", "checkpoint_seconds", "keep_last", "keep_best", "resume",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The configuration, data and hardware that are measured."""

    resolved: kconf.Resolved
    config: Config
    subject: Subject
    hardware: Hardware  # of this machine
    predict: MemoryEstimator
    root: Path

    @classmethod
    def of(
        cls,
        resolved: kconf.Resolved,
        subject: Subject,
        hardware: Hardware,
        *,
        root: Path,
        predict: MemoryEstimator | None = None,
    ) -> Bench:
        """Create a bench. predict: a predictor with cached results; None for a new one."""
        config = config_from_values(resolved.values)
        return cls(
            resolved=resolved,
            config=config,
            subject=subject,
            hardware=hardware,
            predict=predict or Footprints(config, subject).predictor(hardware),
            root=root,
        )

    def plan(self, probed: Probed | None = None) -> Plan:
        """Plan by measurements, or by prediction without them."""
        config = dataclasses.replace(self.config, auto_method="predict", batch_table_strict=False)
        return apply_hyperparams(
            config,
            False,
            hardware=self.hardware,
            facts=self.subject.facts,
            predict=self.predict,
            probed=probed,
        )

    def memory(self, decided: Plan, size: int) -> Memory:
        """Predict the memory of micro-batches of `size`, all else as in `decided`."""
        accumulates = size < decided.effective_batch // decided.world
        trial = dataclasses.replace(trial_of(decided), micro_batch=size, accumulates=accumulates)
        return predicted(trial, self.predict, free_bytes=place(self.config, self.hardware).free_bytes)


def probe_command(asked: kconf.Resolved, *, root: Path) -> int:
    """Run `make probe`: measure, store the results, and print the resulting plan.

    Raises ConfigError if the batch is set by hand, PlanError if no micro-batch that was tried fits.
    """
    resolved = with_tier(asked, root=root, say=say)
    config = config_from_values(resolved.values)
    if config.hyper_param == "manual":
        raise ConfigError(
            "there is nothing to measure",
            why="CONFIG_HYPER_PARAM_MANUAL=y gives the micro-batch",
            todo="set CONFIG_HYPER_PARAM_AUTO=y",
        )
    subject = open_to_train(config, root=root, say=say)
    bench = Bench.of(resolved, subject, probe(config.device), root=root)
    show(bench.plan(measure(bench)), sys.stdout)
    if config.auto_method != "probe":
        say("CONFIG_AUTO_METHOD_PROBE=y makes runs go by it")
    return 0


def known(bench: Bench) -> Kept | None:
    """Return an earlier measurement of the same configuration, if it fits into memory now."""
    kept = load(cache_file(), key_of(facts_of(bench)))
    if kept is None:
        return None
    memory = bench.plan(kept.probed).memory
    assert memory is not None
    return kept if kept.probed.chosen.need_bytes <= memory.usable_bytes else None


def known_or_measured(bench: Bench) -> Probed:
    """Return stored measurements, or measure now. Raises what `measure` does."""
    kept = known(bench)
    if kept is None:
        return measure(bench)
    say(f"Measured on {kept.made}: {cache_file()}")
    return kept.probed


def measure(bench: Bench) -> Probed:
    """Measure micro-batches on the devices, and store the results.

    Raises PlanError if none that was tried fits, ToolkitError if a probe run fails for another reason.
    """
    refuse_on_xla(bench.hardware.kind, what="measuring (make probe)")
    decided = bench.plan()
    share = decided.effective_batch // decided.world
    step, _ = smallest_accepted(
        lambda size: bench.memory(decided, size), share=share, step=decided.norm_batch or 1
    )
    # The size predicted to be best may be no divisor: then the last micro-batch is smaller.
    sizes = sorted({decided.micro_batch, *(step * size for size in divisors(share // step))})

    def try_out(size: int) -> Measurement | Failure:
        say(f"Trial: micro-batch {size} ...")
        outcome = trial(bench, decided, size)
        say(f"  {_told(outcome)}")
        return outcome

    def may_fit(size: int, measured: Measurement) -> bool:
        memory, known_memory = (bench.memory(decided, each) for each in (size, measured.micro_batch))
        more = memory.need_bytes - known_memory.need_bytes  # with fragmentation, which measurements include
        return measured.need_bytes + more <= memory.usable_bytes

    probed = search(decided.micro_batch, sizes, try_out, may_fit=may_fit)
    if not probed.measurements:
        raise PlanError(
            f"no micro-batch of {bench.config.model} that was tried fits",
            why="; ".join(f"{failed.micro_batch}: {failed.reason}" for failed in probed.failures),
            todo="set CONFIG_GRAD_CHECKPOINT_BLOCKS=y where there is one, or choose a smaller model",
        )
    _keep(bench, probed)
    return probed


def trial(bench: Bench, decided: Plan, size: int) -> Measurement | Failure:
    """Train for a few steps with micro-batches of `size`, in processes of their own, which may crash.

    Every size makes steps of about as many samples, so that the update has the same weight in all of them.
    """
    share = decided.effective_batch // decided.world
    wanted = max(1 + (size < share), round(2 * decided.micro_batch / size))
    accumulation = min(wanted, max(1, share // size))
    effective = size * accumulation * decided.world
    plan = dataclasses.replace(
        decided,
        micro_batch=size,
        last_micro_batch=size,
        accumulation=accumulation,
        effective_batch=effective,
        memory=None,
    )
    usable = bench.memory(decided, size).usable_bytes
    outcomes = _run(bench, plan, usable_bytes=usable)
    if isinstance(outcomes, str):
        return Failure(micro_batch=size, reason=outcomes)
    need = max(outcome["need_bytes"] for outcome in outcomes)
    if need > usable:
        return Failure(micro_batch=size, reason=f"it took {bytes_text(need)} of {bytes_text(usable)} usable")
    slowest = max(outcome["step_seconds"] for outcome in outcomes)
    return Measurement(micro_batch=size, need_bytes=need, samples_per_second=effective / slowest)


def facts_of(bench: Bench) -> dict[str, Any]:
    """Return everything that a measurement depends on."""
    asked = {field.name: getattr(bench.config, field.name) for field in dataclasses.fields(Config)}
    asked |= {name: dict(asked[name]) for name in OF_PLUG_INS}  # JSON has no read-only mappings
    found = bench.hardware
    return {
        "configuration": {name: value for name, value in asked.items() if name not in IRRELEVANT},
        "sources": digest_of_sources(bench.root, bench.config.model),
        "devices": [[device.name, device.total_bytes] for device in found.devices],
        "processor": [found.cpu_name, found.cpu_count],
        "torch": environment()["torch"],
        **speed_settings(),
    }


def _run(bench: Bench, plan: Plan, *, usable_bytes: int) -> list[dict[str, Any]] | str:
    """Return each rank's results, or the reason why memory did not suffice."""
    with tempfile.TemporaryDirectory(prefix="anneal-trial-") as folder:
        order, output = Path(folder) / "order.json", Path(folder) / "output"
        told = {
            "configuration": bench.resolved.to_json(),
            "plan": plan.to_json(),
            "hardware": bench.hardware.to_json(),
            "usable_bytes": usable_bytes,
        }
        order.write_text(json.dumps(told))
        with output.open("w") as stream:
            try:
                done = subprocess.run(
                    [*COMMAND, str(order)],
                    cwd=bench.root,
                    stdout=stream,
                    stderr=stream,
                    timeout=MOST_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"it took more than {MOST_SECONDS:.0f} s"
        files = [order.with_name(f"{rank}.json") for rank in range(plan.world)]
        outcomes = [json.loads(file.read_text()) for file in files if file.exists()]
        return _judged(
            outcomes, plan.world, status=done.returncode, output=output.read_text(errors="replace")
        )


def _judged(
    outcomes: list[dict[str, Any]], world: int, *, status: int, output: str
) -> list[dict[str, Any]] | str:
    """Combine the ranks' outcomes: a size works only if it works on all of them.

    Raises ToolkitError if a rank failed for another reason than memory.
    """
    for outcome in outcomes:
        if outcome["status"] == "out_of_memory":
            return str(outcome["reason"])
    for outcome in outcomes:
        if outcome["status"] == "failed":
            raise ToolkitError("a trial failed, and not for want of memory", why=outcome["reason"])
    if len(outcomes) == world:
        return outcomes
    # Mostly killed by the kernel for lack of memory, which leaves no message.
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    if status < 0:
        return f"its process was ended by signal {-status}"
    if world > 1 and "was ended by signal" in last:
        return last
    raise ToolkitError(f"a trial ended with status {status} and told nothing", why=last)


def _told(outcome: Measurement | Failure) -> str:
    if isinstance(outcome, Failure):
        return f"does not fit: {outcome.reason}"
    return f"{outcome.samples_per_second:.4g} samples/s, {bytes_text(outcome.need_bytes)}"


def _keep(bench: Bench, probed: Probed) -> None:
    facts, made = facts_of(bench), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    try:
        store(cache_file(), key_of(facts), Kept(probed, made), facts=facts)
    except ToolkitError as error:  # the measurement is good even if it cannot be stored
        say(f"note: {error}; the next run will measure again")


def digest_of_sources(root: Path, model: str) -> str:
    """Digest of all sources that a step of `model` may run."""
    digest = hashlib.sha256()
    for file in sources_of(root, model):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
