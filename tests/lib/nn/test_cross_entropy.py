"""Cross-entropy in slices: the values and gradients of torch's own, and the memory of one slice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lib.nn import IGNORED
from lib.nn import cross_entropy as module
from lib.nn.cross_entropy import cross_entropy


@pytest.fixture(autouse=True, params=[1, 60, 10**6])
def _slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row, three and all of them at once."""
    monkeypatch.setattr(module, "CPU_ELEMENTS", request.param)


def case(dtype: torch.dtype, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(rows, 20, generator=random, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(0, 20, (rows,), generator=random)
    targets[2] = IGNORED
    return logits, targets


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
def test_values_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float) -> None:
    logits, targets = case(dtype)
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    losses = cross_entropy(logits, targets)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (losses * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (expected * weights).sum().backward()
    # The values are exact for the logits as they are; their gradient is rounded to its type.
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert exact.grad is not None and logits.grad is not None and logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)
    assert losses[2] == 0 and not logits.grad[2].any()


def test_part_of_a_wider_table_is_taken_where_it_lies() -> None:
    wide = torch.randn(
        7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    targets = torch.arange(7)
    cross_entropy(wide[:, :20], targets).sum().backward()
    narrow = wide[:, :20].detach().clone().requires_grad_()
    F.cross_entropy(narrow, targets, reduction="sum").backward()
    assert wide.grad is not None and narrow.grad is not None
    torch.testing.assert_close(wide.grad[:, :20], narrow.grad)
    assert not wide.grad[:, 20:].any()


def test_logits_of_any_size_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    losses = cross_entropy(logits, torch.tensor([0, 0]))
    losses.sum().backward()
    assert losses.tolist() == [0.0, 2e4]
    assert logits.grad is not None and logits.grad.tolist() == [[0.0, 0.0], [-1.0, 1.0]]


class LargestSingle(TorchDispatchMode):
    """Remembers the most elements of a single-precision tensor that came out of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


def test_no_whole_copy_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_ELEMENTS", 60)
    logits, targets = case(torch.bfloat16, rows=50)

    def largest(loss: Iterator[torch.Tensor]) -> int:
        with LargestSingle() as seen:
            next(loss).backward()
        return seen.elements

    assert largest(cross_entropy(logits, targets).sum() for _ in range(1)) <= 60
    assert largest(F.cross_entropy(logits.float(), targets) for _ in range(1)) == logits.numel()
