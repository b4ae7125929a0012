"""Configurations that can be planned, and the type of one decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from lib.config import Config

T = TypeVar("T")
DeviceName: TypeAlias = Literal["auto", "cuda", "mps", "cpu"]


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A value of the plan and the sentence that explains it."""

    value: T
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    """Fields of Config that a plan depends on, taken from an object that is no Config."""

    model: str
    table_scale: float | None
    recommended_target: int
    target_effective_batch: int
    hyper_param: Literal["auto", "manual"]
    auto_method: Literal["table"] = "table"  # a foreign object has no model whose memory could be predicted
    elastic_policy: Literal["planner"] = "planner"
    elastic_base_batch: None = None
    elastic_target_util: None = None
    elastic_scale_batch: bool = False
    batch_size: int | None
    gradient_accumulation: int | None
    batch_table_strict: bool
    norm_batch: int | None
    compile: Literal["auto", "manual"]
    compile_model: bool
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    grad_checkpoint: Literal["none", "blocks", "all"] | None = None
    channels_last: bool = False
    activation_offload: bool = False
    device: DeviceName
    num_devices: int
    dist_strategy: Literal["auto"] = "auto"
    dist_nnodes: str = "1"
    optimizer: str = ""  # unknown; only strategies that shard weights depend on it

    @property
    def target(self) -> int:
        """Effective batch to plan for."""
        return self.target_effective_batch or self.recommended_target


ConfigView: TypeAlias = Config | ForeignConfig


def least_effective_batch(config: ConfigView) -> int | None:
    """Return the smallest effective batch, that of one device; None where it depends on the hardware."""
    if config.hyper_param == "manual" and config.batch_size and config.gradient_accumulation:
        return config.batch_size * config.gradient_accumulation
    if config.batch_table_strict or config.elastic_policy == "latentwire":
        return None
    return config.target or None


def grows_with_devices(config: ConfigView) -> str:
    """Return the option by which the effective batch grows with the number of devices; "" where none does."""
    if config.elastic_scale_batch:
        return "CONFIG_ELASTIC_SCALE_BATCH=y"
    if config.hyper_param == "auto":
        return "CONFIG_BATCH_TABLE_STRICT=y" if config.batch_table_strict else ""
    by_hand = config.gradient_accumulation
    return f"CONFIG_GRADIENT_ACCUMULATION={by_hand}" if by_hand else ""
