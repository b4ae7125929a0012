"""Settings of an object that is no configuration of the toolkit, as far as a plan depends on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lib.config import CompileOptions

DeviceName: TypeAlias = Literal["auto", "cuda", "mps", "cpu"]


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
    compilation: CompileOptions
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    grad_checkpoint: Literal["none", "blocks", "all"] | None = None
    channels_last: bool = False
    activation_offload: bool = False
    device: DeviceName
    num_devices: int
    dist_strategy: Literal["auto"] = "auto"
    dist_nnodes: str = "1"
    optimizer: str = ""  # unknown; only strategies that shard weights depend on it
    adam_8bit: bool = False
    weights: None = None

    @property
    def target(self) -> int:
        """Effective batch to plan for."""
        return self.target_effective_batch or self.recommended_target
