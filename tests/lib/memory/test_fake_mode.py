"""Quick fake tensors: the same storages at the same moments as with torch's own mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lib.memory import fake_mode as of_module
from lib.memory import predict_peak
from lib.memory.fake_mode import QuickFakeMode
from lib.memory.live import LiveBytes, Trace


class Mixed(nn.Module):
    """Convolution, normalisation, views, attention, in-place changes and tensors of several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.layer_norm, self.qkv, self.head = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.norm(self.convolution(x))).flatten(2).transpose(1, 2)
        x = self.layer_norm(F.dropout(x, 0.1)).unflatten(2, (2, 16)).flatten(2)
        parts = [part.view(*part.shape[:2], 2, 16).transpose(1, 2) for part in self.qkv(x).split(32, dim=2)]
        x = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.head(x.mean(1)) * torch.tensor(2.0)


def trace(batch: int, precision: Any = "bf16", device: Any = "cuda") -> Trace:
    """Trace two steps of `Mixed`."""

    def loss(model: nn.Module, batch: int) -> Tensor:
        return F.cross_entropy(model(torch.empty(batch, 3, 8, 8)), torch.zeros(batch, dtype=torch.long))

    return predict_peak(Mixed, loss, micro_batch=batch, precision=precision, device=device, accumulation=2)


def of_torch() -> FakeTensorMode:
    """Torch's own mode, without its memory of results."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cuda", "bf16"),
        ("cpu", "fp32"),
        *(
            pytest.param(device, precision, marks=pytest.mark.long)
            for device, precision in (("cuda", "fp16"), ("cuda", "fp32"), ("cpu", "bf16"), ("cpu", "fp16"))
        ),
    ],
)
def test_traces_are_those_of_torchs_mode(
    precision: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = [trace(batch, precision, device) for batch in (2, 2, 3, 2)]
    monkeypatch.setattr(of_module, "QuickFakeMode", of_torch)
    own = {batch: trace(batch, precision, device) for batch in (2, 3)}
    assert own[2] != own[3]
    assert quick == [own[2], own[2], own[3], own[2]]


def test_a_known_operator_is_not_derived_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*shape: int) -> Tensor:
        with QuickFakeMode():
            return torch.empty(*shape) @ torch.empty(7, 11)

    def part_times(row: int) -> Tensor:
        with QuickFakeMode():
            return torch.empty(9, 7)[row : row + 5] @ torch.empty(7, 11)

    multiply(5, 7)
    part_times(0)
    derived = list[Any]()
    for owner, name in ((FakeTensorMode, "dispatch"), (QuickFakeMode, "_by_meta")):
        derive: Any = getattr(owner, name)
        noted = partial(lambda derive, *given: (derived.append(given[1]), derive(*given))[1], derive)
        monkeypatch.setattr(owner, name, partialmethod(noted))
    assert isinstance(multiply(5, 7), FakeTensor)
    assert derived == []
    part_times(1)  # of rows at another place, where the view alone is another one
    assert torch.ops.aten.slice.Tensor in derived and torch.ops.aten.mm.default not in derived
    derived.clear()
    part_times(1)
    assert torch.ops.aten.slice.Tensor not in derived
    derived.clear()
    assert multiply(4, 7).shape == (4, 11)
    assert derived == [torch.ops.aten.empty.memory_format, torch.ops.aten.mm.default]


BY_META: dict[str, Callable[..., Any]] = {
    "view": lambda x: x.view(-1, 4),
    "a view of what has gaps": lambda x: x[:, ::2].view(4, 3, 2, 1),
    "a view that is none": lambda x: x.t().view(-1),
    "part": lambda x: x[1:3],
    "parts": lambda x: x.split(3, dim=1)[1],
    "transposed": lambda x: x.t(),
    "swapped": lambda x: x[None].transpose(0, 2).permute(1, 0, 2),
    "expanded": lambda x: x[:, None].expand(4, 2, 12),
    "product": lambda x: x.t() @ x,
    "product of parts": lambda x: x[:, 3:].T.mm(x[:, ::2]),
    "product that is none": lambda x: x @ x,
    "product of two types": lambda x: x @ x.t().double(),
    "sum with a product": lambda x: torch.addmm(x[:, 0], x, x.t()),
    "products": lambda x: x.view(2, 2, 12).bmm(x.view(2, 12, 2).expand(2, 12, 2)),
    "activation": lambda x: F.gelu(x.t()),
    "its gradient": lambda x: torch.ops.aten.gelu_backward(x.t(), x.view(12, 4), approximate="tanh"),
}


@pytest.mark.parametrize("case", BY_META)
def test_results_of_meta_kernels_are_those_of_torchs_rules(case: str) -> None:
    def outcome(mode: FakeTensorMode) -> tuple[Any, ...]:
        with mode:
            x = torch.empty(4, 12)
            try:
                made = BY_META[case](x)
            except (RuntimeError, ValueError) as error:
                return (str(error),)
            shared = made.untyped_storage()._cdata == x.untyped_storage()._cdata
            place = made.shape, made.stride(), made.storage_offset(), made.untyped_storage().nbytes()
            return *place, made.dtype, made.device, shared, str(torch._C._dispatch_keys(made))

    expected = outcome(of_torch())
    QuickFakeMode._known.clear()
    assert [outcome(QuickFakeMode()) for _ in range(2)] == [expected, expected]
    assert (len(expected) == 1) == ("is none" in case)


Case = Callable[[], Tensor]
CASES: dict[str, tuple[Case, Case]] = {
    "type of a number": (lambda: torch.arange(3) * 2, lambda: torch.arange(3) * 2.0),
    "type": (lambda: torch.empty(3) + 1, lambda: torch.empty(3, dtype=torch.double) + 1),
    "stride": (lambda: torch.empty(2, 3).relu(), lambda: torch.empty(3, 2).t().relu()),
    "offset": (lambda: torch.empty(4, 3)[0][1:], lambda: torch.empty(4, 3)[2][1:]),
    "default type": (lambda: torch.zeros(3), lambda: in_double(lambda: torch.zeros(3))),
    "device": (lambda: torch.empty(3) + 1, lambda: torch.empty(3, device="xpu") + 1),
    "device of a view": (lambda: torch.empty(3).view(3, 1), lambda: torch.empty(3, device="xpu").view(3, 1)),
}


def in_double(make: Case) -> Tensor:
    """Make a tensor while the default type is another one."""
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_results_depend_on(case: str) -> None:
    def facts(make: Case) -> tuple[Any, ...]:
        made = make()
        return (
            made.dtype,
            made.shape,
            made.stride(),
            made.storage_offset(),
            made.device,
            made.untyped_storage().nbytes(),
        )

    with of_torch():
        expected = [facts(make) for make in CASES[case]]
    assert expected[0] != expected[1]
    with QuickFakeMode():
        assert [facts(make) for _ in range(2) for make in CASES[case]] == 2 * expected


def test_views_share_the_storage_and_arguments_stay_themselves() -> None:
    for _ in range(2):
        with QuickFakeMode():
            x = torch.empty(4, 6)
            views = [x.view(24), x.t(), x[1:], *x.split(2), *x.unbind(1), x.detach()]
            assert {each.untyped_storage()._cdata for each in views} == {x.untyped_storage()._cdata}
            assert x.add_(1) is x
            assert (x + 1).untyped_storage()._cdata != x.untyped_storage()._cdata


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_outputs_given_by_name_stay_themselves_and_grow() -> None:
    for _ in range(3):
        with QuickFakeMode(), LiveBytes():
            x, small, right = torch.empty(4, 6), torch.empty(2, 2), torch.empty(4, 4)
            assert torch.mm(x, x.t(), out=right) is right
            assert torch.mm(x, x.t(), out=small) is small
            assert small.shape == (4, 4) and small.untyped_storage().nbytes() == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_have_shapes_in_each_type(dtype: torch.dtype) -> None:
    """Those of experts, in both passes; torch's own rule refuses all but bf16."""

    def facts() -> list[tuple[Any, ...]]:
        rows, experts = torch.ones(8, 16, dtype=dtype), torch.ones(2, 16, 24, dtype=dtype)
        leaves = [each.requires_grad_() for each in (rows, experts)]
        product = F.grouped_mm(*leaves, offs=torch.tensor([3, 8], dtype=torch.int32))
        grads = torch.autograd.grad(product.square().sum(), leaves)
        return [(each.dtype, each.shape, each.stride()) for each in (product, *grads)]

    computed = facts()
    with QuickFakeMode():
        assert [facts(), facts()] == [computed, computed]
        with pytest.raises(RuntimeError):
            F.grouped_mm(
                torch.ones(8, 15, dtype=dtype), torch.ones(2, 16, 24, dtype=dtype), offs=torch.ones(2).int()
            )
