"""Cross-entropy of a linear head in chunks: neither the logits of all rows nor their gradient are stored."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.memory.simulation import kernels_for, simulated
from lib.nn import IGNORED
from lib.nn.cross_entropy import CPU_ELEMENTS
from lib.nn.precision import without_autocast

_ROWS = 1024  # fewer in a chunk make its matrix products slow


def linear_cross_entropy(
    x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, bias_V: Tensor | None = None, *, classes: int
) -> Tensor:
    """Return the sum over rows of -log softmax(x weight^T + bias)[target] in nats, without IGNORED targets.

    classes: rows of the weight that are classes; others pad it. Products are in the type of autocast or else
    of `x_NC`, sums and the scalar result in float32 (float64 for such x). Gradients are calculated with the
    loss, chunk by chunk: it is differentiable once. A second backward pass raises RuntimeError.

    On a GPU the softmax is rounded to the type of the products as soon as it is known, so that a chunk takes
    12 kernels, which read and write a logit in half precision for 14 bytes. A loss above log 2 then has the
    relative rounding of that type as its absolute error, as its logits have; a smaller one, and 1 - p of the
    target in the gradient, are sums of the other classes in float32.
    """
    kind = x_NC.device.type
    # The meta device has no autocast.
    mixed = not x_NC.is_meta and torch.is_autocast_enabled(kind) and x_NC.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if mixed else x_NC.dtype
    counted_N1 = (targets_N != IGNORED)[:, None]
    column_N1 = targets_N[:, None].where(counted_N1, 0)
    with without_autocast(x_NC):
        arguments = x_NC.to(dtype), weight_VC, bias_V, column_N1, counted_N1, classes
        return _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def chunk_rows(rows: int, width: int, *, classes: int) -> int:
    """Return the rows of a chunk, whose logits take about twice the memory of all of x (`rows`, `width`).

    The number of chunks is a power of two that depends on the head alone unless chunks would be small: the
    step is then the same for every micro-batch.
    """
    wanted = round(math.log2(max(1.0, classes / (2 * width))))
    possible = math.floor(math.log2(max(1, rows // _ROWS)))
    chunks: int = 2 ** min(wanted, possible)
    return max(1, -(-rows // chunks))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        bias_V: Tensor | None,
        column_N1: Tensor,
        counted_N1: Tensor,
        classes: int,
    ) -> Tensor:
        for_x, for_weight, for_bias = wanted = ctx.needs_input_grad[:3]
        dtype, step = x_NC.dtype, chunk_rows(*x_NC.shape, classes=classes)
        x_NC = x_NC * counted_N1  # rows without a target add nothing to the weights' gradients
        product_VC = weight_VC.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        on_gpu = any(wanted) and kernels_for(x_NC) == "cuda"
        if on_gpu:
            bias = _without_padding(bias, product_VC, classes)
        # The weights' gradients are sums over chunks, so they are kept in the weights' precision.
        grad_x_NC = torch.empty_like(x_NC) if for_x else None
        grad_weight_VC = torch.zeros_like(weight_VC) if for_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if bias_V is not None and for_bias else None
        losses: list[Tensor] = []
        figures: list[tuple[Tensor, ...]] = []
        for number, (x_RC, column_R1, counted_R1) in enumerate(
            zip(*(torch.split(each, step) for each in (x_NC, column_N1, counted_N1)), strict=True)
        ):
            logits_RV = F.linear(x_RC, product_VC, bias)
            if on_gpu:
                grad_RV, found = _softmax_gradient(logits_RV, column_R1)
                figures.append(found)
            else:
                losses += _losses(logits_RV, column_R1, classes, gradient=any(wanted))
                grad_RV = logits_RV  # if any is wanted
            if grad_x_NC is not None:
                torch.mm(grad_RV, product_VC, out=grad_x_NC[number * step :][: len(x_RC)])
            if grad_weight_VC is not None:
                grad_weight_VC += grad_RV.T @ x_RC
            if grad_bias_V is not None:
                grad_bias_V += (grad_RV.T @ counted_R1.to(dtype))[:, 0]
        if grad_x_NC is not None:
            grad_x_NC *= counted_N1
        ctx.save_for_backward(grad_x_NC, grad_weight_VC, grad_bias_V)
        loss_N1 = _loss_of(*map(torch.cat, zip(*figures, strict=True))) if on_gpu else torch.cat(losses)
        # A simulation leaves out losses.
        return loss_N1.where(counted_N1[: len(loss_N1)], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place: torch refuses a second backward pass, whose factor would come on top.
        scaled = (None if each is None else each.mul_(gradient) for each in ctx.saved_tensors)
        return (*scaled, None, None, None)


def _without_padding(bias_V: Tensor | None, weight_VC: Tensor, classes: int) -> Tensor | None:
    """Return a bias with which rows of the weight that pad it are no classes: one less kernel for a chunk."""
    if len(weight_VC) == classes:
        return bias_V
    bias = weight_VC.new_zeros(len(weight_VC)) if bias_V is None else bias_V.clone()
    bias[classes:] = -math.inf
    return bias


def _softmax_gradient(logits_RV: Tensor, column_R1: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return softmax(logits), less 1 at the column, and figures (R, 1) of which `_loss_of` is a function."""
    exact = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    most_R1, place_R1 = logits_RV.max(dim=1, keepdim=True)
    p_RV = logits_RV.softmax(dim=1)
    own_R1, p_own_R1 = logits_RV.gather(1, column_R1), p_RV.gather(1, column_R1)
    figures = most_R1, own_R1, p_RV.gather(1, place_R1), p_own_R1, p_RV.sum(dim=1, keepdim=True, dtype=exact)
    # The other classes' sum is exact near 0, where 1 - p is not.
    p_RV.scatter_(1, column_R1, torch.sub(p_own_R1, figures[-1], out=torch.empty_like(p_own_R1)))
    return p_RV, figures


def _loss_of(
    most_N1: Tensor, own_N1: Tensor, p_most_N1: Tensor, p_own_N1: Tensor, total_N1: Tensor
) -> Tensor:
    """Return -log p of the target from the largest logit and its own, with their probabilities."""
    others_N1 = total_N1 - p_own_N1
    far_N1 = most_N1.to(total_N1.dtype) - own_N1 - p_most_N1.to(total_N1.dtype).log()
    return torch.where(others_N1 < 0.5, -torch.log1p(-others_N1.clamp(max=0.5)), far_N1)


def _losses(logits_RV: Tensor, column_R1: Tensor, classes: int, *, gradient: bool) -> list[Tensor]:
    """Return -log softmax(logits)[column], as parts (S, 1); their gradient replaces the logits if wanted."""
    exact = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    losses: list[Tensor] = []
    columns = logits_RV.shape[1]
    if columns > classes:
        logits_RV[:, classes:].zero_()
        logits_RV = logits_RV[:, :classes]
    # Parts fit the cache of a CPU; on other devices it is all rows at once.
    step = max(1, CPU_ELEMENTS // columns) if kernels_for(logits_RV) == "cpu" else len(logits_RV)
    parts = list(zip(torch.split(logits_RV, step), torch.split(column_R1, step), strict=True))
    for part_SV, column_S1 in parts[:2] if simulated() else parts:  # others reuse the memory of these
        logs_SV = F.log_softmax(part_SV.to(exact), dim=1)
        logs_S1 = logs_SV.gather(1, column_S1)
        losses.append(-logs_S1)
        if gradient:  # softmax - 1 at the target, where expm1 is exact near 0
            part_SV.copy_(logs_SV.exp_().scatter_(1, column_S1, logs_S1.expm1_()))
    return losses
