"""Recurrent layers (nn.LSTM, nn.GRU, nn.RNN) as cuDNN has them: the tensors of one kernel for all steps.

cuDNN keeps a reserve from the forward to the backward pass and has workspace in each. It does not publish
their sizes. For 4 layers of 320, 25,000 steps of samples in fp32 it asks for 736,000,000 (LSTM) and
864,000,000 bytes (GRU) of reserve, and 17,730,560 and 13,169,920 of workspace (pytorch/pytorch#2895); the
formulas below give these four numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Gates, and values that the reserve holds for each step, sample and unit of a layer.
_CELLS = {"lstm": (4, 5), "gru": (3, 6), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}


def reserve_values(cell: str, *, steps: int, layers: int, width: int) -> int:
    """Return the elements of the reserve. steps: of all samples. width: units of a layer, both ways."""
    return steps * width * (layers * _CELLS[cell][1] + layers - 1)


def workspace_values(cell: str, *, batch: int, layers: int, width: int, weights: int) -> int:
    """Return the elements of the workspace. weights: elements of all weight matrices, without biases."""
    return weights + batch * layers * width * (3 * _CELLS[cell][0] - 1)


class _Layers(torch.autograd.Function):
    """All layers of one call. hidden: the initial states; weights: matrices and biases in torch's order."""

    @staticmethod
    def forward(
        ctx: Any, cell: str, layers: int, sizes: tuple[int, int, int], x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        steps, batch, width = sizes
        states = 2 if cell == "lstm" else 1
        hidden, weights = tensors[:states], tensors[states:]
        matrices = sum(each.numel() for each in weights if each.dim() == 2)
        space = workspace_values(cell, batch=batch, layers=layers, width=width, weights=matrices)
        workspace = x.new_empty(space)
        out = x.new_empty(*x.shape[:-1], width // hidden[-1].shape[-1] * hidden[0].shape[-1])
        reserve = x.new_empty(reserve_values(cell, steps=steps, layers=layers, width=width))
        final = [each.new_empty(each.shape) for each in hidden]
        del workspace
        ctx.states, ctx.space = states, space
        ctx.save_for_backward(x, out, reserve, *tensors)
        return out, *final

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, _out, _reserve, *tensors = ctx.saved_tensors
        hidden, weights = tensors[: ctx.states], tensors[ctx.states :]
        workspace = x.new_empty(ctx.space)
        of_x, of_hidden = x.new_empty(x.shape), [each.new_empty(each.shape) for each in hidden]
        flat = x.new_zeros(sum(each.numel() for each in weights))
        of_weights = [
            part.view(each.shape)
            for part, each in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
        ]
        del workspace
        return None, None, None, of_x, *of_hidden, *of_weights


def _run(cell: str, *arguments: Any) -> tuple[Tensor, ...]:
    """One of torch._VF.lstm, gru, rnn_tanh and rnn_relu, for padded or packed sequences."""
    if isinstance(arguments[3], Sequence):  # packed: (data, batch_sizes, hx, weights, ...)
        arguments = arguments[0], *arguments[2:]
    x, hidden, weights, _, layers, _, _, two_ways = arguments[:8]
    tensors = [*(hidden if cell == "lstm" else [hidden]), *weights]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, tensors = x.to(dtype), [each.to(dtype) for each in tensors]
    width = tensors[1 if cell == "lstm" else 0].shape[-1] * (2 if two_ways else 1)
    sizes = math.prod(x.shape[:-1]), tensors[0].shape[1], width
    with torch.autocast("cpu", enabled=False):
        return _Layers.apply(cell, layers, sizes, x, *tensors)  # type: ignore[no-any-return, no-untyped-call]


RECURRENT = {cell: functools.partial(_run, cell) for cell in _CELLS}
