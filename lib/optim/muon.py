"""Muon (Jordan 2024): update hidden matrices by the nearest semi-orthogonal matrix to their momentum.

The other parameters (embeddings, head, biases, normalisation) follow AdamW in the same object, so that
the loop, the loss scaler and a checkpoint handle a single optimizer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lib.devices.base import send
from lib.optim import Compiler

NEWTON_SCHULZ_STEPS = 5
# Coefficients of x -> a x + b x^3 + c x^5, which maps singular values in (0, 1] to about 0.7 .. 1.2 in
# five steps: the steepest at zero that does so (Jordan 2024).
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


@runtime_checkable
class HasHiddenMatrices(Protocol):
    """A model that Muon can train: it names its hidden matrices, which parameters alone do not show."""

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the weights from activations to activations, and filters: no embedding and no head."""


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`, AdamW for the groups of `rest`.

    One step of a matrix W of M rows and N columns with gradient G:
        buffer = momentum * buffer + (1 - momentum) * G
        U = momentum * buffer + (1 - momentum) * G with Nesterov, else buffer
        W = (1 - lr * weight_decay) * W - lr * sqrt(max(1, M / N)) * orthogonal(U)
    The root is the only factor besides `lr`: it keeps the effect of a tall matrix on its output as
    large as that of a square one.

    matrices:      parameters of two dimensions; filters (M, C, H, W) are taken as (M, C H W).
    rest:          an AdamW over the other parameters, which this object takes over.
    product_dtype: of the matrix products of `orthogonal`; None: that of the gradient.
    compiler:      compiles the update of the matrices; that of AdamW is one kernel as it is.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        rest: torch.optim.AdamW,
        *,
        learning_rate: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        product_dtype: torch.dtype | None,
        compiler: Compiler | None = None,
    ) -> None:
        assert all(matrix.dim() >= 2 for matrix in matrices), "Muon is for matrices"
        self._rest, self._product_dtype = rest, product_dtype
        self._update, self._compiled = compiler(_update) if compiler else _update, compiler is not None
        hidden = {
            "params": list(matrices),
            "lr": learning_rate,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
        }
        super().__init__([*rest.param_groups, hidden], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        # Reassigned because loading a state replaces both.
        self._rest.param_groups = [group for group in self.param_groups if "betas" in group]
        self._rest.state = self.state
        self._rest.step()
        for group in self.param_groups:
            if "betas" not in group:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        if not matrices:
            return
        gradients = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        rate = group["lr"]
        if self._compiled:  # a number would be part of the program
            rate = send(torch.tensor(rate, dtype=torch.float32), matrices[0].device)
        options = {name: group[name] for name in ("weight_decay", "momentum", "nesterov")}
        self._update(matrices, gradients, buffers, rate, dtype=self._product_dtype, **options)


def _update(
    matrices: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    rate: float | Tensor,
    *,
    dtype: torch.dtype | None,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Update `matrices` and their momentum in place."""
    torch._foreach_lerp_(buffers, gradients, 1 - momentum)
    updates = buffers
    if nesterov:
        updates = list(torch._foreach_lerp(gradients, buffers, momentum))
    flat = orthogonal_all([update.flatten(1) for update in updates], dtype=dtype)
    torch._foreach_mul_(flat, [math.sqrt(max(1.0, u.shape[0] / u.shape[1])) for u in flat])
    torch._foreach_mul_(matrices, 1 - rate * weight_decay)
    updates = [u.reshape(matrix.shape) for u, matrix in zip(flat, matrices, strict=True)]
    if isinstance(rate, Tensor):
        torch._foreach_sub_(matrices, torch._foreach_mul(updates, rate))
    else:
        torch._foreach_add_(matrices, updates, alpha=-rate)


def orthogonal_all(matrices: Sequence[Tensor], *, dtype: torch.dtype | None) -> list[Tensor]:
    """Apply `orthogonal` to each, stacked by shape up to transposition: small products are slow one by one.

    dtype: of the products; the results have the type of the inputs.
    """
    stacks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        stacks[tuple(sorted(matrix.shape))].append(number)
    tall = [matrix.shape[0] > matrix.shape[1] for matrix in matrices]
    results: list[Tensor] = list(matrices)
    for numbers in stacks.values():
        wide_KMN = torch.stack([matrices[n].t() if tall[n] else matrices[n] for n in numbers])
        done_KMN = orthogonal(wide_KMN.to(dtype)).to(wide_KMN.dtype)
        for n, done_MN in zip(numbers, done_KMN.unbind(), strict=True):
            results[n] = done_MN.mT if tall[n] else done_MN
    return results


def orthogonal(wide_KMN: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix to each of K matrices with M <= N: U V' of U S V'.

    Singular values end between about 0.7 and 1.2, those that are tiny beside the largest below that;
    a zero matrix stays zero. Five Newton-Schulz iterations, which are matrix products alone.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    # The Frobenius norm bounds the largest singular value.
    norm_K11 = torch.linalg.vector_norm(wide_KMN, dim=(1, 2), keepdim=True)
    x_KMN: Tensor = wide_KMN / norm_K11.clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_KMM = x_KMN @ x_KMN.mT
        polynomial_KMM = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=b, alpha=c)
        x_KMN = torch.baddbmm(x_KMN, polynomial_KMM, x_KMN, beta=a)
    return x_KMN
