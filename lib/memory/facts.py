"""Model facts for the planner, computed on the meta device: no data, no memory, no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from lib.distributed.fsdp import weight_units
from lib.memory.live import LiveBytes
from lib.plan.types import ModelFacts

ROWS = (2, 960)  # batch sizes to try: some models take only multiples of a number


class Shape(Protocol):
    """Input of a model. (Every `lib.data.types.Spec` is one.)"""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    @property
    def input_dtype(self) -> Literal["float32", "int64"]:
        """Type of its elements."""


def model_facts(
    build: Callable[[], nn.Module], shape: Shape, *, name: str, train_size: int, rows: int = ROWS[0]
) -> ModelFacts:
    """Return parameters, saved bytes per extra sample in fp32, and the FLOP of training on one sample.

    build: makes the model on torch's default device, which is "meta" while it is called.
    rows: of the smaller of the two batches that it is given.
    """
    with torch.device("meta"):
        model = build()
        dtype = getattr(torch, shape.input_dtype)
        inputs = [torch.empty(count, *shape.input_shape, dtype=dtype) for count in (rows, 2 * rows)]
    # What does not grow with the batch (weights, statistics) is equal in both and cancels.
    few_bytes, many_bytes = (saved_bytes(model, batch) for batch in inputs)
    flop = _training_flop(model, inputs[0])
    stages = None
    if hasattr(model, "pipeline_stages"):
        from lib.distributed.staged_model import stage_facts  # most models do without it

        stages = stage_facts(model, shape.input_shape)
    return ModelFacts(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        bytes_per_sample=(many_bytes - few_bytes) // rows,
        train_size=train_size,
        # A frozen one stays in evaluation mode, and needs no groups.
        has_batchnorm=any(isinstance(module, _BatchNorm) and module.training for module in model.modules()),
        units=weight_units(model),
        flop_per_sample=flop / rows,
        stages=stages,
    )


def saved_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Return the bytes of the distinct storages that a forward pass saves for backward.

    Parameters and buffers are not counted, as they exist anyway. Inputs are, where they are saved.
    """
    own = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    saved: list[Tensor] = []  # kept alive while counting, so that no storage is reused
    with torch.autograd.graph.saved_tensors_hooks(saved.append, _no_backward):
        model.train()(inputs)
    sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(size for storage, size in sizes.items() if storage not in own)


def _training_flop(model: nn.Module, inputs: Tensor) -> int:
    """FLOP of matrix products, convolutions and attention in a forward and backward pass.

    Counted, because a backward pass is not always twice the forward pass: parts may run without gradients.
    """
    live = LiveBytes()
    with live:
        outputs = [one for one in tree_leaves(model.train()(inputs)) if one.requires_grad]
        torch.autograd.backward(outputs, [torch.empty_like(one) for one in outputs])
    return live.flop


def _storage(tensor: Tensor) -> StorageWeakRef:
    # Tensors on the meta device all have the address 0; the storage object tells them apart.
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _no_backward(_: None) -> Tensor:
    raise AssertionError("a forward pass that is only measured has no backward pass")
