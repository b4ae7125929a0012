"""Adam and AdamW with running means in 8 bits: a byte a value, and a scale for each block of values.

The code is dynamic tree quantization in blocks (Dettmers et al. 2022, arXiv:2110.02861): decades from 1 down
to 1e-7 of the largest value of a block, with half as many steps in each below. Of the squares the root is
stored: its decades reach further, and a root above 0 never becomes 0, so that no update is divided by epsilon
alone. Nothing here is for sharded weights, whose blocks would depend on the number of devices.

N values, K blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

BLOCK = 256  # values that share a scale
SHARE = (1 + 4 / BLOCK) / 4  # of the bytes in fp32
SMALLEST = 4096  # weights with fewer values keep means in full: norms and biases
_CHUNK = 1 << 23  # values at once, a multiple of BLOCK: an update's temporaries are of this size
_DECADES = 7


def code_book(*, signed: bool) -> Tensor:
    """Return the 256 values in [-1, 1], or [0, 1], that a byte stands for, in ascending order: float32."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - _DECADES)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.float()


class Adam8bit(torch.optim.Optimizer):
    """Adam, or with `decoupled` weight decay AdamW. It takes no closure, and no sharded weights."""

    def __init__(
        self,
        groups: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        known = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(groups, known)
        self._books: dict[tuple[bool, torch.device], Tensor] = {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state. torch's own would give bytes the type of the weights, and take as much memory."""
        super().load_state_dict({**state_dict, "state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, entry in state_dict["state"].items():
            own = weights[number]
            self.state[own] = {n: v if n == "step" else v.to(own.device) for n, v in entry.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("Adam8bit takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state.update(_first_state(parameter))
        state["step"] += 1
        # In the order of dimensions: views, but for filters in channels-last order.
        weight_N, gradient_N = parameter.reshape(-1), parameter.grad.reshape(-1)
        for start in range(0, len(weight_N), _CHUNK):
            part = slice(start, start + _CHUNK)
            self._update_part(weight_N[part], gradient_N[part], state, part, group)
        if not parameter.is_contiguous():
            parameter.copy_(weight_N.view(parameter.shape))

    def _update_part(
        self, weight_N: Tensor, gradient_N: Tensor, state: dict[str, Any], part: slice, group: dict[str, Any]
    ) -> None:
        (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
        dtype, step = _exact(weight_N.dtype), state["step"]
        gradient_N = gradient_N.to(dtype)
        if decay and not group["decoupled"]:
            gradient_N = gradient_N.add(weight_N, alpha=decay)
        mean_N = self._read(state, "mean", part).lerp_(gradient_N, 1 - beta1)
        root_N = self._read(state, "root", part)
        root_N = root_N.square_().mul_(beta2).addcmul_(gradient_N, gradient_N, value=1 - beta2).sqrt_()
        update_N = mean_N / (root_N / (1 - beta2**step) ** 0.5).add_(group["eps"])
        if group["decoupled"]:
            weight_N.mul_(1 - rate * decay)
        weight_N.add_(update_N.to(weight_N.dtype), alpha=-rate / (1 - beta1**step))
        self._write(state, "mean", part, mean_N)
        self._write(state, "root", part, root_N)

    def _read(self, state: dict[str, Any], name: str, part: slice) -> Tensor:
        """Return stored values in full."""
        stored_N: Tensor = state[name].view(-1)[part]
        scales_K = state.get(f"{name}_scales")
        if scales_K is None:
            return stored_N.clone()
        found_N = self._book(name, stored_N.device)[stored_N.int()].to(scales_K.dtype)
        padded_KB = F.pad(found_N, (0, -len(found_N) % BLOCK)).view(-1, BLOCK)
        scaled_KB: Tensor = padded_KB * scales_K[_blocks(part), None]
        return scaled_KB.view(-1)[: len(found_N)]

    def _write(self, state: dict[str, Any], name: str, part: slice, values_N: Tensor) -> None:
        """Store values: as the nearest ones of the code, but those above 0 as no root of 0."""
        stored_N: Tensor = state[name].view(-1)[part]
        scales_K = state.get(f"{name}_scales")
        if scales_K is None:
            stored_N.copy_(values_N)
            return
        padded_KB = F.pad(values_N, (0, -len(values_N) % BLOCK)).view(-1, BLOCK)
        largest_K1 = padded_KB.abs().amax(dim=1, keepdim=True)
        scales_K[_blocks(part)] = largest_K1[:, 0]
        book = self._book(name, stored_N.device).to(values_N.dtype)
        edges = (book[1:] + book[:-1]) / 2
        if name == "root":
            edges[0] = 0
        shares_KB = padded_KB / largest_K1.clamp(min=torch.finfo(values_N.dtype).tiny)
        stored_N.copy_(torch.bucketize(shares_KB, edges, out_int32=True).view(-1)[: len(stored_N)])

    def _book(self, name: str, device: torch.device) -> Tensor:
        signed = name == "mean"
        if (signed, device) not in self._books:
            self._books[signed, device] = code_book(signed=signed).to(device)
        return self._books[signed, device]


def _first_state(parameter: nn.Parameter) -> dict[str, Any]:
    dtype, count = _exact(parameter.dtype), parameter.numel()
    state: dict[str, Any] = {"step": 0}  # a tensor has no value in a simulation
    for name in ("mean", "root"):
        if count < SMALLEST:
            state[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        else:
            # The codes of 0; scales of 0 make any code one, too.
            state[name] = torch.zeros(parameter.shape, dtype=torch.uint8, device=parameter.device)
            state[f"{name}_scales"] = torch.zeros(-(-count // BLOCK), dtype=dtype, device=parameter.device)
    return state


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
