"""API of automatic hyperparameters: for Anneal's Config and for foreign objects.

A foreign object is anything with upper-case attributes (BATCH_SIZE, COMPILE_AUTO ...). A missing attribute
counts as a symbol that .config does not set. This is the only module that may test for absent attributes; all
decisions are made by `lib.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from lib.config import CompileOptions, Config
from lib.devices.probe import probe
from lib.errors import ConfigError
from lib.plan import plan
from lib.plan.fitting import MemoryEstimator
from lib.plan.numerics import choose_compile
from lib.plan.placement import Placement, identical_devices, place
from lib.plan.tables import MODELS
from lib.plan.types import (
    STATIC_SHAPES,
    Decision,
    Device,
    Hardware,
    Kind,
    ModelFacts,
    Plan,
)
from lib.units import GB

if TYPE_CHECKING:
    from lib.plan.foreign_config import DeviceName, ForeignConfig
    from lib.plan.probe_search import Probed

GpuInfo: TypeAlias = Mapping[str, Any]
DEVICE_NAMES: tuple[DeviceName, ...] = ("auto", "cuda", "mps", "cpu")


def get_gpu_info() -> dict[str, Any]:
    """Return the GPUs that a run would use: all of the commonest model.

    Keys: gpu_name, gpu_count, gpu_mem_gb and gpu_free_gb (decimal GB, of the fullest of them), has_gpu,
    gpu_kind ("cuda", "rocm" or "mps"), gpu_capability (CUDA, else None). Without a GPU the count and the
    sizes are 0, and the last two keys are missing. Raises PlanError where GPUs are too mixed to choose.
    """
    hardware = probe("auto")
    if hardware.kind == "cpu":
        return {"gpu_name": "CPU", "gpu_count": 0, "gpu_mem_gb": 0.0, "gpu_free_gb": 0.0, "has_gpu": False}
    devices, _ = identical_devices(hardware, requested=0)
    fullest = min(devices, key=lambda device: device.free_bytes)
    return {
        "gpu_name": fullest.name,
        "gpu_count": len(devices),
        "gpu_mem_gb": fullest.total_bytes / GB,
        "gpu_free_gb": fullest.free_bytes / GB,
        "has_gpu": True,
        "gpu_kind": hardware.kind,
        "gpu_capability": fullest.capability,
    }


def auto_detect_hyperparams(
    config: object,
    target_effective_batch: int | None = None,
    model_type: str = "gpt2",
    gpu_info: GpuInfo | None = None,
) -> dict[str, Any]:
    """Choose the batch by the free-memory table, whatever method `config` selects.

    model_type: used for objects that are no Config; a Config names its own model.
    gpu_info: a mapping as from get_gpu_info (the default).

    Keys: batch_size, gradient_accumulation, last_micro_batch, effective_batch, target, world, compile,
    rationale (one line), plan. Raises ConfigError for an unknown model, PlanError where no plan keeps the
    target.
    """
    requested = _requested(config, model_type=model_type)
    requested = replace(requested, hyper_param="auto", auto_method="table")
    if target_effective_batch is not None:
        requested = replace(requested, target_effective_batch=target_effective_batch)
    hardware = _hardware(requested, gpu_info=gpu_info)
    decided = plan(requested, hardware, _facts(requested), even=not isinstance(requested, Config))
    return {
        "batch_size": decided.micro_batch,
        "gradient_accumulation": decided.accumulation,
        "last_micro_batch": decided.last_micro_batch,
        "effective_batch": decided.effective_batch,
        "target": decided.target,
        "world": decided.world,
        "compile": decided.compile,
        "rationale": _rationale(decided, requested.model, placement=place(requested, hardware)),
        "plan": decided,
    }


def auto_detect_compile(config: object, verbose: bool = True, *, gpu_info: GpuInfo | None = None) -> bool:
    """Choose whether to use torch.compile; prints the reason if `verbose`."""
    requested = _requested(config, model_type="gpt2")
    decision = choose_compile(requested, place(requested, _hardware(requested, gpu_info=gpu_info)))
    if verbose:
        print(_compile_line(decision))
    return decision.value


def apply_hyperparams(
    config: object,
    verbose: bool = True,
    model_type: str = "resnet18",
    *,
    hardware: Hardware | None = None,
    facts: ModelFacts | None = None,
    predict: MemoryEstimator | None = None,
    probed: Probed | None = None,
    gpu_info: GpuInfo | None = None,
) -> Plan:
    """Plan the run, print two lines about it if `verbose`, and return the plan.

    A frozen Config is not changed. On any other object BATCH_SIZE, GRADIENT_ACCUMULATION and COMPILE_MODEL
    are set; such a caller never gets an uneven last micro-batch.

    model_type: used for objects that are no Config; a Config names its own model.
    hardware: from lib.devices.probe.probe; default: from get_gpu_info (or `gpu_info`).
    facts: of the model and its data; default: what is known of the model by name.
    predict: predicts the device memory of a step. A Config that selects prediction needs it.
    probed: results of probe runs of this configuration on this hardware.

    Raises ConfigError for an unknown model or a malformed attribute, PlanError where no plan meets the
    configuration; nothing is set then.
    """
    requested = _requested(config, model_type=model_type)
    hardware = hardware or _hardware(requested, gpu_info=gpu_info)
    decided = plan(
        requested,
        hardware,
        facts or _facts(requested),
        even=not isinstance(requested, Config),
        predict=predict,
        probed=probed,
    )
    if verbose:
        rationale = _rationale(decided, requested.model, placement=place(requested, hardware))
        print(f"Hyperparams: {requested.hyper_param.upper()} mode - {rationale}")
        print(_compile_line(Decision(decided.compile, decided.reasons["compile"])))
    if not isinstance(requested, Config):
        target: Any = config
        target.BATCH_SIZE = decided.micro_batch
        target.GRADIENT_ACCUMULATION = decided.accumulation
        target.COMPILE_MODEL = decided.compile
    return decided


def _requested(config: object, *, model_type: str) -> Config | ForeignConfig:
    if isinstance(config, Config):
        return config
    if model_type not in MODELS:
        todo = f"known are {', '.join(sorted(MODELS))}"
        raise ConfigError(f"model_type {model_type!r} is not in the table", todo=todo)
    from lib.plan.foreign_config import ForeignConfig  # a run has a configuration of the toolkit

    row = MODELS[model_type]
    by_hand = _truth(config, "COMPILE_MODEL")
    return ForeignConfig(
        model=model_type,
        table_scale=row.scale,
        recommended_target=row.recommended_target,
        target_effective_batch=_integer(config, "TARGET_EFFECTIVE_BATCH") or 0,
        hyper_param=_either(config, "HYPER_PARAM"),
        batch_size=_integer(config, "BATCH_SIZE"),
        gradient_accumulation=_integer(config, "GRADIENT_ACCUMULATION"),
        batch_table_strict=_truth(config, "BATCH_TABLE_STRICT"),
        norm_batch=_integer(config, "NORM_BATCH"),
        compilation=CompileOptions(
            compile=_either(config, "COMPILE"), compile_model=by_hand, compile_blocks=False, cuda_graphs=False
        ),
        device=_device(config),
        num_devices=_integer(config, "NUM_DEVICES") or 0,
    )


def _facts(requested: Config | ForeignConfig) -> ModelFacts:
    row = MODELS.get(requested.model)
    if isinstance(requested, Config):
        has_batchnorm = requested.norm_batch is not None  # defined only for models that may have it
    else:
        has_batchnorm = MODELS[requested.model].has_batchnorm
    return ModelFacts(
        name=requested.model,
        parameters=row.parameters if row else None,
        bytes_per_sample=row.bytes_per_sample if row else None,
        train_size=None,
        has_batchnorm=has_batchnorm,
    )


def _hardware(requested: Config | ForeignConfig, *, gpu_info: GpuInfo | None) -> Hardware:
    if gpu_info is None and requested.device == "cpu":
        return probe("cpu")
    info = get_gpu_info() if gpu_info is None else gpu_info
    cpu = probe("cpu")
    if not info["has_gpu"]:
        return cpu
    # Exact, so that rounding cannot lift a value into the next tier.
    total_bytes, free_bytes = (int(Fraction(info[key]) * GB) for key in ("gpu_mem_gb", "gpu_free_gb"))
    name, capability = info["gpu_name"], info.get("gpu_capability")
    device = Device(name=name, total_bytes=total_bytes, free_bytes=free_bytes, capability=capability)
    is_amd = any(word in device.name for word in ("AMD", "Radeon", "Instinct"))
    kind: Kind = info.get("gpu_kind") or ("rocm" if is_amd else "cuda")
    return replace(cpu, kind=kind, devices=(device,) * info["gpu_count"])


def _rationale(decided: Plan, model: str, *, placement: Placement) -> str:
    free_gb, total_gb = placement.free_bytes / GB, placement.total_bytes / GB
    unit = decided.device.upper() if decided.device in ("cpu", *STATIC_SHAPES) else "GPU"
    devices, is_even = decided.layout.devices, decided.last_micro_batch == decided.micro_batch
    last = "" if is_even else f", last micro-batch {decided.last_micro_batch}"
    return (
        f"{unit}: {placement.name} ({total_gb:.1f}GB total, {free_gb:.1f}GB free) × {devices}, "
        f"model={model}, compile={'ON' if decided.compile else 'OFF'} → "
        f"batch={decided.micro_batch}, grad_acc={decided.accumulation} "
        f"(effective={decided.effective_batch}, target={decided.target}{last})"
    )


def _compile_line(decision: Decision[bool]) -> str:
    return f"Compile: {'Enabled' if decision.value else 'Disabled'} ({decision.reason})"


def _either(config: object, stem: str) -> Literal["auto", "manual"]:
    auto, manual = _truth(config, f"{stem}_AUTO"), _truth(config, f"{stem}_MANUAL")
    if auto and manual:
        raise ConfigError(f"{stem}_AUTO and {stem}_MANUAL are both set", todo="set one of them")
    return "manual" if manual else "auto"


def _device(config: object) -> DeviceName:
    requested = getattr(config, "DEVICE", None)
    if requested is None:
        return "auto"
    if requested in DEVICE_NAMES:
        return cast("DeviceName", requested)
    raise ConfigError(f"DEVICE is {requested!r}", todo=f"use one of {', '.join(DEVICE_NAMES)}")


def _truth(config: object, name: str) -> bool:
    value = getattr(config, name, None)
    if value in (True, "y", False, "n", None):
        return value in (True, "y")
    raise ConfigError(f"{name} is {value!r}", todo="use True or False (or 'y' or 'n')")


def _integer(config: object, name: str) -> int | None:
    value = getattr(config, name, None)
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise ConfigError(f"{name} is {value!r}", todo="use a whole number that is not negative")
