"""Protocol of the configuration fields that planning reads, and the type of one decision.

`lib.config.Config` satisfies `Asked`; `lib.hyperparams` has a second implementation for objects that are not
a Config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A value of the plan and the sentence that explains it."""

    value: T
    reason: str


class Asked(Protocol):
    """Fields of Config that a plan depends on, by the same names."""

    @property
    def model(self) -> str: ...
    @property
    def table_scale(self) -> float | None: ...
    @property
    def target(self) -> int: ...
    @property
    def target_effective_batch(self) -> int: ...
    @property
    def hyper_param(self) -> Literal["auto", "manual"]: ...
    @property
    def auto_method(self) -> Literal["table", "predict", "probe"] | None: ...
    @property
    def elastic_policy(self) -> Literal["planner", "latentwire"] | None: ...
    @property
    def elastic_base_batch(self) -> int | None: ...
    @property
    def elastic_target_util(self) -> int | None: ...
    @property
    def elastic_scale_batch(self) -> bool: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def gradient_accumulation(self) -> int | None: ...
    @property
    def batch_table_strict(self) -> bool: ...
    @property
    def norm_batch(self) -> int | None: ...
    @property
    def compile(self) -> Literal["auto", "manual"]: ...
    @property
    def compile_model(self) -> bool: ...
    @property
    def precision(self) -> Literal["auto", "bf16", "fp16", "fp32"]: ...
    @property
    def grad_checkpoint(self) -> Literal["none", "blocks", "all"] | None: ...
    @property
    def channels_last(self) -> bool: ...
    @property
    def device(self) -> Literal["auto", "cuda", "mps", "xla", "tpu", "cpu"]: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def dist_strategy(self) -> Literal["auto", "ddp", "zero1", "zero2", "fsdp", "hsdp", "split"]: ...
    @property
    def dist_nnodes(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def activation_offload(self) -> bool: ...


def least_effective_batch(config: Asked) -> int | None:
    """Return the smallest effective batch, that of one device; None where it depends on the hardware."""
    if config.hyper_param == "manual" and config.batch_size and config.gradient_accumulation:
        return config.batch_size * config.gradient_accumulation
    if config.batch_table_strict or config.elastic_policy == "latentwire":
        return None
    return config.target or None


def grows_with_devices(config: Asked) -> str:
    """Return the option by which the effective batch grows with the number of devices; "" where none does."""
    if config.elastic_scale_batch:
        return "CONFIG_ELASTIC_SCALE_BATCH=y"
    if config.hyper_param == "auto":
        return "CONFIG_BATCH_TABLE_STRICT=y" if config.batch_table_strict else ""
    by_hand = config.gradient_accumulation
    return f"CONFIG_GRADIENT_ACCUMULATION={by_hand}" if by_hand else ""
