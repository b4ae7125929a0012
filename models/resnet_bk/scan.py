"""Recursions for entries of (H - zI)^-1 along a text: O(T), without overflow at any length.

H is tridiagonal with a real diagonal a_t; z_t = i eta_t with eta_t > 0. Only a_t - z_t =: s_t and the
products k_t >= 0 of the two entries beside the diagonal, between t - 1 and t, matter. H[1..t] is the
leading block of t rows.

    g_t = 1 / (s_t - k_t g_{t-1})    the last diagonal entry of (H[1..t] - zI)^-1

Im g_t > 0 and |g_t| <= 1 / eta_t for every t, because Im s_t = -eta_t and -Im k_t g_{t-1} <= 0 have one
sign: nothing has to be clamped or rescaled. All tensors have the T positions first.

The loops are custom torch operators, because a compiler would take minutes to unroll them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_ROWS_AT_ONCE = 128


def continued_fraction(s_TX: Tensor, k_TX: Tensor) -> Tensor:
    """Return g_TX, complex; k_TX is real and non-negative, and k_TX[0] has no effect."""
    return torch.ops.anneal.continued_fraction(s_TX.contiguous(), k_TX.contiguous())  # type: ignore[no-any-return]


def linear_recurrence(x_THC: Tensor, factor_TH: Tensor) -> Tensor:
    """Return u_t = x_t + factor_t u_{t-1}; the channels C of a head share its factor; factor_TH[0] is unused.

    H may be several dimensions. Both are complex.
    """
    return _recurred(x_THC, factor_TH, backwards=False)


def both_sides(s_TX: Tensor) -> Tensor:
    """Return the diagonal of (H - zI)^-1 with products of 1: every entry depends on every position."""
    ones_TX = torch.ones_like(s_TX.real)
    before_TX = continued_fraction(s_TX, ones_TX)
    after_TX = continued_fraction(s_TX.flip(0), ones_TX).flip(0)
    nothing_1X = torch.zeros_like(s_TX[:1])
    neighbours_TX = torch.cat((nothing_1X, before_TX[:-1])) + torch.cat((after_TX[1:], nothing_1X))
    return (s_TX - neighbours_TX).reciprocal()


def _fraction(s_TX: Tensor, k_TX: Tensor) -> Tensor:
    g_TX = torch.empty_like(s_TX)
    previous_X = torch.reciprocal(s_TX[0], out=g_TX[0])
    for s_X, k_X, g_X in _rows(s_TX[1:], k_TX[1:], g_TX[1:], backwards=False):
        torch.addcmul(s_X, k_X, previous_X, value=-1, out=g_X)
        previous_X = torch.reciprocal(g_X, out=g_X)
    return g_TX


def _recurrence(x_THC: Tensor, factor_TH: Tensor, backwards: bool) -> Tensor:
    """Compute the recurrence; backwards: u_t = x_t + factor_{t+1} u_{t+1}."""
    u_THC = torch.empty_like(x_THC)
    first, rest = (-1, slice(None, -1)) if backwards else (0, slice(1, None))
    u_THC[first] = previous_HC = x_THC[first]
    factor_THC = factor_TH[1:].unsqueeze(-1).expand_as(x_THC[1:])
    for x_HC, factor_HC, u_HC in _rows(x_THC[rest], factor_THC, u_THC[rest], backwards=backwards):
        previous_HC = torch.addcmul(x_HC, factor_HC, previous_HC, out=u_HC)
    return u_THC


def _rows(x: Tensor, factor: Tensor, result: Tensor, *, backwards: bool) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of the three tensors together, factors in the type of `x`.

    In groups, because many live tensors slow down Python's garbage collector.
    """
    starts = range(0, len(x), _ROWS_AT_ONCE)
    for start in reversed(starts) if backwards else starts:
        part = slice(start, start + _ROWS_AT_ONCE)
        factors = factor[part].to(x.dtype).contiguous()
        rows = zip(x[part].unbind(), factors.unbind(), result[part].unbind(), strict=True)
        yield from reversed(list(rows)) if backwards else rows


def _shape_of_first(first: Tensor, *_: Tensor | bool) -> Tensor:
    return torch.empty_like(first)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], output)


def _fraction_backward(ctx: Any, gradient_TX: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate through dg_t/ds_t = -g_t^2, dg_t/dg_{t-1} = k_t g_t^2 and dg_t/dk_t = g_{t-1} g_t^2."""
    k_TX, g_TX = ctx.saved_tensors
    square_TX = (g_TX * g_TX).conj_physical_()
    whole_TX = _recurred(gradient_TX[..., None], k_TX * square_TX, backwards=True)[..., 0]
    s_gradient_TX = square_TX.mul_(whole_TX).neg_()
    return s_gradient_TX, -(s_gradient_TX * _previous(g_TX).conj()).real


def _recurrence_backward(ctx: Any, gradient_THC: Tensor) -> tuple[Tensor, Tensor, None]:
    """Differentiate the forward recurrence; the backward one is only used here."""
    factor_TH, u_THC = ctx.saved_tensors
    x_gradient_THC = _recurred(gradient_THC, factor_TH.conj_physical(), backwards=True)
    return x_gradient_THC, (x_gradient_THC * _previous(u_THC).conj()).sum(-1), None


def _recurred(x_THC: Tensor, factor_TH: Tensor, *, backwards: bool) -> Tensor:
    """Apply the operator; backwards accumulates from each position and all later ones."""
    x_THC, factor_TH = x_THC.contiguous(), factor_TH.contiguous()
    return torch.ops.anneal.linear_recurrence(x_THC, factor_TH, backwards)  # type: ignore[no-any-return]


def _previous(rows_TX: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(rows_TX[:1]), rows_TX[:-1]))


# The low-level interface, because torch.library.custom_op loads the compiler, which takes a second.
_LIBRARY: Any = torch.library.Library("anneal", "DEF")  # type: ignore[no-untyped-call]
for _name, _arguments, _forward, _backward in (
    ("continued_fraction", "Tensor s, Tensor k", _fraction, _fraction_backward),
    ("linear_recurrence", "Tensor x, Tensor factor, bool backwards", _recurrence, _recurrence_backward),
):
    _LIBRARY.define(f"{_name}({_arguments}) -> Tensor")
    _LIBRARY.impl(_name, _forward, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _shape_of_first, "Meta")
    torch.library.register_autograd(f"anneal::{_name}", _backward, setup_context=_keep, lib=_LIBRARY)
