"""Batch normalisation whose mathematics does not depend on how a batch is split into micro-batches.

Plain batch normalisation takes its statistics over the rows of one micro-batch, so another
micro-batch size or number of devices is another network. Here the statistics are taken over
ghost batches: consecutive groups of `norm_batch` rows (Hoffer et al. 2017, "Train longer,
generalize better"). The running statistics move once per optimizer step, to the mean over all
groups of the step on all devices.

Models use the layers of torch.nn, or layers derived from them; `configure_norm` converts them to these where
there are groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lib.errors import ConfigError


class FrozenNorm(_BatchNorm):
    """Batch normalisation by its stored statistics, which never move (`lib.nn.freezing`)."""

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in evaluation mode."""
        return super().train(False)


class _Ghost(_BatchNorm):
    """Batch normalisation over ghost batches of `norm_batch` rows (0: over all rows).

    In training with `norm_batch` > 0 the sums of the groups' means and unbiased variances are
    kept in buffers that are not part of the state, until `commit_statistics` is called. Every
    process keeps sums of its own: wrap with DistributedDataParallel(broadcast_buffers=False).
    """

    norm_batch: int
    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    pending_3C: Tensor  # sums over groups of: the mean, the unbiased variance, one
    samples: int | None = None  # of the batch, where tokens may be folded into rows; None: rows are samples
    weights_G: Tensor | None = None  # 1 for a group, 0 for one of padding; None: all 1

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...) to the same shape and memory format.

        Raises ValueError in training if N is not a multiple of `norm_batch`.
        """
        if self.norm_batch == 0 or not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        rows, group = input.shape[0], self.norm_batch
        samples = self.samples if self.samples and rows % self.samples == 0 else rows
        if samples % group:
            raise ValueError(f"{samples} rows cannot be split into ghost batches of {group}")
        if samples == group:
            return self._normalise_group(input, 0)
        if torch.compiler.is_compiling() and samples == rows:
            return self._normalise_groups_at_once(input)
        # Reading views and copying once at the end is faster in eager mode than the
        # broadcast below, and a group's result is bit-identical whatever other groups are in the batch.
        groups = enumerate(torch.split(input, rows // samples * group))
        return torch.cat([self._normalise_group(each, place) for place, each in groups])

    def extra_repr(self) -> str:
        described: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{described}, norm_batch={self.norm_batch}"

    def _normalise_group(self, x_gC: Tensor, place: int) -> Tensor:
        # With momentum 1 the kernel writes the mean and unbiased variance that it computes
        # anyway into the given running statistics: no second pass over the data.
        mean_C, var_C, one_C = statistics_3C = torch.zeros_like(self.pending_3C)
        one_C.fill_(1)  # before the call, which saves the other two rows for backward
        y_gC = F.batch_norm(x_gC, mean_C, var_C, self.weight, self.bias, True, 1.0, self.eps)
        weighted_3C = statistics_3C if self.weights_G is None else statistics_3C * self.weights_G[place]
        self.pending_3C.add_(weighted_3C)
        return y_gC

    def _normalise_groups_at_once(self, x_NC: Tensor) -> Tensor:
        # A compiler fuses this into kernels whose number does not grow with the number of groups.
        x_GgC = x_NC.view(-1, self.norm_batch, *x_NC.shape[1:]).to(self.pending_3C.dtype)
        places = range(3, x_GgC.dim())  # spatial dimensions
        var_G1C, mean_G1C = torch.var_mean(x_GgC, dim=(1, *places), correction=0, keepdim=True)
        scale_G1C = torch.rsqrt(var_G1C + self.eps)
        if self.affine:
            shape = (-1, *(1 for _ in places))
            y_GgC = (x_GgC - mean_G1C) * (scale_G1C * self.weight.view(shape)) + self.bias.view(shape)
        else:
            y_GgC = (x_GgC - mean_G1C) * scale_G1C
        count = x_GgC[0, :, 0].numel()  # values of one group and channel
        mean_GC, var_GC = mean_G1C.detach().flatten(1), var_G1C.detach().flatten(1)
        statistics_3GC = torch.stack([mean_GC, var_GC * (count / (count - 1)), torch.ones_like(mean_GC)])
        if self.weights_G is not None:
            statistics_3GC = statistics_3GC * self.weights_G[:, None]
        self.pending_3C.add_(statistics_3GC.sum(dim=1))
        return y_GgC.flatten(0, 1).to(x_NC.dtype)


class _DerivedGhost(_Ghost):
    """Mix-in for a layer with a forward pass of its own, which runs once per group."""

    def _normalise_group(self, x_gC: Tensor, place: int) -> Tensor:
        statistics_3C = torch.zeros_like(self.pending_3C)
        statistics_3C[2].fill_(1)
        own, momentum = dict(self._buffers), self.momentum
        given = {"running_mean": statistics_3C[0], "running_var": statistics_3C[1]}
        self._buffers |= {**given, "num_batches_tracked": self.num_batches_tracked.clone()}
        self.momentum = 1.0
        try:
            y_gC: Tensor = super(_Ghost, self).forward(x_gC)  # of the class that was derived from torch's
        finally:
            self._buffers |= own
            self.momentum = momentum
        weighted_3C = statistics_3C if self.weights_G is None else statistics_3C * self.weights_G[place]
        self.pending_3C.add_(weighted_3C)
        return y_gC

    def _normalise_groups_at_once(self, x_NC: Tensor) -> Tensor:
        groups = enumerate(torch.split(x_NC, self.norm_batch))
        return torch.cat([self._normalise_group(group, place) for place, group in groups])


class GhostBatchNorm1d(_Ghost, nn.BatchNorm1d):
    """Ghost batch normalisation of (N, C) or (N, C, L)."""


class GhostBatchNorm2d(_Ghost, nn.BatchNorm2d):
    """Ghost batch normalisation of (N, C, H, W)."""


class GhostBatchNorm3d(_Ghost, nn.BatchNorm3d):
    """Ghost batch normalisation of (N, C, D, H, W)."""


_GHOSTS: dict[type[nn.Module], type[_Ghost]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}
_OF_SAMPLES = {
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    GhostBatchNorm2d,
    GhostBatchNorm3d,
}  # of these rows are samples


def configure_norm(model: nn.Module, *, norm_batch: int, momentum: float | None) -> int:
    """Set groups of `norm_batch` samples in every batch normalisation of `model` (0: plain).

    Layers of torch.nn, and those derived from them, become ghost ones in place: weights, buffers and their
    names in the state stay. Where not all are torch's BatchNorm2d or 3d, rows may be tokens: a group then has
    as many rows as its samples have. momentum: of the running statistics; None keeps that of the layers.
    Returns the number of layers with groups. Raises ConfigError if a layer does not support them.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, FrozenNorm)
    }
    folded = not {*map(type, found.values())} <= _OF_SAMPLES
    for name, module in found.items():
        if momentum is not None:
            module.momentum = momentum
        if norm_batch and not isinstance(module, _Ghost):
            _convert(module, name=name, norm_batch=norm_batch)
        if isinstance(module, _Ghost):
            module.norm_batch = norm_batch
    if folded and norm_batch:
        layers = _ghost_layers(model)

        def count_samples(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            for layer in layers:
                layer.samples = len(inputs[0])

        model.register_forward_pre_hook(count_samples)
    return len(found) if norm_batch else 0


def _convert(module: _BatchNorm, *, name: str, norm_batch: int) -> None:
    kind = type(module)
    derived = isinstance(module, tuple(_GHOSTS)) and "forward" not in vars(module)
    if not derived or module.running_mean is None:
        layer = f"{name} of the model is a {kind.__name__}"
        raise ConfigError(
            f"CONFIG_NORM_BATCH={norm_batch} is not possible",
            why=f"{layer} with track_running_stats=False" if derived else f"{layer}, which has no groups",
            todo="use BatchNorm1d, 2d or 3d of torch.nn with running statistics, or set CONFIG_NORM_BATCH=0",
        )
    # The class is changed in place, because other references to the module must stay valid.
    module.__class__ = _GHOSTS.get(kind) or type(f"Ghost{kind.__name__}", (_DerivedGhost, kind), {})
    sums = module.running_mean.new_zeros(3, module.num_features)
    module.register_buffer("pending_3C", sums, persistent=False)


def weigh_groups(model: nn.Module, weights_N: Tensor) -> None:
    """Leave groups of padding, whose rows have weight 0, out of the statistics of the next micro-batch.

    weights_N: of its rows, alike in each group. They hold until the end of the step.
    """
    for layer in _ghost_layers(model):
        layer.weights_G = weights_N[:: layer.norm_batch].to(layer.pending_3C.dtype)


@torch.no_grad()
def commit_statistics(model: nn.Module, all_reduce: Callable[[Tensor], None] | None = None) -> None:
    """Update the running statistics from the groups since the last call. Once per optimizer step.

    The target is the mean over all groups of the step, of all devices. `all_reduce` sums a flat
    tensor over the devices in place; it is called once for all layers, and not at all if there
    are no ghost batches. The statistics of a layer that saw no group stay as they are.
    """
    layers = _ghost_layers(model)
    if not layers:
        return
    # One tensor for all layers, and no branch on device values: a dozen kernels and one
    # collective, however deep the network is.
    total_3C = torch.cat([layer.pending_3C for layer in layers], dim=1)
    if all_reduce is not None:
        all_reduce(total_3C.view(-1))
    channels = [layer.num_features for layer in layers]
    mean_C, var_C = total_3C[:2] / total_3C[2].clamp(min=1)
    weights = torch.split((total_3C[2] > 0).to(total_3C.dtype), channels)
    torch._foreach_mul_(weights, [layer.momentum for layer in layers])
    torch._foreach_lerp_([layer.running_mean for layer in layers], torch.split(mean_C, channels), weights)
    torch._foreach_lerp_([layer.running_var for layer in layers], torch.split(var_C, channels), weights)
    torch._foreach_add_([layer.num_batches_tracked for layer in layers], 1)
    discard_statistics(model)


def discard_statistics(model: nn.Module) -> None:
    """Discard the groups since the last commit, for a step that is abandoned half-way."""
    for layer in _ghost_layers(model):
        layer.pending_3C.zero_()
        layer.weights_G = None


def _ghost_layers(model: nn.Module) -> list[_Ghost]:
    return [module for module in model.modules() if isinstance(module, _Ghost) and module.norm_batch > 0]
