"""Every function of torch's autocast lists for CUDA, in the simulation: torch's rule gives its type.

The lists are those of the header that torch brings along, so that another version of torch is looked at anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lib.memory import predict_peak
from lib.memory.simulation import simulation

pytestmark = pytest.mark.slow

HALVES = (torch.bfloat16, torch.float16)
# Kernels of CUDA alone, which functions of this list call there: a CPU computes those functions otherwise.
INSIDE = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}


def autocast_list(name: str) -> set[str]:
    """Operators, with overloads, of a list in ATen/autocast_mode.h."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    found = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*\n)", header.read_text())
    assert found is not None
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", found[1])
    return {".".join(filter(None, entry)) for entry in entries} - INSIDE


def arguments_of(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Something that each operator of the lists takes."""

    def x(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    return {**of_vectors(x), **of_images(x)}


def of_vectors(x: Callable[..., Tensor]) -> dict[str, tuple[Any, ...]]:
    vector, matrix, cube, labels = x(8), x(8, 8), x(8, 8, 8), torch.zeros(8, dtype=torch.int64)
    unary = ("acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus "
             "prod sum linalg_vector_norm")  # fmt: skip
    pairs = ("cosine_similarity dist hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
             "binary_cross_entropy_with_logits mm matmul linalg_vecdot linear cdist atan2 "
             "tensordot pow.Tensor_Tensor")  # fmt: skip
    triples = "addmm addcdiv addcmul triplet_margin_loss cosine_embedding_loss margin_ranking_loss"
    cells = {"lstm_cell": 4, "gru_cell": 3, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}
    return {
        **dict.fromkeys(unary.split(), (vector,)),
        **dict.fromkeys(pairs.split(), (matrix, matrix)),
        **dict.fromkeys(triples.split(), (matrix, matrix, matrix)),
        "cosine_embedding_loss": (matrix, matrix, vector),
        "tensordot": (matrix, matrix, [1], [0]),
        **dict.fromkeys(("dot", "vdot"), (vector, vector)),
        **dict.fromkeys(("softmax.int", "log_softmax.int", "cumsum", "cumprod", "prod.dim_int"), (matrix, 1)),
        "sum.dim_IntList": (matrix, [1]),
        "pow.Tensor_Scalar": (vector, 1.7),
        "pow.Scalar": (1.7, vector),
        "logsumexp": (matrix, [1]),
        "renorm": (matrix, 2, 0, 1.0),
        **dict.fromkeys(("pdist", "nuclear_norm"), (matrix,)),
        "linalg_matrix_norm": (matrix, 1),
        "linalg_matrix_norm.str_ord": (matrix, "fro"),
        **dict.fromkeys(("frobenius_norm.dim", "nuclear_norm.dim"), (matrix, [0, 1])),
        **dict.fromkeys(("layer_norm", "rms_norm"), (matrix, [8], vector)),
        "native_layer_norm": (matrix, [8], vector, vector, 1e-5),
        "poisson_nll_loss": (matrix, matrix, True, False, 1e-8, 1),
        **dict.fromkeys(("nll_loss", "multi_margin_loss"), (matrix, labels)),
        **dict.fromkeys(("multilabel_margin_loss", "soft_margin_loss"), (matrix, labels.expand(8, 8))),
        "prelu": (matrix, x(1)),
        "addmv": (vector, matrix, vector),
        "addr": (matrix, vector, vector),
        "mv": (matrix, vector),
        "einsum": ("ij,jk->ik", [matrix, matrix]),
        **dict.fromkeys(("chain_matmul", "linalg_multi_dot"), ([matrix, matrix, matrix],)),
        "addbmm": (matrix, cube, cube),
        "baddbmm": (cube, cube, cube),
        "bmm": (cube, cube),
        **{
            name: (matrix, (matrix, matrix) if name == "lstm_cell" else matrix, x(8 * n, 8), x(8 * n, 8))
            for name, n in cells.items()
        },
        "bilinear": (matrix, matrix, cube, vector),
        "cross": (x(8, 3), x(8, 3)),
        "index_put": (vector, [labels], vector),
        "scatter_add": (matrix, 0, labels.expand(8, 8), matrix),
        "norm.Scalar": (vector, 2),
        "norm.ScalarOpt_dim": (matrix, 2, [1]),
    }  # fmt: skip


def of_images(x: Callable[..., Tensor]) -> dict[str, tuple[Any, ...]]:
    line, image, volume, heads = x(2, 3, 8), x(2, 3, 8, 8), x(2, 3, 8, 8, 8), x(2, 4, 8, 16)
    twice, pads, size = [1, 1], [0, 0], [16, 16, 16]
    filters, plain = x(4, 3, 2, 2), (twice, pads, twice, False, pads, 1)
    return {
        "group_norm": (image, 1),
        "nll_loss2d": (image, torch.zeros(2, 8, 8, dtype=torch.int64)),
        **dict.fromkeys(("upsample_nearest1d", "_upsample_nearest_exact1d"), (line, size[:1])),
        **dict.fromkeys(("upsample_nearest2d", "_upsample_nearest_exact2d"), (image, size[:2])),
        **dict.fromkeys(("upsample_nearest3d", "_upsample_nearest_exact3d"), (volume, size)),
        "upsample_linear1d": (line, size[:1], False),
        **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d"), (image, size[:2], False)),
        **dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), (image, size[:2], False)),
        "upsample_trilinear3d": (volume, size, False),
        "conv1d": (line, x(4, 3, 2)),
        "conv2d": (image, filters),
        "conv3d": (volume, x(4, 3, 2, 2, 2)),
        "conv_tbc": (line, x(2, 8, 4), x(4)),
        "conv_transpose1d": (line, x(3, 4, 2)),
        "conv_transpose2d.input": (image, x(3, 4, 2, 2)),
        "conv_transpose3d.input": (volume, x(3, 4, 2, 2, 2)),
        "convolution": (image, filters, x(4), *plain),
        "_convolution": (image, filters, x(4), *plain, False, False, True, True),
        "_convolution.deprecated": (image, filters, x(4), *plain, False, False, True),
        **dict.fromkeys(
            ("_scaled_dot_product_flash_attention", "scaled_dot_product_attention"), (heads, heads, heads)
        ),
        "grid_sampler": (image, x(2, 4, 4, 2), 0, 0, False),
    }  # fmt: skip


def operator(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


def made(name: str, arguments: tuple[Any, ...], **options: Any) -> torch.dtype:
    """The type of what `name` makes of `arguments`; the gradient of the first of them is made, too."""
    leaf = next(each for each in tree_leaves(arguments) if isinstance(each, Tensor))
    leaf.requires_grad_()
    first: Tensor = tree_leaves(operator(name)(*arguments, **options))[0]
    torch.autograd.backward(first.sum())
    leaf.requires_grad_(False)
    return first.dtype


def mixed(arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """`arguments` with one tensor after the other in single precision."""
    places = [n for n, each in enumerate(arguments) if isinstance(each, Tensor) and each.is_floating_point()]
    return [(*arguments[:n], arguments[n].float(), *arguments[n + 1 :]) for n in places]


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> Any:
    with simulation("cuda"), torch.autocast("cpu", dtype=request.param):
        yield request.param


def test_what_cuda_computes_in_half_precision_is(half: torch.dtype) -> None:
    single, other = arguments_of(torch.float32), arguments_of(half)
    found = {
        name: {made(name, each[name]) for each in (single, other)}
        for name in autocast_list("LOWER_PRECISION_FP") - {"_scaled_dot_product_flash_attention"}
    }
    assert set().union(*found.values()) == {half}, found
    attended = operator("_scaled_dot_product_flash_attention")(*single["scaled_dot_product_attention"])
    assert attended[0].dtype == half


def test_what_cuda_computes_in_single_precision_is(half: torch.dtype) -> None:
    arguments = arguments_of(half)
    names = autocast_list("FP32") | {"norm.Scalar", "norm.ScalarOpt_dim"}
    found = {name: made(name, arguments[name]) for name in names}
    assert found == dict.fromkeys(found, torch.float32)


def test_what_cuda_computes_in_the_widest_type_is(half: torch.dtype) -> None:
    arguments = arguments_of(half)
    names = autocast_list("PROMOTE")
    assert {name: made(name, arguments[name]) for name in names} == dict.fromkeys(names, half)
    found = {name: {made(name, each) for each in mixed(arguments[name])} for name in names}
    assert set().union(*found.values()) == {torch.float32}, found


@pytest.mark.parametrize("given", [torch.float32, torch.float64, "half"])
def test_a_type_that_is_named_counts(half: torch.dtype, given: torch.dtype | str) -> None:
    dtype = half if isinstance(given, str) else given
    for inputs in (half, torch.float32):
        arguments = arguments_of(inputs)
        for name in autocast_list("FP32_SET_OPT_DTYPE"):
            assert made(name, arguments[name]) == torch.float32, name
            if name.startswith("linalg") and dtype == half and inputs == torch.float32:
                continue  # torch does not narrow in a norm
            assert made(name, arguments[name], dtype=dtype) == dtype, name
            last = operator(name)._schema.arguments[-1]  # type: ignore[attr-defined]
            if not last.kwarg_only:
                assert made(name, (*arguments[name], dtype)) == dtype, name


def test_functions_of_torch_pass_the_type_on(half: torch.dtype) -> None:
    x = torch.empty(4, 8, dtype=half)
    for function in (F.softmax, F.log_softmax):
        assert function(x, -1, dtype=torch.float32).dtype == torch.float32
        assert function(x, -1, 3, torch.float64).dtype == torch.float64
    assert x.softmax(-1, torch.float32).dtype == torch.softmax(x, -1, dtype=torch.float32).dtype
    assert x.double().softmax(-1).dtype == torch.float64, "autocast leaves double precision alone"


def test_only_float16_has_a_kernel_that_reads_it_and_writes_single_precision() -> None:
    def peak(precision: Any) -> int:
        def loss(model: nn.Module, rows: int) -> Tensor:
            return F.softmax(model(torch.empty(rows, 8)).detach(), -1).sum() + model.weight.sum()  # type: ignore[operator]

        return predict_peak(lambda: nn.Linear(8, 2**16), loss, micro_batch=64, precision=precision).peak_bytes

    assert peak("bf16") - peak("fp16") == pytest.approx(4 * 64 * 2**16, rel=0.01)


def test_binary_cross_entropy_is_refused_as_on_cuda(half: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.empty(4), torch.empty(4, dtype=half))


def test_a_model_with_eager_attention_in_single_precision_is_predicted_for() -> None:
    """As Hugging Face's models have it, Llama among them."""

    class Attention(nn.Linear):
        def forward(self, x_BTC: Tensor) -> Tensor:
            q, k, v = (super(Attention, self).forward(x_BTC) for _ in range(3))
            weights = F.softmax(q @ k.transpose(1, 2), dim=-1, dtype=torch.float32).to(q.dtype)
            return weights @ v

    def loss(model: nn.Module, rows: int) -> Tensor:
        attended: Tensor = model(torch.empty(rows, 32, 16))
        return attended.float().mean()

    assert predict_peak(lambda: Attention(16, 16), loss, micro_batch=4).peak_bytes > 4 * 32 * 32 * 4
