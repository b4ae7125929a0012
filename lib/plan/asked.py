"""What planning reads of a configuration, and the shape of one decision.

`lib.config.Config` fits `Asked` as it is; `lib.hyperparams` has a second kind for
objects that are not a Config.
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
    """The fields of Config that a plan depends on, by the same names."""

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
    def device(self) -> Literal["auto", "cuda", "mps", "cpu"]: ...
    @property
    def num_devices(self) -> int: ...
    @property
    def activation_offload(self) -> bool: ...
