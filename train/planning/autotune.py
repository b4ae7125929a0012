"""Probe runs for `make probe` and CONFIG_AUTO_METHOD_PROBE: measure micro-batches on the devices."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lib import atomic, kconf
from lib.config import OF_PLUG_INS, Config, config_from_values, flat
from lib.devices.host import speed_settings
from lib.devices.probe import environment
from lib.errors import PlanError, ToolkitError, os_error, signal_name
from lib.hyperparams import apply_hyperparams
from lib.plan.compile_parts import choose_graphs
from lib.plan.fitting import MemoryEstimator, divisors, predicted, smallest_accepted, step_settings
from lib.plan.placement import place, refuse_static_shapes
from lib.plan.probe_search import Failure, Measurement, Probed, search
from lib.plan.types import Hardware, Memory, Plan
from lib.runs.identity import digest_of, sources_of
from lib.units import bytes_text
from train.planning.memory_estimate import MemoryTraces
from train.record import log
from train.training_data import TrainingData

MAX_SECONDS = 900.0  # limit of a probe run, start and compilation included
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
        "eval_interval_steps", "log_interval_steps", "initial_weights", "weights_dir",
        "initial_weights_allow", "reset_head", "layer_decay",
        "checkpoint_interval_steps", "checkpoint_seconds", "keep_last", "keep_best", "resume",
        "log_seconds", "sink_tensorboard", "sink_wandb", "sink_trackio", "sink_project",
        "best_metric", "early_stop_evals", "early_stop_delta", "dist_max_restarts",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class CachedProbe:
    """Results of probe runs, and when they ran (a date and time in UTC)."""

    probed: Probed
    made: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTarget:
    """The configuration, data and hardware that are measured."""

    resolved: kconf.Resolved
    config: Config
    data: TrainingData
    hardware: Hardware  # of this machine
    predict: MemoryEstimator
    root: Path

    @classmethod
    def of(
        cls,
        resolved: kconf.Resolved,
        data: TrainingData,
        hardware: Hardware,
        *,
        root: Path,
        predict: MemoryEstimator | None = None,
    ) -> ProbeTarget:
        """Create a target. predict: a predictor with cached results; None for a new one."""
        config = config_from_values(resolved.values)
        predict = predict or MemoryTraces(config, data).predictor(hardware)
        return cls(resolved=resolved, config=config, data=data, hardware=hardware, predict=predict, root=root)

    def plan(self, probed: Probed | None = None) -> Plan:
        """Plan by measurements, or by prediction without them."""
        config = self.config.replace(auto_method="predict", batch_table_strict=False)
        return apply_hyperparams(
            config, False, hardware=self.hardware, facts=self.data.facts, predict=self.predict, probed=probed
        )

    def memory(self, decided: Plan, size: int) -> Memory:
        """Predict the memory of micro-batches of `size`, all else as in `decided`."""
        accumulates = size < decided.shares[0]
        step = dataclasses.replace(step_settings(decided), micro_batch=size, accumulates=accumulates)
        return predicted(step, self.predict, free_bytes=place(self.config, self.hardware).free_bytes)


def cached(target: ProbeTarget) -> CachedProbe | None:
    """Return an earlier measurement of the same configuration, if it fits into memory now."""
    found = load(cache_file(), key_of(cache_facts(target)))
    if found is None:
        return None
    memory = target.plan(found.probed).memory
    assert memory is not None
    return found if found.probed.chosen.need_bytes <= memory.usable_bytes else None


def cached_or_measured(target: ProbeTarget) -> Probed:
    """Return cached measurements, or measure now. Raises what `measure` does."""
    found = cached(target)
    if found is None:
        return measure(target)
    log(f"Measured on {found.made}: {cache_file()}")
    return found.probed


def measure(target: ProbeTarget) -> Probed:
    """Measure micro-batches on the devices, and store the results.

    Raises PlanError if none that was probed fits, ToolkitError if a probe run fails for another reason.
    """
    refuse_static_shapes(target.hardware.kind, what="measuring (make probe)")
    decided = target.plan()
    share = decided.shares[0]
    step, _ = smallest_accepted(
        lambda size: target.memory(decided, size), share=share, step=decided.norm_batch or 1
    )
    # The size predicted to be best may be no divisor: then the last micro-batch is smaller.
    sizes = sorted({decided.micro_batch, *(step * size for size in divisors(share // step))})

    def probe_size(size: int) -> Measurement | Failure:
        log(f"Probe run: micro-batch {size} ...")
        outcome = probe_run(target, decided, size)
        log(f"  {_format_outcome(outcome)}")
        return outcome

    def may_fit(size: int, measured: Measurement) -> bool:
        memory, before = (target.memory(decided, each) for each in (size, measured.micro_batch))
        more = memory.need_bytes - before.need_bytes  # with fragmentation, which measurements include
        return measured.need_bytes + more <= memory.usable_bytes

    probed = search(decided.micro_batch, sizes, probe_size, may_fit=may_fit)
    if not probed.measurements:
        raise PlanError(
            f"no micro-batch of {target.config.model} that was probed fits",
            why="; ".join(f"{failed.micro_batch}: {failed.reason}" for failed in probed.failures),
            todo="set CONFIG_GRAD_CHECKPOINT_BLOCKS=y where there is one, or choose a smaller model",
        )
    _store(target, probed)
    return probed


def probe_run(target: ProbeTarget, decided: Plan, size: int) -> Measurement | Failure:
    """Train for a few steps with micro-batches of `size`, in processes of their own, which may crash.

    Every size makes steps of about as many samples, so that the update has the same weight in all of them.
    """
    share = decided.shares[0]
    least = 1 + (size < share)  # steps that accumulate keep their gradients
    accumulation = max(least, min(round(2 * decided.micro_batch / size), share // size))
    effective = size * accumulation * decided.layout.replicas
    sizes: dict[str, Any] = {"micro_batch": size, "last_micro_batch": size, "accumulation": accumulation}
    on: dict[str, Any] = {"device": decided.device, "world": decided.world, "accumulation": accumulation}
    graphs = choose_graphs(target.config, target.data.facts, decided.compile_parts, **on).value
    sizes |= {"cuda_graphs": graphs, "effective_batch": effective}
    plan = dataclasses.replace(decided, **sizes, memory=None)
    usable = target.memory(decided, size).usable_bytes
    outcomes = _run(target, plan, usable_bytes=usable)
    if isinstance(outcomes, str):
        return Failure(micro_batch=size, reason=outcomes)
    need = max(outcome["need_bytes"] for outcome in outcomes)
    if need > usable:
        return Failure(micro_batch=size, reason=f"needs {bytes_text(need)} of {bytes_text(usable)} usable")
    slowest = max(outcome["step_seconds"] for outcome in outcomes)
    return Measurement(micro_batch=size, need_bytes=need, samples_per_second=effective / slowest)


def cache_facts(target: ProbeTarget) -> dict[str, Any]:
    """Return everything that a measurement depends on."""
    requested = flat(target.config)
    requested |= {name: dict(requested[name]) for name in OF_PLUG_INS}  # JSON has no read-only mappings
    hardware = target.hardware
    return {
        "configuration": {name: value for name, value in requested.items() if name not in IRRELEVANT},
        "sources": digest_of_sources(target.root, target.config.model),
        # Files of data and of weights decide the shapes.
        "model": [target.data.facts.parameters, target.data.facts.flop_per_sample],
        "inputs": [target.data.dataset.spec.input_dtype, *target.data.dataset.spec.input_shape],
        "devices": [[device.name, device.total_bytes] for device in hardware.devices],
        "processor": [hardware.cpu_name, hardware.cpu_count],
        "torch": environment()["torch"],
        **speed_settings(),
    }


def _run(target: ProbeTarget, plan: Plan, *, usable_bytes: int) -> list[dict[str, Any]] | str:
    """Return each rank's results, or the reason why memory did not suffice."""
    with tempfile.TemporaryDirectory(prefix="anneal-probe-") as folder:
        request, output = Path(folder) / "request.json", Path(folder) / "output"
        content = {
            "configuration": target.resolved.to_json(),
            "plan": plan.to_json(),
            "hardware": target.hardware.to_json(),
            "usable_bytes": usable_bytes,
        }
        request.write_text(json.dumps(content))
        with output.open("w") as stream:
            into: dict[str, Any] = {"stdout": stream, "stderr": stream, "timeout": MAX_SECONDS}
            try:
                done = subprocess.run([*COMMAND, str(request)], cwd=target.root, check=False, **into)
            except subprocess.TimeoutExpired:
                return f"it took more than {MAX_SECONDS:.0f} s"
        files = [request.with_name(f"{rank}.json") for rank in range(plan.world)]
        outcomes = [json.loads(file.read_text()) for file in files if file.exists()]
        return _combined(
            outcomes, plan.world, status=done.returncode, output=output.read_text(errors="replace")
        )


def _combined(
    outcomes: list[dict[str, Any]], world: int, *, status: int, output: str
) -> list[dict[str, Any]] | str:
    """Combine the ranks' outcomes: a size works only if it works on all of them.

    Raises ToolkitError if a rank failed for another reason than memory.
    """
    reasons = {outcome["status"]: outcome.get("reason") for outcome in reversed(outcomes)}  # of the first
    if "out_of_memory" in reasons:
        return str(reasons["out_of_memory"])
    if "failed" in reasons:
        raise ToolkitError("a probe run failed, and not for lack of memory", why=str(reasons["failed"]))
    if len(outcomes) == world:
        return outcomes
    # Mostly killed by the kernel for lack of memory, which leaves no message.
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    if status < 0:
        return f"its process was ended by {signal_name(status)}"
    if world > 1 and "was ended by signal" in last:
        return last
    raise ToolkitError(f"a probe run ended with status {status} and without a result", why=last)


def _format_outcome(outcome: Measurement | Failure) -> str:
    if isinstance(outcome, Failure):
        return f"does not fit: {outcome.reason}"
    return f"{outcome.samples_per_second:.4g} samples/s, {bytes_text(outcome.need_bytes)}"


def _store(target: ProbeTarget, probed: Probed) -> None:
    facts, made = cache_facts(target), datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    try:
        store(cache_file(), key_of(facts), CachedProbe(probed, made), facts=facts)
    except ToolkitError as error:  # the measurement is good even if it cannot be stored
        log(f"note: {error}; the next run will measure again")


def digest_of_sources(root: Path, model: str) -> str:
    """Digest of all sources that a step of `model` may run."""
    return digest_of(sources_of(root, model), root)


def cache_file() -> Path:
    """Path of this user's cache of measurements."""
    return Path.home() / ".cache" / "anneal" / "probe.json"


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the cache key for `facts`, which must hold everything that the result depends on."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(canonical.encode()).hexdigest()


def load(file: Path, key: str) -> CachedProbe | None:
    """Return the entry of `key`, or None if there is none or it cannot be read."""
    entry = _read(file).get(key)
    if entry is None:
        return None
    try:
        return CachedProbe(Probed.from_json(entry["probed"]), entry["made"])
    except (KeyError, TypeError):  # written by another version
        return None


def store(file: Path, key: str, found: CachedProbe, *, facts: Mapping[str, Any]) -> None:
    """Store a measurement. Raises ToolkitError if it cannot be written."""
    entries = _read(file)
    entries[key] = {"made": found.made, "probed": found.probed.to_json(), "facts": dict(facts)}
    text = json.dumps(entries, indent=1, default=list) + "\n"
    atomic.save(file, text, action="store the measurement in")


def _read(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise os_error(f"read the measurements in {file}", error) from error
    except ValueError as error:
        raise ToolkitError(
            f"{file} is damaged", why=str(error), todo="remove it; make probe measures again"
        ) from error
    return entries if isinstance(entries, dict) else {}
