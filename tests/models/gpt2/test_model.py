"""GPT-2: what its options change, and what they must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import TextClassSpec, TextSpec
from lib.errors import ConfigError
from lib.nn.attention import causal_attention, full_attention
from lib.nn.cross_entropy import cross_entropy
from lib.nn.model_code import build_model
from models.gpt2.model import GPT2, TextClassifier
from tests.support.tokens import text_spec

VOCAB, BLOCK = 13, 8
OPTIONS: dict[str, Any] = {
    "size": "custom",
    "layers": 3,
    "heads": 2,
    "width": 16,
    "bias": True,
    "dropout": 0.0,
    "pad_vocab": 1,
    "init_std": 0.02,
}
SPEC = text_spec(vocab_size=VOCAB, block_size=BLOCK)


def model_of(spec: TextSpec | TextClassSpec = SPEC, **changes: Any) -> nn.Module:
    return build_model("gpt2", OPTIONS | changes, spec, seed=0)


def tokens(rows: int = 4) -> Tensor:
    return torch.randint(0, VOCAB, (rows, BLOCK), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    logits = model(tokens())
    cross_entropy(logits.flatten(0, 1), tokens().roll(-1, 1).flatten()).sum().backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def test_rows_that_fill_up_the_vocabulary_are_neither_predicted_nor_counted() -> None:
    plain, padded = model_of(), model_of(pad_vocab=32)
    state = plain.state_dict()
    table = padded.state_dict()["backbone.token.weight"]
    assert table.shape == (32, 16)
    # Rows that would win every prediction if they took part.
    state["backbone.token.weight"] = torch.cat([state["backbone.token.weight"], 100 * torch.ones(19, 16)])
    padded.load_state_dict(state)
    assert padded(tokens()).shape == (4, BLOCK, VOCAB)
    torch.testing.assert_close(padded(tokens()), plain(tokens()))
    one, other = gradients(plain), gradients(padded)
    assert not other["backbone.token.weight"][VOCAB:].any()
    torch.testing.assert_close(other["backbone.token.weight"][:VOCAB], one["backbone.token.weight"])


def test_weights_begin_as_gpt2s_do() -> None:
    model = model_of(text_spec(vocab_size=500, block_size=64), layers=8, heads=4, width=128)
    deviations = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    for name, deviation in deviations.items():
        residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
        assert deviation == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    # The tied head leans towards the input itself, so that is not asked for.
    loss = F.cross_entropy(model(torch.arange(64)[None])[0], torch.arange(64) + 100).item()
    assert loss == pytest.approx(torch.tensor(500.0).log().item(), abs=0.1)


def test_the_head_is_the_embedding() -> None:
    model = model_of()
    assert isinstance(model, GPT2)
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert shapes.count((VOCAB, 16)) == 1
    with torch.no_grad():
        model.backbone.token.weight[5] *= 2
        x = model.backbone(tokens())
    torch.testing.assert_close(model(tokens())[..., 5], x @ model.backbone.token.weight[5])


def test_shorter_texts_are_taken_and_say_the_same() -> None:
    model = model_of()
    torch.testing.assert_close(model(tokens()[:, :3]), model(tokens())[:, :3])


def test_without_biases_there_are_none() -> None:
    assert not [name for name, _ in model_of(bias=False).named_parameters() if "bias" in name]


def test_a_width_that_heads_cannot_share_is_told() -> None:
    with pytest.raises(ConfigError, match="CONFIG_GPT2_WIDTH=16 is not a multiple of CONFIG_GPT2_HEADS=3"):
        model_of(heads=3)


def test_a_text_with_a_label_is_read_to_its_end_and_no_further() -> None:
    pad = VOCAB - 1
    model = model_of(TextClassSpec(name="t", vocab_size=VOCAB, block_size=BLOCK, classes=3, pad=pad)).double()
    assert isinstance(model, TextClassifier)
    texts = tokens(3) % pad
    whole = model(texts)
    assert whole.shape == (3, 3)
    padded = texts.clone()
    padded[1, 5:], padded[2, 1:] = pad, pad
    expected = [whole[0], model(texts[1:2, :5])[0], model(texts[2:3, :1])[0]]
    torch.testing.assert_close(model(padded), torch.stack(expected))
    assert not torch.allclose(model(padded)[1], whole[1])
    mean = model.backbone(texts[1:2, :5]).mean(dim=1)
    torch.testing.assert_close(model(padded)[1:2], model.head(mean))
    assert model(torch.full((1, BLOCK), pad)).isfinite().all()


def test_a_block_is_the_published_formula() -> None:
    model = model_of(layers=1).double()
    assert isinstance(model, GPT2)
    [block] = model.backbone.blocks
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, BLOCK, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def normed(x: Tensor, norm: Any) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias

    q, k, v = (normed(x, block.norm1) @ block.qkv.weight.T + block.qkv.bias).chunk(3, dim=-1)
    mixed = [causal_attention(*(part[:, None, :, h : h + 8] for part in (q, k, v)))[:, 0] for h in (0, 8)]
    after = x + torch.cat(mixed, -1) @ block.attention_out.weight.T + block.attention_out.bias
    h = normed(after, block.norm2) @ block.mlp_in.weight.T + block.mlp_in.bias
    gelu = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    expected = after + gelu @ block.mlp_out.weight.T + block.mlp_out.bias
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)


# Attention


def heads(dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 6, 4, generator=random).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attention_is_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = heads(dtype)
    scores = q @ k.mT / 2
    expected = scores.softmax(dim=-1) @ v
    torch.testing.assert_close(full_attention(q, k, v), expected, rtol=tolerance, atol=tolerance)
    expected = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(dim=-1) @ v
    torch.testing.assert_close(causal_attention(q, k, v), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("attend", "is_causal"), [(causal_attention, True), (full_attention, False)])
def test_on_a_cpu_half_precision_attends_in_single(attend: Any, is_causal: bool, autocast: bool) -> None:
    q, k, v = heads(torch.bfloat16)
    single = [part.detach().float() for part in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = attend(q, k, v)
    expected = F.scaled_dot_product_attention(*single, is_causal=is_causal).bfloat16()
    assert torch.equal(out, expected)
    half = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert not torch.equal(half, expected), "no difference"
