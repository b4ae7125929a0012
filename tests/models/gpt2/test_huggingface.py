"""GPT-2's weights in the layout of Hugging Face transformers: names, shapes, the same function."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.data.types import TextClassSpec
from lib.errors import ConfigError
from lib.nn.model_code import build_model, load_layout
from lib.nn.weights import read_weights
from lib.runs.weight_files import WeightFiles
from models.gpt2.huggingface import configuration, from_huggingface, save, to_huggingface
from models.gpt2.model import GPT2, TextClassifier
from tests.support.tokens import text_spec

OPTIONS: dict[str, Any] = {
    "size": "custom",
    "layers": 2,
    "heads": 2,
    "width": 16,
    "bias": True,
    "dropout": 0.0,
    "pad_vocab": 1,
    "init_std": 0.02,
}
VOCAB, BLOCK = 13, 8
TOKENS = torch.randint(0, VOCAB, (3, BLOCK), generator=torch.Generator().manual_seed(0))


def model_of(*, seed: int = 0, noise: bool = True, **changes: Any) -> GPT2:
    """With biases and scales that make a difference."""
    model = build_model("gpt2", OPTIONS | changes, text_spec(vocab_size=VOCAB, block_size=BLOCK), seed=seed)
    assert isinstance(model, GPT2)
    if noise:
        random = torch.Generator().manual_seed(seed + 100)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=random)
    return model


def shapes_there(layers: int, width: int) -> dict[str, tuple[int, ...]]:
    """As published for GPT-2: linear layers have inputs first."""
    block = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }
    names: dict[str, tuple[int, ...]] = {"wte.weight": (VOCAB, width), "wpe.weight": (BLOCK, width)}
    names |= {f"h.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}
    names |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {f"transformer.{name}": shape for name, shape in names.items()}


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"pad_vocab": 32}])
def test_names_and_shapes_are_those_of_the_layout(changes: dict[str, Any]) -> None:
    tensors = to_huggingface(model_of(**changes))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes_there(2, 16)
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"pad_vocab": 32}])
def test_written_and_read_it_is_the_same_model(changes: dict[str, Any], prefix: str) -> None:
    model, other = model_of(**changes), model_of(seed=1, **changes)
    tensors = {prefix + name.removeprefix("transformer."): t for name, t in to_huggingface(model).items()}
    from_huggingface(other, tensors)
    assert torch.equal(other(TOKENS), model(TOKENS))
    # A model with biases takes what one without has written.
    from_huggingface(whole := model_of(seed=2), tensors)
    torch.testing.assert_close(whole(TOKENS), model(TOKENS))


def test_weights_are_transposed_not_reshaped() -> None:
    model = model_of()
    written = to_huggingface(model)["transformer.h.1.mlp.c_fc.weight"]
    assert torch.equal(written.t(), model.backbone.blocks[1].mlp_in.weight)  # type: ignore[index, union-attr]


def altered(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = {name.removeprefix("transformer."): t for name, t in to_huggingface(model_of()).items()}
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    return tensors


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ln_f.bias": None}, "ln_f.bias is missing"),
        ({"h.2.ln_1.bias": torch.zeros(16)}, "h.2.ln_1.bias is not known"),
        ({"h.0.mlp.c_fc.weight": torch.zeros(64, 16)}, r"h.0.mlp.c_fc.weight is \(64, 16\), not \(16, 64\)"),
        ({"lm_head.weight": torch.zeros(VOCAB, 16)}, "lm_head.weight is not the embedding"),
    ],
)
def test_other_weights_are_refused_and_change_nothing(changes: dict[str, Any], told: str) -> None:
    model = model_of(seed=1)
    before = model(TOKENS)
    with pytest.raises(ConfigError, match=told):
        from_huggingface(model, altered(**changes))
    assert torch.equal(model(TOKENS), before)


def test_of_more_positions_the_first_are_taken() -> None:
    longer = torch.cat([to_huggingface(model_of())["transformer.wpe.weight"], torch.ones(5, 16)])
    model = model_of(seed=1)
    from_huggingface(model, altered(**{"wpe.weight": longer}))
    assert torch.equal(model(TOKENS), model_of()(TOKENS))
    with pytest.raises(ConfigError, match=r"wpe.weight is \(3, 16\), not \(8, 16\)"):
        from_huggingface(model, altered(**{"wpe.weight": longer[:3]}))


@pytest.mark.parametrize(
    "tokens",
    [{"vocab_size": VOCAB + 1, "pad": VOCAB}, {"vocab_size": VOCAB, "pad": 2, "published": True}],
    ids=["padding after the tokens", "padding among them"],
)
def test_a_classifier_takes_the_backbone_and_is_not_written(tokens: dict[str, Any]) -> None:
    spec = TextClassSpec(name="t", block_size=BLOCK, classes=3, **tokens)
    model = build_model("gpt2", OPTIONS, spec, seed=1)
    assert isinstance(model, TextClassifier)
    head = model.head.weight.clone()
    from_huggingface(model, to_huggingface(model_of()))
    torch.testing.assert_close(model.backbone(TOKENS), model_of().backbone(TOKENS))
    assert torch.equal(model.head.weight, head)
    with pytest.raises(ConfigError, match="a classifier of texts cannot be written"):
        to_huggingface(model)  # type: ignore[arg-type]


def test_what_is_no_weight_is_passed_over() -> None:
    mask, tied = torch.ones(1, 1, BLOCK, BLOCK), to_huggingface(model_of())["transformer.wte.weight"]
    model = model_of(seed=1)
    from_huggingface(model, altered(**{"h.0.attn.bias": mask, "lm_head.weight": tied}))
    assert torch.equal(model(TOKENS), model_of()(TOKENS))


def test_biases_have_no_place_in_a_model_without_them() -> None:
    with pytest.raises(ConfigError, match=r"is not zero, and there is no place for it"):
        from_huggingface(model_of(bias=False), to_huggingface(model_of()))


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"safetensors is not installed.*pip install safetensors"):
        save(model_of(), str(tmp_path / "model.safetensors"))


def test_only_models_with_a_layout_are_exported() -> None:
    assert load_layout("gpt2").save is save
    with pytest.raises(ConfigError, match="the weights of lenet5 have no layout"):
        load_layout("lenet5")


def test_a_file_holds_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the extra safetensors is not installed")
    path, other = tmp_path / "model.safetensors", model_of(seed=1)
    save(model_of(), str(path))
    from_huggingface(other, read_weights(WeightFiles(path=path, files=(path,))))
    assert torch.equal(other(TOKENS), model_of()(TOKENS))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"pad_vocab": 32}])
def test_transformers_makes_the_same_of_it(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = model_of(**changes)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**configuration(model))).eval()
    missing, unexpected = theirs.load_state_dict(to_huggingface(model), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    theirs.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS), rtol=1e-5, atol=1e-5)
        # And the other way round, from weights that were drawn there.
        fresh = transformers.GPT2LMHeadModel(transformers.GPT2Config(**configuration(model))).eval()
        whole = model_of(seed=3)
        from_huggingface(whole, fresh.state_dict())
        torch.testing.assert_close(fresh(TOKENS).logits, whole(TOKENS), rtol=1e-5, atol=1e-5)
