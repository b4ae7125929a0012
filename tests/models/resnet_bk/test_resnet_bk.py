"""ResNet-BK: its recursions against a dense inverse, what they keep to and cost, and what a model counts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.memory.facts import saved_bytes
from lib.nn.model_code import build_model
from lib.scaling.costs import Counts, count
from models.resnet_bk.model import Options, UpstreamBlock, ValueMixer
from models.resnet_bk.scan import both_sides, continued_fraction, linear_recurrence
from tests.support.tokens import text_spec
from tests.support.work import ElementsComputed

ROOT = Path(__file__).resolve().parents[3]
LENGTH = 32
WIDTHS, LAYERS = (64, 128, 256, 512), (4, 8, 12, 16)
# Of the published code with its vocabulary of 30,000 words and 128 positions.
PUBLISHED = {
    (64, 4): Counts(total=4_146_120, nonembedding=267_928, active=69_016),
    (128, 8): Counts(total=9_846_368, nonembedding=2_119_984, active=537_904),
    (256, 12): Counts(total=28_073_848, nonembedding=12_651_080, active=3_186_248),
    (512, 16): Counts(total=98_105_744, nonembedding=67_290_208, active=16_884_832),
}


def options_of(form: str = "value", **changes: Any) -> dict[str, Any]:
    ratio = 2 if form == "upstream" else 4
    given = {"form": form, "layers": 2, "width": 16, "ffn_ratio": ratio, "dropout": 0.0, "allow_leak": True}
    return given | changes


def random_matrix(length: int, *, seed: int = 0, eta: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """a (T,), k (T,) and eta (T,), float64."""
    random = torch.Generator().manual_seed(seed)
    a, k, etas = (torch.rand(length, generator=random, dtype=torch.float64) for _ in range(3))
    return 5 * (a - 0.5), 2 * k, 0.02 + etas if eta is None else torch.full_like(etas, eta)


def dense(a: Tensor, k: Tensor, eta: Tensor) -> Tensor:
    """H - zI with -sqrt(k) beside the diagonal."""
    beside = -k[1:].sqrt().to(torch.complex128)
    return torch.diag(torch.complex(a, -eta)) + torch.diag(beside, 1) + torch.diag(beside, -1)


@pytest.mark.parametrize("seed", range(5))
def test_every_entry_is_that_of_the_inverse_of_its_leading_block(seed: int) -> None:
    a, k, eta = random_matrix(LENGTH, seed=seed)
    matrix = dense(a, k, eta)
    expected = torch.stack([torch.linalg.inv(matrix[:t, :t])[-1, -1] for t in range(1, LENGTH + 1)])
    found = continued_fraction(torch.complex(a, -eta), k)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_both_sides_are_the_diagonal_of_the_whole_inverse() -> None:
    a, _, eta = random_matrix(LENGTH)
    matrix = dense(a, torch.ones_like(a), eta)
    found = both_sides(torch.complex(a, -eta))
    assert (found - torch.linalg.inv(matrix).diag()).abs().max() <= 1e-12


def test_carried_values_solve_the_system_of_every_leading_block() -> None:
    a, k, _ = random_matrix(LENGTH)
    eta = torch.full_like(a, 0.2)
    v = torch.randn(LENGTH, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    g = continued_fraction(torch.complex(a, -eta), k)
    u = linear_recurrence((eta.sqrt() * g)[:, None] * v, k.sqrt() * g)
    matrix = dense(a, k, eta)
    for t in range(1, LENGTH + 1):
        last = torch.linalg.solve(matrix[:t, :t], v[:t].to(matrix.dtype))[-1]
        torch.testing.assert_close(u[t - 1], last * 0.2**0.5, rtol=1e-11, atol=1e-11)
        assert (u[t - 1].abs() <= v[:t].norm(dim=0) / 0.2**0.5).all()


def test_a_mixer_carries_its_values_as_documented() -> None:
    """By a dense solve of what its own weights make of the input; heads begin from 1 to 0.03."""
    torch.manual_seed(0)
    mixer = ValueMixer(16).double()
    resolvent, x = mixer.resolvent, torch.randn(1, 6, 16, dtype=torch.float64)
    eta = resolvent.log_eta.exp()
    assert (eta[0].item(), eta[-1].item()) == pytest.approx((1.0, 0.03))
    a, k = 2.5 * torch.tanh(resolvent.potential(x)[0]), torch.sigmoid(resolvent.coupling(x)[0] + 1)
    v = mixer.values(x)[0].view(6, 4, 4).to(torch.complex128)
    carried = torch.zeros_like(v)
    for head, t in itertools.product(range(4), range(6)):
        matrix = dense(a[:, head], k[:, head], eta[head].expand(6))[: t + 1, : t + 1]
        carried[t, head] = eta[head].sqrt() * torch.linalg.solve(matrix, v[: t + 1, head])[-1]
    torch.testing.assert_close(mixer(x)[0], mixer.out(torch.view_as_real(carried).flatten(1)))


def test_the_original_block_is_what_was_published() -> None:
    torch.manual_seed(0)
    options = Options(form="upstream", layers=1, width=8, ffn_ratio=2, dropout=0.0, allow_leak=True)
    block, x = UpstreamBlock(options, 0).double(), torch.randn(5, 8).double()
    experts, normed = block.experts, block.norm(x)
    chosen = experts.router(normed).softmax(-1).max(-1).indices.tolist()
    assert len(set(chosen)) > 1
    f = torch.stack(
        [experts.out[one](F.relu(experts.into[one](row))) for one, row in zip(chosen, normed, strict=True)]
    )
    matrix = torch.diag(block.potential(f)[:, 0].clamp(-3, 3) - 2 - 1j)
    matrix += torch.diag(torch.ones(4), 1) + torch.diag(torch.ones(4), -1)
    diagonal = torch.view_as_real(torch.linalg.inv(matrix).diag())
    torch.testing.assert_close(block(x[None])[0], x + f + block.scale * block.out(diagonal))


def test_gradients_are_derivatives() -> None:
    a, k, eta = (part.view(8, 2).clone().requires_grad_() for part in random_matrix(16))
    v = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()

    def carried(a: Tensor, k: Tensor, eta: Tensor, v: Tensor) -> Tensor:
        g = continued_fraction(torch.complex(a, -eta), k)
        return torch.view_as_real(linear_recurrence(g[..., None] * v, k.sqrt() * g))

    assert torch.autograd.gradcheck(carried, (a, k, eta, v))
    assert torch.autograd.gradcheck(
        lambda a, eta: torch.view_as_real(both_sides(torch.complex(a, -eta))), (a, eta)
    )


@pytest.mark.slow
@pytest.mark.parametrize("eta", [1.0, 0.1, 0.01])
def test_long_texts_neither_overflow_nor_vanish(eta: float) -> None:
    a, k, etas = (part.float() for part in random_matrix(16_384, eta=eta))
    g = continued_fraction(torch.complex(a, -etas), k)
    assert g.isfinite().all() and (g.imag > 0).all() and (g.abs() * eta <= 1 + 1e-5).all()
    u = linear_recurrence((eta**0.5 * g)[:, None], k.sqrt() * g)
    assert u.isfinite().all() and u[-100:].abs().min() > 0


@pytest.mark.parametrize("eta", [1.0, 0.3, 0.1])
def test_influence_decays_by_the_known_factor(eta: float) -> None:
    a, k = torch.zeros(400, dtype=torch.float64, requires_grad=True), torch.ones(400, dtype=torch.float64)
    g = continued_fraction(torch.complex(a, torch.full_like(k, -eta)), k)
    (gradient,) = torch.autograd.grad(g[-1].imag + g[-1].real, a)
    ratio = (gradient[380] / gradient[382]).abs().item() ** 0.5
    assert ratio == pytest.approx((((eta**2 + 4) ** 0.5 - eta) / 2) ** 2, rel=1e-3)


def test_work_is_linear_in_the_length() -> None:
    def elements(length: int) -> int:
        a, k, eta = (torch.rand(length, 4, 8).requires_grad_() for _ in range(3))
        v = torch.rand(length, 4, 8, 1)
        with ElementsComputed() as computed:
            g = continued_fraction(torch.complex(a, -eta - 0.1), k)
            linear_recurrence(g[..., None] * v, k.sqrt() * g).abs().sum().backward()
        return computed.count

    assert elements(4096) / elements(512) == pytest.approx(8, rel=0.1)


def test_the_original_models_no_language_unless_told_to() -> None:
    with pytest.raises(ConfigError, match=r"cannot model a language.*CONFIG_RESNET_BK_ALLOW_LEAK=y"):
        build_model("resnet_bk", options_of("upstream", allow_leak=False), text_spec(), seed=0)
    assert isinstance(build_model("resnet_bk", options_of("upstream"), text_spec(), seed=0), nn.Module)


def test_a_width_that_no_heads_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="CONFIG_RESNET_BK_WIDTH=18 is not a multiple of 4"):
        build_model("resnet_bk", options_of(width=18), text_spec(), seed=0)


@pytest.mark.parametrize("form", ["value", "features", "upstream"])
def test_every_form_learns_from_a_gradient_that_is_right(form: str) -> None:
    """Against differences of the loss, along one direction of all weights at once."""
    model = build_model("resnet_bk", options_of(form), text_spec(), seed=0).double()
    tokens = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        return model(tokens).square().mean()

    loss().backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    random = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=random, dtype=p.dtype) for p in parameters]
    expected = sum((p.grad * d).sum().item() for p, d in zip(parameters, direction, strict=True))
    values = []
    for step in (1e-8, -2e-8):
        with torch.no_grad():
            for parameter, change in zip(parameters, direction, strict=True):
                parameter += step * change
        values.append(loss().item())
    assert (values[0] - values[1]) / 2e-8 == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "layers"), list(itertools.product(WIDTHS, LAYERS)))
def test_parameters_of_the_grid(width: int, layers: int) -> None:
    """Against formulas written down from the layers, the published figures, and what the document says."""

    def counts(form: str, vocab_size: int) -> Counts:
        spec = text_spec(vocab_size=vocab_size, block_size=128)
        options = options_of(form, width=width, layers=layers)
        return count(lambda: build_model("resnet_bk", options, spec, seed=0))

    blocks = layers * (46 * width**2 + 43 * width) // 4 + 2 * width
    assert counts("value", 256) == Counts(total=256 * width + blocks, nonembedding=blocks, active=blocks)

    experts = 4 * width**2 + 3 * width
    blocks = layers * (4 * experts + 10 * width + 6) + 2 * width
    total = blocks + (30_000 + 128) * width + 30_000 * (width + 1)
    found = counts("upstream", 30_000)
    assert found == Counts(total=total, nonembedding=blocks, active=blocks - layers * 3 * experts)
    assert found == PUBLISHED.get((width, layers), found)
    own = counts("value", 256)
    figures = (own.total, own.active, found.total, found.nonembedding, found.active)
    row = " | ".join([str(width), str(layers), *(f"{figure:,}" for figure in figures)])
    assert f"| {row} |" in (ROOT / "docs" / "scaling.md").read_text()


def test_a_token_passes_the_active_parameters() -> None:
    """Of a single token, the weights of one expert have a gradient, and those of three have none."""

    def build() -> nn.Module:
        return build_model("resnet_bk", options_of("upstream", layers=1), text_spec(), seed=0)

    model, counts = build(), count(build)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    idle = sum(
        module.weight.numel() + module.bias.numel()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".experts." in name and module.weight.requires_grad
        if module.bias.grad is None or not module.bias.grad.any()
    )
    assert counts.nonembedding - counts.active == idle


def test_a_longer_text_keeps_memory_in_proportion() -> None:
    model = build_model("resnet_bk", options_of(), text_spec(block_size=8), seed=0)
    short, long = (saved_bytes(model, torch.zeros(2, length, dtype=torch.long)) for length in (64, 128))
    assert 1.9 < long / short < 2.1
