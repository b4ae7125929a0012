"""Typed configuration: a frozen view of a resolved Kconfig configuration.

The only place that maps Kconfig symbols to Python: the field ``optim.learning_rate`` is the symbol
``LEARNING_RATE``. Kconfig owns every default, range and help text; there is none here. A field typed ``X |
None`` belongs to a symbol that is hidden when its dependencies are not met, and is then ``None``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lib.errors import ConfigError
from lib.kconf.values import Value
from lib.plugin_folders import definitions_in
from lib.plugins import DATASETS, MODELS, TASKS, task_of

_SELECTS_TEXT = re.compile(r"^\s*select\s+MODEL_DATA_TEXT\b", re.MULTILINE)
OF_PLUG_INS = ("model_options", "task_options", "data_options")  # fields that hold the symbols of a plug-in


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimOptions:
    """Settings of the optimizer, of gradient clipping and of the exponential moving average."""

    learning_rate: float
    lr_scaling: Literal["none", "sqrt", "linear"]
    lr_base_batch: int | None  # None without scaling
    muon_learning_rate: float | None
    sign_learning_rate: float | None
    weight_decay: float
    layer_decay: float  # 1: every layer has the same learning rate
    momentum: float | None
    nesterov: bool
    adam_beta1: float | None
    adam_beta2: float | None
    adam_eps: float | None
    grad_clip: float
    ema: bool
    ema_decay: float | None
    ema_base_batch: int | None  # None where the decay is not scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class LrScheduleOptions:
    """Settings of the learning rate's course: warmup, then decay."""

    schedule: Literal["constant", "cosine", "step", "one_cycle"]
    warmup_unit: Literal["percent", "steps", "samples"]
    warmup_pct: int | None  # of the three only the one that the unit names is set
    warmup_steps: int | None
    warmup_samples: int | None
    warmup_start_ratio: float
    lr_min_ratio: float | None
    lr_step_pct_list: tuple[int, ...] | None
    lr_step_gamma: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Settings of checkpoints: when one is saved, which are kept, where they are copied to."""

    checkpoint_interval_steps: int
    checkpoint_seconds: int
    checkpoint_async: bool
    checkpoint_async_mb: int | None  # of state, above which they are asynchronous; None: all are
    checkpoint_format: Literal["auto", "full", "sharded"]
    keep_last: int
    keep_best: bool
    checkpoint_carry: bool
    checkpoint_url: str  # "" where checkpoints are not copied


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Stages of a pipeline, the network, restarts, the rendezvous endpoint and what a SLURM job asks for."""

    dist_stages: int | None  # 0: the plan chooses; None: no pipeline was asked for
    dist_network_gbit: float  # between nodes, of each device
    dist_max_restarts: int
    dist_endpoint: str | None  # None, as "": for one node
    slurm_time: str | None  # None, as "": left to the site
    slurm_partition: str | None
    slurm_gpus_per_node: int
    slurm_cpus_per_node: int
    slurm_grace_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """Weights that training starts from, and those that are trained. Blanks separate patterns."""

    initial_weights: str  # "" for random ones
    weights_dir: str
    initial_weights_allow: str
    reset_head: bool
    adapt: Literal["full", "lora", "qlora"]
    lora_rank: int | None  # None, as all of lora_*, where all weights are trained
    lora_alpha: int | None
    lora_dropout: float | None
    lora_targets: str | None
    lora_train: str | None
    freeze: str | None  # None where adapters are trained


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Metric loggers besides metrics.jsonl."""

    sink_tensorboard: bool
    sink_wandb: bool
    sink_trackio: bool
    sink_project: str | None  # None for loggers without projects


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Settings of what an evaluation reports, of the best one, and of early stopping."""

    metrics: str
    eval_rows_max: int
    best_metric: str  # "" for the score of the task
    early_stop_evals: int
    early_stop_delta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentOptions:
    """Further augmentations of images, each off at a falsy value."""

    augment_crop_pct: int | None  # None without a random resized crop
    augment_crop_ratio: float | None
    augment_flip_horizontal: bool
    augment_flip_vertical: bool
    augment_brightness: float | None  # None for data without images, as the following
    augment_contrast: float | None
    augment_saturation: float | None
    augment_hue: float | None
    augment_erase_pct: int | None
    augment_mixup_alpha: float | None
    augment_cutmix_alpha: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Settings of torch.compile."""

    compile: Literal["auto", "manual"]
    compile_model: bool
    compile_blocks: bool
    cuda_graphs: bool

    @property
    def by_hand(self) -> bool | None:
        """Return whether to compile the model; None where the plan chooses."""
        return None if self.compile == "auto" else self.compile_model


GROUPS: dict[str, type] = {  # fields that hold symbols by the same rule as Config itself
    "optim": OptimOptions,
    "lr_schedule": LrScheduleOptions,
    "checkpoints": CheckpointOptions,
    "launch": LaunchOptions,
    "weights": WeightOptions,
    "sinks": SinkOptions,
    "evaluation": EvaluationOptions,
    "augmentation": AugmentOptions,
    "compilation": CompileOptions,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting that a run may depend on, and no facts of the machine that it runs on."""

    # Model and task
    model: str
    task: str  # name of a folder of train/tasks: the chosen one, or the TASK of the model's file
    table_scale: float | None  # None where the model's Kconfig gives none
    recommended_target: int | None
    model_options: Mapping[str, Value]  # the symbols of the model's own Kconfig, as fields of its Options
    task_options: Mapping[str, Value]  # likewise those of the task

    # Data
    dataset: str
    data_options: Mapping[str, Value]  # the symbols of the data set's own Kconfig
    data_dir: str | None  # None for a generated data set
    data_download: bool
    data_limit: int
    holdout: int
    image_size: int | None
    block_size: int | None  # None for images
    tokenizer: Literal["byte", "char", "gpt2", "huggingface"] | None  # None for images and ready-made tokens
    tokenizer_dir: str | None  # None but for the last one
    # None for texts
    augment: Literal["none", "shift", "crop_flip", "crop_alternate", "resized_crop", "symmetries"] | None
    augmentation: AugmentOptions
    augment_pad: int | None  # 0: an eighth of the image's side
    augment_ahead: bool
    trm_augment_fixed: int | None  # None where puzzles are not augmented
    data_placement: Literal["auto", "resident", "stream"]
    num_workers: int | None
    prefetch: int | None

    # Batch size, precision, compilation and parallelism
    tier: Literal["none", "auto", "0", "1", "2", "3", "4"]
    hyper_param: Literal["auto", "manual"]
    auto_method: Literal["table", "predict", "probe"] | None
    elastic_policy: Literal["planner", "latentwire"] | None
    elastic_base_batch: int | None
    elastic_target_util: int | None
    elastic_scale_batch: bool
    target_effective_batch: int
    batch_size: int | None
    gradient_accumulation: int | None
    batch_table_strict: bool
    norm_batch: int | None
    norm_momentum: float | None
    compilation: CompileOptions
    precision: Literal["auto", "bf16", "fp16", "fp32"]
    channels_last: bool
    device: Literal["auto", "cuda", "mps", "xla", "tpu", "cpu"]
    num_devices: int
    dist_strategy: Literal["auto", "ddp", "zero1", "zero2", "fsdp", "hsdp", "pipeline", "split", "sequential"]
    dist_nnodes: str
    launch: LaunchOptions

    # Memory
    grad_checkpoint: Literal["none", "blocks", "all"] | None  # None for models without blocks
    activation_offload: bool
    chunked_cross_entropy: bool

    # Optimizer and loss
    optimizer: Literal["sgd", "adam", "adamw", "muon", "adam_atan2"]
    adam_8bit: bool
    label_smoothing: float
    class_weights: str  # "", "balanced" or numbers
    optim: OptimOptions
    lr_schedule: LrScheduleOptions

    # Run and checkpoints
    budget: Literal["epochs", "steps", "seconds"]
    num_epochs: int | None
    max_steps: int | None
    max_seconds: int | None
    eval_interval_steps: int
    evaluation: EvaluationOptions
    log_interval_steps: int
    log_seconds: int
    weights: WeightOptions
    seed: int
    deterministic: bool
    oom_retry: bool
    checkpoints: CheckpointOptions
    sinks: SinkOptions
    resume: Literal["auto", "never"]

    @property
    def target(self) -> int:
        """Target effective batch: TARGET_EFFECTIVE_BATCH, the model's recommendation, or 0."""
        return self.target_effective_batch or self.recommended_target or 0

    def replace(self, **changes: Any) -> Config:
        """Return a copy with other values, given by the names of fields or of fields of the groups."""
        for name, group in GROUPS.items():
            own = {field.name for field in dataclasses.fields(group)} & changes.keys()
            if own:
                changes[name] = dataclasses.replace(
                    changes.get(name, getattr(self, name)), **{field: changes.pop(field) for field in own}
                )
        return dataclasses.replace(self, **changes)


def config_from_values(values: Mapping[str, Value]) -> Config:
    """Build the typed view from symbol values (bool, int, float, str, tuple; None = hidden).

    Raises ConfigError where there is no such model, where a symbol or a data set has no value, and for what
    Kconfig, which compares neither fractions nor texts, lets through: Nesterov without momentum, and
    options on initial weights without any.
    """
    model = values.get("MODEL")
    if not isinstance(model, str) or not model:
        raise ConfigError("no model is selected", todo="use make menuconfig or make defconfig-NAME")
    if not values["DATASET"]:
        todo = "give CONFIG_DATASET the name in its Kconfig, as make new-data does"
        raise ConfigError("the data set that is selected has no name", todo=todo)
    if values["NESTEROV"] and values["MOMENTUM"] == 0:
        raise ConfigError(
            "CONFIG_NESTEROV=y needs a momentum above 0, and CONFIG_MOMENTUM is 0",
            todo="raise CONFIG_MOMENTUM or set CONFIG_NESTEROV=n",
        )
    task = task_of(model)
    if task == "lm" and not values.get("MODEL_DATA_TEXT") and not _may_select_text(model):
        # With labels language models classify: a model of something else would, without a word.
        what = f'{MODELS.place(model)}/model.py: TASK = "lm" is for models of texts'
        why = "its Kconfig does not select MODEL_DATA_TEXT"
        raise ConfigError(what, why=why, todo='write TASK = "classify", or select it')
    if task in ("classify", "lm"):  # models that can learn another one: the choice or the data tell it
        task = str(values["TASK"] or task)
    options = {
        "model_options": MODELS.own(model, values),
        "data_options": DATASETS.own(str(values["DATASET"]), values),
        "task_options": TASKS.own(task, values) if task else {},  # to load such a model is refused
    }
    for name in ("RESET_HEAD", "INITIAL_WEIGHTS_ALLOW", "WEIGHTS_DIR"):
        may = name == "RESET_HEAD" and options["model_options"].get("dir")  # which may have weights
        if values[name] and not values["INITIAL_WEIGHTS"] and not may:
            todo = "set CONFIG_INITIAL_WEIGHTS, too"
            raise ConfigError(f"CONFIG_{name} has no effect without initial weights", todo=todo)
    groups = {name: group(**_settings(group, values)) for name, group in GROUPS.items()}
    return Config(**_settings(Config, {**values, "TASK": task}), **groups, **options)  # type: ignore[arg-type]


def _may_select_text(model: str) -> bool:
    """Return True if an option in the Kconfig of `model` selects texts as its data."""
    files = MODELS.home(model).rglob("*[Kk]config*")  # also those that its Kconfig sources
    shown = (file for file in files if not file.name.startswith("."))  # not those of editors
    return any(_SELECTS_TEXT.search(body) for file in shown for _, body in definitions_in(file))


def flat(config: Config) -> dict[str, Any]:
    """Return the fields of `config` with those of its groups in place of the groups."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name in GROUPS:
        group = fields.pop(name)
        fields |= {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    return fields


def _settings(kind: type, values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values of the fields of `kind`, each of the symbol of its name."""
    optional, settings = _optional(kind), {}
    for field in dataclasses.fields(kind):
        if field.name in GROUPS or field.name in OF_PLUG_INS:
            continue
        settings[field.name] = values[field.name.upper()]
        if settings[field.name] is None and field.name not in optional:
            needs = f"model {values['MODEL']} and its data need one"
            raise ConfigError(f"CONFIG_{field.name.upper()} has no value", why=needs)
    return settings


@functools.cache  # it evaluates every annotation of the class
def _optional(kind: type) -> frozenset[str]:
    """Return the fields of `kind` that may be None."""
    hints = typing.get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if type(None) in typing.get_args(hint))
