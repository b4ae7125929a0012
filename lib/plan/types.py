"""Types of planning: requests (ConfigView), hardware (Hardware), models (ModelFacts), decisions (Plan)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from lib.config import Config
    from lib.plan.foreign_config import ForeignConfig

Kind: TypeAlias = Literal["cpu", "cuda", "rocm", "mps", "xla", "tpu"]
Precision: TypeAlias = Literal["bf16", "fp16", "fp32"]
Strategy: TypeAlias = Literal[
    "single", "ddp", "zero1", "zero2", "fsdp", "hsdp", "pipeline", "split", "sequential"
]
# Parts of a step that torch.compile compiles: the blocks of the model one by one, or the whole model; the
# training loss in its graph; and the update.
CompilePart: TypeAlias = Literal["blocks", "model", "loss", "update"]
ITERATED = "the model is compiled by iteration"  # why its loss is not in the graph

T = TypeVar("T")

SHARDS_WEIGHTS: frozenset[Strategy] = frozenset({"zero2", "fsdp", "hsdp"})
# Strategies whose processes have different weights, so that every forward pass is collective.
COLLECTIVE_FORWARD: frozenset[Strategy] = frozenset({"pipeline", *SHARDS_WEIGHTS})
# Strategies whose processes have different parts of the state that a checkpoint holds.
PARTS_OF_STATE: frozenset[Strategy] = frozenset({"zero1", *COLLECTIVE_FORWARD})

# Kinds whose memory holds tensors only, so that activations can be offloaded to main memory.
OWN_MEMORY: tuple[Kind, ...] = ("cuda", "rocm")

# Kinds whose programs XLA compiles for one tensor shape each: by torch_xla, and by torch_tpu.
STATIC_SHAPES: frozenset[Kind] = frozenset({"xla", "tpu"})
# Kinds without float64.
WITHOUT_DOUBLE: frozenset[Kind] = frozenset({"mps", *STATIC_SHAPES})


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """A value of the plan and the sentence that explains it."""

    value: T
    reason: str


ConfigView: TypeAlias = "Config | ForeignConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as its driver reports it. Bytes are exact; GB elsewhere is decimal (1e9)."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None  # CUDA compute capability, None elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node. For kind "cpu" there is one device: the memory this process may use.

    of_all_nodes: of several nodes, whose devices and CPUs are counted as those of one.
    per_node: devices of each node; 0: all, or DEVICES_PER_NODE where there are more.
    host_free_bytes: free main memory of a node beside GPUs; None for a machine known by name only.
    """

    kind: Kind
    devices: tuple[Device, ...]
    cpu_name: str
    cpu_count: int  # CPUs this process may use (affinity and cgroup quota)
    cpu_bf16: Literal["none", "avx512", "amx"] = "none"  # bf16 instructions of the CPU
    of_all_nodes: bool = False
    per_node: int = 0
    host_free_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hardware:
        """Make it from `to_json` data. Raises KeyError or TypeError for anything else."""
        devices = tuple(
            Device(**{**device, "capability": tuple(device["capability"]) if device["capability"] else None})
            for device in data["devices"]
        )
        return cls(**{**data, "devices": devices})


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of a model: its shape, whether it is trained, and the bytes of an element."""

    shape: tuple[int, ...]
    trainable: bool
    element_bytes: int = 4

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of a run over its processes.

    single: one process.
    ddp: each process has everything.
    zero1: each process keeps the optimizer state of some weights.
    zero2: weights, gradients and state are sharded over `shard` processes; weights are gathered once per
        micro-batch.
    fsdp: as zero2, but weights are gathered unit by unit, in forward and again in backward.
    hsdp: as fsdp within groups of `shard` processes, which are replicas as with ddp.
    pipeline: each process is a stage, which has some consecutive blocks of the model. `shard` consecutive
        processes compute the same micro-batches, one after the other; such pipelines are replicas.
    split: each process has several devices with one of two frozen models on each, and the trained model on
        the first. Devices with the same model divide the samples of a micro-batch. Processes are replicas as
        with ddp.
    sequential: frozen models wait in main memory, and one at a time is copied to the device of a process.
        Processes are replicas as with ddp.
    """

    strategy: Strategy
    world: int
    shard: int  # processes that hold one replica: 1, or `world`, or for hsdp and pipeline a divisor of it
    branch_devices: tuple[int, ...] = ()  # of a split: devices with the first frozen model, and the second

    def __post_init__(self) -> None:
        alone = self.strategy in ("split", "sequential") or (self.strategy == "single") == (self.world == 1)
        parts = (self.shard > 1) == (self.strategy in COLLECTIVE_FORWARD)
        counts, is_split = self.branch_devices, self.strategy == "split"
        branches = len(counts) == 2 * is_split and all(type(each) is int and each > 0 for each in counts)
        if not alone or not parts or not branches or self.shard < 1 or self.world % self.shard:
            by = f", branches on {self.branch_devices}" if self.branch_devices or not branches else ""
            raise ValueError(f"{self.strategy} on {self.world} in shards of {self.shard}{by}")

    @property
    def devices_per_process(self) -> int:
        """Devices of each process."""
        return sum(self.branch_devices) or 1

    @property
    def replicas(self) -> int:
        """Shares of the samples of a step: of processes, or of pipelines, whose stages compute the same."""
        return self.world // self.shard if self.strategy == "pipeline" else self.world

    def replica_of(self, rank: int) -> int:
        """Return the number of the share of a process."""
        return rank * self.replicas // self.world

    @property
    def devices(self) -> int:
        """Devices of all processes."""
        return self.world * self.devices_per_process

    @property
    def replica(self) -> Layout:
        """Layout of one process without the others."""
        own: Strategy = self.strategy if self.strategy in ("split", "sequential") else "single"
        return Layout(strategy=own, world=1, shard=1, branch_devices=self.branch_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A frozen model through which the trained one gets its loss."""

    flop_per_sample: float  # forward, and backward to its input
    parameters: int
    bytes_per_sample: int = 0  # activations saved for backward, fp32, one sample

    def weight_bytes(self, precision: Precision) -> int:
        """Return the bytes of its weights, which are in the type of products."""
        return self.parameters * (4 if precision == "fp32" else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """A model that can be a pipeline: blocks, which are all but the first of `ModelFacts.units`, and ends."""

    first: tuple[Weight, ...]  # before the blocks
    last: tuple[Weight, ...]  # after them
    tied: int  # elements of weights that are in both ends
    bytes_per_sample: int  # what a stage sends to the next, fp32, one sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the model and the data. None: unknown, and nothing is decided from it."""

    name: str
    parameters: int | None
    bytes_per_sample: int | None  # activations saved for backward, fp32, one sample
    train_size: int | None  # samples of one epoch
    has_batchnorm: bool
    # Trainable and frozen weights by FSDP unit; the first is the root unit, of weights that are in no other.
    units: tuple[tuple[Weight, ...], ...] | None = None
    flop_per_sample: float | None = None  # of training: forward and backward
    stages: StageFacts | None = None  # None: the model cannot be a pipeline
    # Two frozen models that are independent of each other; the fields above do not include them.
    branches: tuple[Branch, Branch] | None = None
    layers: str = ""  # what was converted, of a model with layers of other packages; "" for nothing
    inexact: tuple[str, ...] = ()  # modules whose results depend on the split into micro-batches
    loss_apart: str | None = None  # why the training loss is not compiled with the model; "" where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Predicted memory of one device at the peak of a step, and what is available, in bytes.

    parts: tensors at the peak, by category.
    gaps_bytes: lost between the segments of a caching allocator.
    reserve_bytes: margin of the prediction, and context and libraries of a GPU.
    usable_bytes: part of the free memory that a run may take: on a CPU other programs need some.
    """

    parts: Mapping[str, int]
    reserve_bytes: int
    usable_bytes: int
    gaps_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors at the peak."""
        return sum(self.parts.values())

    @property
    def need_bytes(self) -> int:
        """Bytes of tensors, gaps and reserve."""
        return self.peak_bytes + self.gaps_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        """True if the need is at most the usable memory."""
        return self.need_bytes <= self.usable_bytes


def rank_shares(samples: int, *, world: int, unit: int = 1) -> tuple[int, ...]:
    """Share `samples` among `world` processes in multiples of `unit`: as equal as possible, larger first."""
    each, more = divmod(samples // unit, world)
    return (unit * (each + 1),) * more + (unit * each,) * (world - more)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decisions for this hardware, validated at construction.

    Each process runs `accumulation` micro-batches per optimizer step. The first has the largest share of the
    effective batch: micro-batches of `micro_batch` samples except the last, of `last_micro_batch`. Shares of
    other processes may be smaller (`shares`). Raises ValueError where the fields contradict each other.
    """

    device: Kind
    world: int  # processes; each has one device, or several of a split
    strategy: Strategy
    shard: int  # processes that hold one replica of the weights
    branch_devices: tuple[int, ...]  # as of Layout
    micro_batch: int
    accumulation: int
    last_micro_batch: int
    effective_batch: int
    target: int
    norm_batch: int  # 0: batch normalisation over the micro-batch
    precision: Precision
    channels_last: bool
    compile: bool
    compile_parts: tuple[CompilePart, ...]  # () where nothing is compiled
    cuda_graphs: bool  # kernels of the model and the loss are launched as CUDA graphs
    memory: Memory | None  # of one device; None where it was not predicted
    reasons: Mapping[str, str]  # one sentence for each of the fields above

    def __post_init__(self) -> None:
        # A plan from a file may hold anything. Making the layout checks strategy, world and shard.
        largest = self.micro_batch * (self.accumulation - 1) + self.last_micro_batch
        whole = self.layout.replicas * (self.norm_batch or 1) <= self.effective_batch == sum(self.shares)
        adds_up = whole and self.shares[0] == largest
        if not adds_up or self.accumulation < 1 or not 1 <= self.last_micro_batch <= self.micro_batch:
            raise ValueError("micro-batches do not add up")
        if self.compile_parts and not self.compile:
            raise ValueError("parts of a step are compiled, and it is not")
        if self.cuda_graphs and ("loss" not in self.compile_parts or self.world * self.accumulation > 1):
            raise ValueError("CUDA graphs need one micro-batch on one device, compiled with its loss")
        missing = {field.name for field in fields(self)} - {"reasons"} - set(self.reasons)
        if missing:
            raise ValueError(f"no reason given for {sorted(missing)}")

    @cached_property  # read several times a step, as those below
    def layout(self) -> Layout:
        """Layout over processes."""
        return Layout(
            strategy=self.strategy, world=self.world, shard=self.shard, branch_devices=self.branch_devices
        )

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Samples of each replica in one optimizer step."""
        return rank_shares(self.effective_batch, world=self.layout.replicas, unit=self.norm_batch or 1)

    @cached_property
    def is_padded(self) -> bool:
        """True if some micro-batch of some process has rows of weight 0."""
        return any(rows != sizes for rows, sizes in map(self.micro_batches_of, (0, self.layout.replicas - 1)))

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Samples of each micro-batch of the first process."""
        return (self.micro_batch,) * (self.accumulation - 1) + (self.last_micro_batch,)

    def micro_batches_of(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rows of the micro-batches of a replica, and how many of these rows are samples.

        The rows after those have weight 0. They are there because all processes run as many micro-batches,
        and because compiled programs, and what stages of a pipeline receive, are for one shape.
        """
        unit, sizes = self.norm_batch or 1, [*self.micro_batches]
        if self.shares[rank] < self.shares[0]:
            shorter = max((place for place, size in enumerate(sizes) if size > unit), default=-1)
            sizes[shorter] -= unit
        one_shape = self.compile or self.device in STATIC_SHAPES or self.strategy == "pipeline"
        rows = (self.micro_batch if one_shape else max(size, unit) for size in sizes)
        return tuple(rows), tuple(sizes)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Make a plan from `to_json` data. Raises KeyError, TypeError or ValueError for anything else."""
        memory = Memory(**data["memory"]) if data["memory"] is not None else None
        earlier: dict[str, Any] = {}
        if "strategy" not in data:  # stored by a version that knew only ddp
            earlier = {"strategy": "ddp" if data["world"] > 1 else "single", "shard": 1}
        if "branch_devices" not in data:  # that split over two devices only
            earlier["branch_devices"] = (1, 1) if data.get("strategy") == "split" else ()
        if "compile_parts" not in data:  # that compiled the model only
            earlier["compile_parts"] = ("model",) if data["compile"] else ()
        if "cuda_graphs" not in data:
            earlier["cuda_graphs"] = False
        why = dict.fromkeys(earlier, "all there was in the version that made this plan")
        data = {**data, **earlier, "reasons": {**data["reasons"], **why}}
        lists = {name: tuple(data[name]) for name in ("branch_devices", "compile_parts")}
        return cls(**{**data, "memory": memory, **lists})


def fixed_plan(reason: str, *, micro_batch: int, accumulation: int = 1, **given: Any) -> Plan:
    """Return a plan that was not computed: of one process on the CPU in fp32, but for `given`."""
    world = given.get("world", 1)
    effective = micro_batch * accumulation * world
    batch = {"micro_batch": micro_batch, "accumulation": accumulation, "last_micro_batch": micro_batch}
    batch |= {"effective_batch": effective, "target": effective, "norm_batch": 0}
    layout = {"world": 1, "strategy": "ddp" if world > 1 else "single", "shard": 1, "branch_devices": ()}
    numerics = {"device": "cpu", "precision": "fp32", "channels_last": False, "compile": False}
    numerics |= {"compile_parts": ("model",) if given.get("compile") else (), "cuda_graphs": False}
    given = {**batch, **layout, **numerics, "memory": None, **given}
    return Plan(**given, reasons=dict.fromkeys(given, reason))


def least_effective_batch(config: ConfigView) -> int | None:
    """Return the smallest effective batch, that of one device; None where it depends on the hardware."""
    if config.hyper_param == "manual" and config.batch_size and config.gradient_accumulation:
        return config.batch_size * config.gradient_accumulation
    if config.batch_table_strict or config.elastic_policy == "latentwire":
        return None
    return config.target or None
