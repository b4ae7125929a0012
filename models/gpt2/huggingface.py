"""Conversion of GPT-2 weights to and from the layout of Hugging Face transformers (GPT2LMHeadModel).

That layout stores linear layers as (inputs, outputs), the transpose of torch's, omits the tied head, and has
a bias in every layer, which is written as 0 if the model has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lib.errors import ConfigError, foremost
from models.gpt2.model import GPT2, TextClassifier

PREFIX = "transformer."
MODULES = {  # of a block: Hugging Face's name -> ours
    "ln_1": "norm1",
    "attn.c_attn": "qkv",
    "attn.c_proj": "attention_out",
    "ln_2": "norm2",
    "mlp.c_fc": "mlp_in",
    "mlp.c_proj": "mlp_out",
}
# Some versions also stored the attention mask, and the head a second time.
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias")
HEAD = "lm_head.weight"


def to_huggingface(model: GPT2) -> dict[str, Tensor]:
    """Return copies of the weights on the CPU by Hugging Face's names, without the padding of the vocabulary.

    Raises ConfigError for a text classifier.
    """
    if not isinstance(model, GPT2):
        raise ConfigError(
            "a classifier of texts cannot be written in the layout of Hugging Face transformers",
            why="theirs reads the last token, and this one the mean over all",
        )
    return {PREFIX + name: tensor for name, tensor in _tensors(model).items()}


def _tensors(model: GPT2 | TextClassifier) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, module, part in _parts(model):
        weight: Tensor | None = getattr(module, part)
        if weight is None:
            weight = torch.zeros(len(getattr(module, "weight")))  # noqa: B009
        if name == "wte.weight":
            weight = weight[: _text_tokens(model)]
        if isinstance(module, nn.Linear):
            weight = weight.t()  # of a bias the same
        tensors[name] = weight.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors


def from_huggingface(model: GPT2 | TextClassifier, tensors: Mapping[str, Tensor]) -> None:
    """Load weights by Hugging Face's names, with or without their prefix, into `model`.

    Positions beyond those of `model` are ignored; the head of a classifier is not changed. Raises
    ConfigError, before anything is changed, if the weights do not fit the architecture.
    """
    given = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    given = {name: tensor for name, tensor in given.items() if not name.endswith(NOT_WEIGHTS)}
    head = given.pop(HEAD, None)
    if head is not None and "wte.weight" in given and not torch.equal(head, given["wte.weight"]):
        raise ConfigError(f"{HEAD} is not the embedding", why="GPT-2's head is tied to it")
    if "wpe.weight" in given:
        given["wpe.weight"] = given["wpe.weight"][: model.backbone.position.num_embeddings]
    expected = _tensors(model)
    faults = [f"{name} is missing" for name in sorted(expected.keys() - given.keys())]
    faults += [f"{name} is not known" for name in sorted(given.keys() - expected.keys())]
    faults += [
        f"{name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    faults += [
        f"{name} is not zero, and there is no place for it (CONFIG_GPT2_BIAS=n)"
        for name, module, part in _parts(model)
        if getattr(module, part) is None and name in given and bool(given[name].any())
    ]
    if faults:
        what, findings = "these are not the weights of this GPT-2", foremost(faults, "faults")
        raise ConfigError(what, why=faults[0], findings=findings)
    with torch.no_grad():
        for name, module, part in _parts(model):
            parameter = getattr(module, part)
            if parameter is None:
                continue
            tensor = given[name].t() if isinstance(module, nn.Linear) else given[name]
            if name == "wte.weight":
                parameter[_text_tokens(model) :].zero_()
                parameter = parameter[: _text_tokens(model)]
            parameter.copy_(tensor)


def configuration(model: GPT2) -> dict[str, Any]:
    """Return the content of config.json."""
    backbone = model.backbone
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocab_size,
        "n_positions": backbone.position.num_embeddings,
        "n_embd": backbone.position.embedding_dim,
        "n_layer": len(backbone.blocks),
        "n_head": backbone.heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": backbone.norm.eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": backbone.dropout.rate,
        "resid_pdrop": backbone.dropout.rate,
        "tie_word_embeddings": True,
    }


def save(model: GPT2, path: str) -> None:
    """Write the weights to a safetensors file. Raises ConfigError without the package safetensors."""
    weights = to_huggingface(model)
    require_package().torch.save_file(weights, path, metadata={"format": "pt"})


def _text_tokens(model: GPT2 | TextClassifier) -> int:
    """Return the vocabulary size without the padding that a classifier may have after it."""
    return model.vocab_size if isinstance(model, GPT2) else model.text_tokens


def _parts(model: GPT2 | TextClassifier) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (Hugging Face's name without prefix, our module, weight or bias), absent biases included."""
    backbone = model.backbone
    yield "wte.weight", backbone.token, "weight"
    yield "wpe.weight", backbone.position, "weight"
    for number, block in enumerate(backbone.blocks):
        for theirs, ours in MODULES.items():
            for part in ("weight", "bias"):
                yield f"h.{number}.{theirs}.{part}", getattr(block, ours), part
    for part in ("weight", "bias"):
        yield f"ln_f.{part}", backbone.norm, part


def require_package() -> Any:
    """Return the package safetensors. Raises ConfigError where it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "the package safetensors is not installed",
            why="it is an extra: only weights for Hugging Face transformers are kept in it",
            todo="install it, for example with .venv/bin/pip install safetensors",
        ) from error
    return safetensors
