"""Adam and AdamW with running means in 8 bits: a byte a value, and a scale for each block of values.

The code is dynamic tree quantization in blocks (Dettmers et al. 2022, arXiv:2110.02861): decades from 1 down
to 1e-7 of the largest value of a block, with half as many steps in each below. Of the squares the root is
stored: its decades reach further, and a root above 0 never becomes 0, so that no update is divided by epsilon
alone. Nothing here is for sharded weights, whose blocks would depend on the number of devices.

N values, K blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from lib.devices.base import send
from lib.optim import Compiler

BLOCK = 256  # values that share a scale
SHARE = (1 + 4 / BLOCK) / 4  # of the bytes in fp32
SMALLEST = 4096  # weights with fewer values keep means in full: norms and biases
_CHUNK = 1 << 23  # values at once, a multiple of BLOCK: an update's temporaries are of this size
_DECADES = 7
_Numbers: TypeAlias = dict[tuple[int, torch.device, torch.dtype], tuple[float, ...] | Tensor]


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
        compiler: Compiler | None = None,
    ) -> None:
        """compiler: compiles the update of some blocks."""
        self._compiler, self._update_part = compiler, compiler(_update_part) if compiler else _update_part
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
            numbers: _Numbers = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, numbers)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], numbers: _Numbers) -> None:
        """Update a parameter. numbers: of other parameters of the group."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state.update(_first_state(parameter))
        step = state["step"] = state["step"] + 1
        key = step, parameter.device, _exact(parameter.dtype)
        if key not in numbers:
            found = _numbers(group, step)
            # A number would be part of a compiled program.
            numbers[key] = (
                found if self._compiler is None else send(torch.tensor(found, dtype=key[2]), parameter.device)
            )
        options = {name: group[name] for name in ("betas", "eps", "weight_decay", "decoupled")}
        # In the order of dimensions: views, but for filters in channels-last order.
        weight_N, gradient_N = parameter.reshape(-1), parameter.grad.reshape(-1)
        for part, width in _parts(len(weight_N), is_coded="mean_scales" in state):
            weight_KB, gradient_KB = (each[part].view(-1, width) for each in (weight_N, gradient_N))
            mean, root = (self._stored(state, name, part, width) for name in ("mean", "root"))
            if self._compiler is not None:
                self._mark(weight_KB, gradient_KB, *mean[:2], *root[:2])
            self._update_part(weight_KB, gradient_KB, mean, root, numbers[key], **options)
        if not parameter.is_contiguous():
            parameter.copy_(weight_N.view(parameter.shape))

    def _stored(self, state: dict[str, Any], name: str, part: slice, width: int) -> _Stored:
        scales_K = state.get(f"{name}_scales")
        values_KB: Tensor = state[name].view(-1)[part].view(-1, width)
        if scales_K is None:
            return _Stored(values_KB, None, None)
        return _Stored(values_KB, scales_K[_blocks(part), None], self._book(name, values_KB.device))

    @staticmethod
    def _mark(*tensors: Tensor | None) -> None:
        """Let a compiler make one program for any number of blocks, or of values in a single row."""
        from torch._dynamo import maybe_mark_dynamic

        for tensor in tensors:
            if tensor is not None:
                maybe_mark_dynamic(tensor, int(len(tensor) == 1))

    def _book(self, name: str, device: torch.device) -> Tensor:
        signed = name == "mean"
        if (signed, device) not in self._books:
            self._books[signed, device] = code_book(signed=signed).to(device)
        return self._books[signed, device]


class _Stored(NamedTuple):
    """Running means of some blocks of values; with fewer values in a block where it is the only one."""

    values_KB: Tensor
    scales_K1: Tensor | None  # None: the values are not coded
    book: Tensor | None

    def read(self) -> Tensor:
        """Return the values in full."""
        if self.scales_K1 is None or self.book is None:
            return self.values_KB.clone()
        return self.book[self.values_KB.int()].to(self.scales_K1.dtype) * self.scales_K1

    def write(self, values_KB: Tensor, *, is_root: bool) -> None:
        """Store values: as the nearest ones of the code, but those above 0 as no root of 0."""
        if self.scales_K1 is None or self.book is None:
            self.values_KB.copy_(values_KB)
            return
        largest_K1 = values_KB.abs().amax(dim=1, keepdim=True)
        self.scales_K1.copy_(largest_K1)
        book = self.book.to(values_KB.dtype)
        edges = (book[1:] + book[:-1]) / 2
        if is_root:
            edges[0] = 0
        shares_KB = values_KB / largest_K1.clamp(min=torch.finfo(values_KB.dtype).tiny)
        self.values_KB.copy_(torch.bucketize(shares_KB, edges, out_int32=True))


def _numbers(group: dict[str, Any], step: int) -> tuple[float, float, float]:
    """Return the share of a weight that decay keeps, the step size, and the correction of the root."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    return 1 - rate * group["weight_decay"], rate / (1 - beta1**step), (1 - beta2**step) ** 0.5


def _update_part(
    weight_KB: Tensor,
    gradient_KB: Tensor,
    mean: _Stored,
    root: _Stored,
    numbers: tuple[float, ...] | Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Update some blocks and their means in place."""
    kept, size, correction = numbers
    gradient_KB = gradient_KB.to(_exact(weight_KB.dtype))
    if not decoupled and weight_decay:
        gradient_KB = gradient_KB.add(weight_KB, alpha=weight_decay)
    mean_KB = mean.read().lerp_(gradient_KB, 1 - betas[0])
    root_KB = root.read().square_().mul_(betas[1])
    root_KB = root_KB.addcmul_(gradient_KB, gradient_KB, value=1 - betas[1]).sqrt_()
    update_KB = mean_KB / (root_KB / correction).add_(eps)
    if decoupled:
        weight_KB.mul_(kept)
    if isinstance(size, Tensor):
        weight_KB.sub_((update_KB * size).to(weight_KB.dtype))
    else:
        weight_KB.add_(update_KB.to(weight_KB.dtype), alpha=-size)
    mean.write(mean_KB, is_root=False)
    root.write(root_KB, is_root=True)


def _parts(count: int, *, is_coded: bool) -> Iterator[tuple[slice, int]]:
    """Yield the parts of `count` values that are updated at once, and the values in each of their rows."""
    whole = count // BLOCK * BLOCK if is_coded else 0
    for start in range(0, whole, _CHUNK):
        yield slice(start, min(whole, start + _CHUNK)), BLOCK
    if whole < count:
        yield slice(whole, count), count - whole


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
