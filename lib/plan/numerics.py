"""Numerics of the device: compilation, precision and memory format."""

from __future__ import annotations

from lib.errors import PlanError
from lib.plan.placement import TPU, Placement
from lib.plan.tables import (
    BF16_CAPABILITY,
    BF16_ROCM_PATTERNS,
    COMPILE_CAPABILITY,
    COMPILE_DENY_LIST,
    FP16_CAPABILITY,
)
from lib.plan.types import STATIC_SHAPES, ConfigView, Decision, Hardware, Precision


def choose_compile(config: ConfigView, placement: Placement) -> Decision[bool]:
    """Choose whether to use torch.compile. Raises PlanError where it is requested and cannot work."""
    name = placement.name.upper()
    denied = next((why for pattern, why in COMPILE_DENY_LIST.items() if pattern in name), "")
    too_old = placement.capability is not None and placement.capability < COMPILE_CAPABILITY
    if placement.device.value in STATIC_SHAPES:
        return _no_compile_on_xla(config, placement)
    if (is_on := config.compilation.by_hand) is not None:
        if is_on and too_old:
            raise PlanError(
                f"CONFIG_COMPILE_MODEL=y is not possible on {placement.name}",
                why=f"torch.compile needs compute capability {_dotted(COMPILE_CAPABILITY)}",
                todo="set CONFIG_COMPILE_AUTO=y",
            )
        warning = f"; NOTE: in spite of {denied}" if denied and is_on else ""
        return Decision(is_on, f"set by hand{warning}")
    if placement.device.value == "cpu":
        why = "CPU: compiling costs a short run more than it saves; CONFIG_COMPILE_MANUAL=y allows it"
        return Decision(False, why)
    if placement.device.value == "mps":
        denied = "torch.compile is young on Apple GPUs"
    elif too_old and not denied:
        denied = f"torch.compile needs compute capability {_dotted(COMPILE_CAPABILITY)}"
    if denied:
        return Decision(False, f"GPU '{placement.name}': {denied}")
    return Decision(True, f"GPU '{placement.name}' has good torch.compile support")


def choose_channels_last(config: ConfigView, placement: Placement) -> Decision[bool]:
    """Choose the memory format of images and filters: channels_last or contiguous."""
    if config.channels_last and placement.device.value in STATIC_SHAPES:
        return Decision(False, "NOTE: XLA lays tensors out by itself, whatever CONFIG_CHANNELS_LAST says")
    return Decision(config.channels_last, f"CONFIG_CHANNELS_LAST={'y' if config.channels_last else 'n'}")


def choose_precision(config: ConfigView, placement: Placement, hardware: Hardware) -> Decision[Precision]:
    """Choose the precision of matrix products. Raises PlanError where a requested one cannot work."""
    automatic = _automatic_precision(placement, hardware)
    if config.precision == "auto":
        return automatic
    problem = precision_problem(config.precision, placement)
    if problem:
        raise PlanError(
            f"CONFIG_PRECISION_{config.precision.upper()} is not possible on {placement.name}",
            why=problem,
            todo=f"set CONFIG_PRECISION_AUTO=y, which chooses {automatic.value} here",
        )
    slow = config.precision == "bf16" and placement.device.value == "cpu" and automatic.value != "bf16"
    note = "; NOTE: slow, because the CPU has no bf16 instructions" if slow else ""
    return Decision(config.precision, f"CONFIG_PRECISION_{config.precision.upper()}=y{note}")


def precision_problem(precision: Precision, placement: Placement) -> str:
    """Return why `precision` is not available on the device; "" where it is."""
    device, capability = placement.device.value, placement.capability
    if precision == "fp16" and device in ("cpu", "mps", *STATIC_SHAPES):
        return "fp16 with loss scaling is for CUDA and ROCm GPUs"
    if precision == "bf16" and device == "cuda" and capability is not None and capability < BF16_CAPABILITY:
        return f"bf16 starts at compute capability {_dotted(BF16_CAPABILITY)}, this is {_dotted(capability)}"
    return ""


def _automatic_precision(placement: Placement, hardware: Hardware) -> Decision[Precision]:
    match placement.device.value:
        case "cuda":
            return _cuda_precision(placement.capability)
        case "rocm":
            if any(pattern in placement.name.upper() for pattern in BF16_ROCM_PATTERNS):
                return Decision("bf16", f"{placement.name} is fast at it")
            return Decision("fp32", f"{placement.name} is not among the AMD GPUs known to be fast at bf16")
        case "mps":
            return Decision("fp32", "mixed precision is unproven here on Apple GPUs")
        case "xla" | "tpu":
            if placement.name.startswith(TPU):
                return Decision("bf16", "TPUs multiply in bf16")
            return Decision("fp32", f"XLA on a {placement.name}, which is not a TPU")
        case "cpu":
            if hardware.cpu_bf16 == "none":
                return Decision("fp32", "the CPU has neither AMX nor AVX-512 bf16 instructions")
            name = {"amx": "AMX", "avx512": "AVX-512"}[hardware.cpu_bf16]
            return Decision("bf16", f"the CPU has {name} bf16 instructions")


def _cuda_precision(capability: tuple[int, int] | None) -> Decision[Precision]:
    if capability is None:
        return Decision("fp32", "the compute capability of the GPU is not known")
    have = f"compute capability {_dotted(capability)}"
    if capability >= BF16_CAPABILITY:
        return Decision("bf16", f"{have} has bf16 tensor cores")
    if capability >= FP16_CAPABILITY:
        return Decision("fp16", f"{have} has fp16 but no bf16 tensor cores: fp16 with loss scaling")
    return Decision("fp32", f"{have} has no tensor cores")


def _no_compile_on_xla(config: ConfigView, placement: Placement) -> Decision[bool]:
    own = placement.device.value == "xla"
    why = "XLA compiles whole steps by itself" if own else "torch_tpu's compiler was never tried here"
    if config.compilation.by_hand:
        what = f"CONFIG_COMPILE_MODEL=y is not possible on {placement.name}"
        raise PlanError(what, why=why, todo="set CONFIG_COMPILE_AUTO=y")
    return Decision(False, why)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
