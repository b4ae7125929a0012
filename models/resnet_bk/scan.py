"""Entries of (H - zI)^-1 along a text, each from those before it: O(T), and no overflow at any length.

H is tridiagonal with a real diagonal a_t; z_t = i eta_t with eta_t > 0. Only a_t - z_t =: s_t and the
products k_t >= 0 of the two entries beside the diagonal, between t - 1 and t, matter. H[1..t] is the
leading block of t rows.

    g_t = 1 / (s_t - k_t g_{t-1})    the last diagonal entry of (H[1..t] - zI)^-1

Im g_t > 0 and |g_t| <= 1 / eta_t for every t, because Im s_t = -eta_t and -Im k_t g_{t-1} <= 0 have one
sign: nothing has to be clamped or rescaled. All tensors have the T positions first.

The loops are operators of torch of their own: a compiler that unrolled them would take minutes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def continued_fraction(s_TX: Tensor, k_TX: Tensor) -> Tensor:
    """g_TX, complex as `s_TX` is; k_TX is real and at least 0, and k_TX[0] has no effect."""
    g_TX: Tensor = _fraction(s_TX.contiguous(), k_TX.contiguous())
    return g_TX


def linear_recurrence(x_THC: Tensor, factor_TH: Tensor) -> Tensor:
    """u_t = x_t + factor_t u_{t-1}, the channels C of a head sharing its factor; factor_TH[0] has no effect.

    H may be several dimensions. Both are complex.
    """
    u_THC: Tensor = _recurrence(x_THC.contiguous(), factor_TH.contiguous())
    return u_THC


def both_sides(s_TX: Tensor) -> Tensor:
    """The whole diagonal of (H - zI)^-1 with products of 1: every entry depends on every position."""
    ones_TX = torch.ones_like(s_TX.real)
    before_TX = continued_fraction(s_TX, ones_TX)
    after_TX = continued_fraction(s_TX.flip(0), ones_TX).flip(0)
    nothing_1X = torch.zeros_like(s_TX[:1])
    neighbours_TX = torch.cat((nothing_1X, before_TX[:-1])) + torch.cat((after_TX[1:], nothing_1X))
    return (s_TX - neighbours_TX).reciprocal()


@torch.library.custom_op("anneal::continued_fraction", mutates_args=(), schema="(Tensor s, Tensor k) -> Tensor")
def _fraction(s_TX: Tensor, k_TX: Tensor) -> Tensor:
    g_TX = torch.empty_like(s_TX)
    torch.reciprocal(s_TX[0], out=g_TX[0])
    rows = g_TX.unbind()
    steps = zip(s_TX[1:].unbind(), k_TX[1:].to(s_TX.dtype).unbind(), rows, rows[1:], strict=False)
    for s_X, k_X, previous_X, g_X in steps:
        torch.addcmul(s_X, k_X, previous_X, value=-1, out=g_X)
        torch.reciprocal(g_X, out=g_X)
    return g_TX


@torch.library.custom_op(
    "anneal::linear_recurrence", mutates_args=(), schema="(Tensor x, Tensor factor) -> Tensor"
)
def _recurrence(x_THC: Tensor, factor_TH: Tensor) -> Tensor:
    u_THC = torch.empty_like(x_THC)
    u_THC[0] = x_THC[0]
    rows = u_THC.unbind()
    factors = factor_TH.unsqueeze(-1).expand_as(x_THC).contiguous()
    for x_HC, factor_HC, previous_HC, u_HC in zip(
        x_THC[1:].unbind(), factors[1:].unbind(), rows, rows[1:], strict=False
    ):
        torch.addcmul(x_HC, factor_HC, previous_HC, out=u_HC)
    return u_THC


def _shape_of_first(first: Tensor, _: Tensor) -> Tensor:
    return torch.empty_like(first)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], output)


def _fraction_backward(ctx: Any, gradient_TX: Tensor) -> tuple[Tensor, Tensor]:
    """Through dg_t/ds_t = -g_t^2, dg_t/dg_{t-1} = k_t g_t^2 and dg_t/dk_t = g_{t-1} g_t^2."""
    k_TX, g_TX = ctx.saved_tensors
    square_TX = (g_TX * g_TX).conj().resolve_conj()
    whole_TX = _from_the_end(gradient_TX, k_TX * square_TX)
    s_gradient_TX = -square_TX * whole_TX
    k_gradient_TX = -(s_gradient_TX * _previous(g_TX).conj()).real
    return s_gradient_TX, k_gradient_TX


def _recurrence_backward(ctx: Any, gradient_THC: Tensor) -> tuple[Tensor, Tensor]:
    factor_TH, u_THC = ctx.saved_tensors
    x_gradient_THC = _from_the_end(gradient_THC, factor_TH.conj().resolve_conj())
    return x_gradient_THC, (x_gradient_THC * _previous(u_THC).conj()).sum(-1)


def _from_the_end(gradient_TX: Tensor, factor_T: Tensor) -> Tensor:
    """What each position gets from itself and all later ones: w_t = gradient_t + factor_{t+1} w_{t+1}."""
    if factor_T.dim() == gradient_TX.dim():
        return _from_the_end(gradient_TX.unsqueeze(-1), factor_T).squeeze(-1)
    backwards_T = torch.cat((torch.zeros_like(factor_T[:1]), factor_T.flip(0)[:-1]))
    return linear_recurrence(gradient_TX.flip(0), backwards_T).flip(0)


def _previous(rows_TX: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(rows_TX[:1]), rows_TX[:-1]))


for _operator, _backward in ((_fraction, _fraction_backward), (_recurrence, _recurrence_backward)):
    _operator.register_fake(_shape_of_first)
    _operator.register_autograd(_backward, setup_context=_keep)
