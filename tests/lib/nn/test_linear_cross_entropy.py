"""Cross-entropy of a linear head: torch's values and gradients, in the memory of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lib.memory.simulation import simulation
from lib.nn import IGNORED
from lib.nn import linear_cross_entropy as module
from lib.nn.linear_cross_entropy import chunk_rows, linear_cross_entropy

ROWS, WIDTH, CLASSES, PADDED = 50, 4, 37, 40


@pytest.fixture(autouse=True, params=[(rows, kind) for rows in (1, 7, 1000) for kind in ("cpu", "cuda")])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many chunks as the head asks for, few, and one; a row of softmax at a time, and all; as on a GPU."""
    rows, kind = request.param
    monkeypatch.setattr(module, "_ROWS", rows)
    monkeypatch.setattr(module, "CPU_ELEMENTS", CLASSES * rows)
    monkeypatch.setattr(module, "kernels_for", lambda _: kind)


def case(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[list[Tensor | None], Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (PADDED, WIDTH), (PADDED,)]
    x, weight, offset = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes)
    targets = torch.randint(0, CLASSES, (ROWS,), generator=random)
    targets[[2, ROWS - 1]] = IGNORED
    made = [x, weight, offset] if bias else [x, weight, None]
    return [None if each is None else each.to(dtype).requires_grad_() for each in made], targets


def plain(leaves: list[Tensor | None], targets: Tensor) -> Tensor:
    """The same loss from all logits."""
    x, weight, bias = leaves
    assert x is not None and weight is not None
    return F.cross_entropy(F.linear(x, weight, bias)[:, :CLASSES], targets, reduction="sum")


def chunked(leaves: list[Tensor | None], targets: Tensor) -> Tensor:
    x, weight, bias = leaves
    assert x is not None and weight is not None
    return linear_cross_entropy(x, weight, targets, bias, classes=CLASSES)


def gradients(loss: Tensor, leaves: list[Tensor | None], factor: float = 1.0) -> list[Tensor | None]:
    (factor * loss).backward()
    return [None if each is None else each.grad for each in leaves]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]
)
def test_value_and_gradients_are_torchs(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    leaves, targets = case(dtype, bias=bias)
    exact = [None if each is None else each.detach().double().requires_grad_() for each in leaves]
    loss = chunked(leaves, targets)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = plain(exact, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    found = gradients(loss, leaves, -0.5)
    for mine, theirs, leaf in zip(found, gradients(expected, exact, -0.5), leaves, strict=True):
        if leaf is not None:
            assert mine is not None and theirs is not None and mine.dtype == dtype
            torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=10 * tolerance)
    assert found[0] is not None and not found[0][2].any()
    assert found[1] is not None and not found[1][CLASSES:].any()


def test_under_autocast_products_are_in_half_precision_and_sums_are_not() -> None:
    leaves, targets = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked(leaves, targets)
    rounded = [None if each is None else each.detach().bfloat16().float().requires_grad_() for each in leaves]
    assert loss.item() == pytest.approx(plain(rounded, targets).item(), rel=4e-3)
    assert loss.item() != plain(leaves, targets).item()
    assert all(each is not None and each.dtype == torch.float32 for each in gradients(loss, leaves))


@pytest.mark.parametrize("trained", list(product([True, False], repeat=3)))
def test_only_what_is_trained_has_a_gradient(trained: tuple[bool, ...]) -> None:
    leaves, targets = case()
    for leaf, wanted in zip(leaves, trained, strict=True):
        assert leaf is not None
        leaf.requires_grad_(wanted)
    loss = chunked(leaves, targets)
    assert loss.item() == pytest.approx(plain(leaves, targets).item(), rel=1e-13)
    assert loss.requires_grad == any(trained)
    if any(trained):
        assert tuple(each is not None for each in gradients(loss, leaves)) == trained


def test_a_second_backward_pass_is_an_error() -> None:
    leaves, targets = case()
    loss = chunked(leaves, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_logits_of_any_size_do_not_overflow() -> None:
    x = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    loss = linear_cross_entropy(x, torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0]), classes=2)
    loss.backward()
    assert loss.item() == 2e4
    assert x.grad is not None and x.grad.tolist() == [[0.0], [-2.0]]


def test_without_rows_the_loss_is_zero() -> None:
    (x, *head), targets = case()
    assert x is not None and chunked([x[:0], *head], targets[:0]).item() == 0


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that came out of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_there_are_never_logits_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROWS", 1)

    def largest(loss: Callable[[list[Tensor | None], Tensor], Tensor]) -> int:
        with Largest() as seen:
            loss(*case()).backward()
        return seen.elements

    chunk = chunk_rows(ROWS, WIDTH, classes=CLASSES)
    assert largest(plain) == ROWS * PADDED
    assert largest(chunked) == max(PADDED * chunk, ROWS * WIDTH) < ROWS * PADDED


@pytest.mark.parametrize(
    ("width", "classes", "chunks"), [(768, 50257, 32), (4096, 128256, 16), (128, 65, 1), (64, 256, 2)]
)
def test_the_number_of_chunks_is_the_heads(
    width: int, classes: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS", 1024)
    assert chunk_rows(64 * 1024, width, classes=classes) == 64 * 1024 // chunks
    assert chunk_rows(1024, width, classes=classes) == 1024
    assert chunk_rows(5000, 768, classes=50257) == 1250  # not below 1024


class Kernels(TorchDispatchMode):
    """Counts kernels, and the bytes of logits and what has their size that these read and write."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.launched, self.byte_count = elements, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or function.namespace == "prim" or name.startswith(("empty", "detach")):
            return result
        self.launched += 1
        taken = [args[1]] if name == "copy_" else [] if name == "zero_" else tree_leaves((args, kwargs))
        if name not in ("gather", "scatter_"):  # which touch one number of a row
            of_logits = [each for each in [*taken, *tree_leaves(result)] if isinstance(each, Tensor)]
            self.byte_count += sum(each.nbytes for each in of_logits if each.numel() >= self.elements)
        return result


def kernels_of(chunks: int, *, rows: int, width: int, classes: int) -> Kernels:
    """Those of a loss under autocast on simulated CUDA, whose head has 128 rows of padding."""
    with simulation("cuda"):
        x = torch.empty(chunks * rows, width, requires_grad=True)
        weight = torch.empty(classes + 128, width, requires_grad=True)
        targets = torch.zeros(chunks * rows, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16), Kernels(rows * classes) as counted:
            linear_cross_entropy(x, weight, targets, classes=classes)
    return counted


@pytest.mark.parametrize("_chunks", [(1024, "cuda"), (1024, "other")], indirect=True)
def test_a_chunk_on_a_gpu_takes_few_kernels_and_bytes() -> None:
    shape = {"rows": 1024, "width": 64, "classes": 50_000}
    few, many = kernels_of(2, **shape), kernels_of(4, **shape)
    kernels = (many.launched - few.launched) / 2
    byte_count = (many.byte_count - few.byte_count) / (2 * 1024 * 50_000)
    if module.kernels_for(torch.empty(0)) == "cuda":
        assert kernels <= 12 and byte_count <= 16
    else:  # as it was before there were kernels for it
        assert kernels > 12 and byte_count > 30
