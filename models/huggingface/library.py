"""What classifiers and language models of Hugging Face transformers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lib.data.huggingface_tokenizer import FILES, HuggingFaceTokenizer
from lib.errors import ConfigError
from lib.memory.simulation import simulated
from lib.nn.dropout import Dropout
from lib.nn.model_directory import AGAIN, HOST, open_directory, path_of, stored_shapes, values_of
from lib.nn.packages import import_extra
from lib.units import some_of

# Torch notes once which functions make tensors. Done while transformers replaces some, it would never again
# find torch.linspace, and models of this process on the meta device would have tensors in memory.
with torch.device("meta"):
    torch.empty(0)

EXTRA = "transformers"  # the package that it needs
SYMBOL = "CONFIG_HUGGINGFACE_DIR"
_PROBE = "Hello world"
_TOKENS_OF_PROBE = {"byte": [*_PROBE.encode()], "gpt2": [15496, 995]}  # by CONFIG_TOKENIZER
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")


def check_length(theirs: Any, block_size: int, folder: str) -> None:
    """Raise ConfigError where texts are longer than the model has positions."""
    longest = getattr(theirs, "max_position_embeddings", None) or block_size
    if block_size > longest:
        raise ConfigError(
            f"CONFIG_BLOCK_SIZE={block_size} is too long for {folder}",
            why=f"it has max_position_embeddings={longest}",
            todo=f"set CONFIG_BLOCK_SIZE={longest}",
        )


def check_tokenizer(directory: str, kind: str, name: str | None, folder: str | None) -> None:
    """Raise ConfigError unless texts become tokens of the weights in `directory`, which may have none.

    kind: CONFIG_HUGGINGFACE_INPUT. name: CONFIG_TOKENIZER, None for images and tokens that are ready-made.
    folder: CONFIG_TOKENIZER_DIR. Two tokenizers of one size would train on tokens that mean something else.
    """
    home, _, files = open_directory(directory, symbol=SYMBOL)
    if not files or name is None or not any((home / each).is_file() for each in FILES):
        return
    own = path_of(folder or directory)
    if name == "huggingface" and own == home:
        return
    theirs = HuggingFaceTokenizer(home)
    if name != "huggingface":
        if theirs.encode(_PROBE) == _TOKENS_OF_PROBE.get(name):
            return
        what = f'CONFIG_TOKENIZER_{name.upper()}=y is not the tokenizer of {SYMBOL}="{directory}"'
        todo = "set CONFIG_TOKENIZER_HUGGINGFACE=y"
        if kind == "causal":
            todo += " and CONFIG_DATASET_CHAT=y, for conversations in JSON Lines"
            todo += "; texts with labels need CONFIG_HUGGINGFACE_INPUT_TEXT=y"
        raise ConfigError(what, why="its weights are for its own tokens", todo=todo)
    given = {number: token for token, number in HuggingFaceTokenizer(own).inner.get_vocab().items()}
    own_tokens = sorted((number, token) for token, number in theirs.inner.get_vocab().items())
    if differ := [(number, token) for number, token in own_tokens if given.get(number) != token]:
        number, token = differ[0]
        found = f"token {number} is {given.get(number)!r} in place of {token!r}"
        raise ConfigError(
            f'CONFIG_TOKENIZER_DIR="{folder}" is another tokenizer than that of {SYMBOL}="{directory}"',
            why=f"{len(differ):,} of {len(own_tokens):,} tokens differ: {found}",
            todo="leave CONFIG_TOKENIZER_DIR out; if the weights are for its tokens all the same, copy the "
            "model's directory and put its files there",
        )


def check_vocabulary(theirs: Any, spec: Any, folder: str, files: Sequence[str]) -> None:
    """Raise ConfigError unless the tokens of data are those of the directory, if it has weights."""
    rows, tokens, end = theirs.vocab_size, 0, None
    if files and not simulated():
        own = HuggingFaceTokenizer(folder)
        tokens, end = own.vocab_size, own.end
    if not tokens <= spec.vocab_size <= rows:
        why = f"the data have {spec.vocab_size:,}, the model {rows:,}"
        why += f" and its tokenizer {tokens:,}" * bool(tokens)
        todo = "use data in the tokens of the model, or a directory without weights"
        if tokens and end is None and spec.vocab_size == tokens + 1:  # of the end of an answer
            todo = f"name its eos_token in {folder}/tokenizer_config.json: answers end with it"
        raise ConfigError(f"{spec.name} is not in the tokens of {folder}", why=why, todo=todo)


def note(files: Sequence[str], differing: str = "") -> str:
    """Return where the weights are from. differing: of `loaded`."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"weights of {files[0]}{more}{differing}" if files else "the directory has no weights"


def class_names(theirs: Any) -> tuple[str, ...]:
    """Return the names of classes in a configuration, () where transformers only numbered them."""
    names = tuple(name for _, name in sorted(theirs.id2label.items()))
    return () if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names


def head_fault(model: nn.Module, head: str, folder: str, files: Sequence[str]) -> str:
    """Return why the weights in `folder` have not the module `head` of `model`, by their names and shapes."""
    stored = stored_shapes(folder, files)
    for name, weight in model.get_submodule(head).named_parameters(prefix=head):
        if name not in stored:
            return f"{name} is missing"
        if stored[name] != tuple(weight.shape):
            return f"{name} is {stored[name]}, and the model has {tuple(weight.shape)}"
    return ""


def attention_dropout(theirs: Any) -> float:
    """Return the share of attention weights that is zeroed in training."""
    return max((getattr(theirs, name, 0) or 0 for name in _ATTENTION_DROPOUT), default=0)


def loaded(
    kind: Any,
    theirs: Any,
    folder: str,
    attention: str,
    *,
    dtype: torch.dtype = torch.float32,
    counts: Callable[[Any, str], bool] = lambda *_: True,
) -> Any:
    """Return a model of class `kind` with the weights in `folder`; its `differing` names those that are not.

    counts: of the model and a name: whether that weight must be there. Raises ConfigError for weights that
    cannot be read, are missing, left over or of another shape.
    """
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    options |= {
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        "attn_implementation": attention,
    }
    try:
        with HOST:
            model, info = kind.from_pretrained(folder, config=theirs, dtype=dtype, **options)
    except (OSError, RuntimeError, KeyError, import_extra("safetensors").SafetensorError) as error:
        with values_of(f"{folder}/config.json"), torch.device("meta"):
            kind._from_config(theirs, attn_implementation=attention)
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"the weights in {folder} cannot be read", why=why, todo=AGAIN) from error
    faults, new, unused = [], list[str](), list[str]()
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = sorted(each if isinstance(each, str) else each[0] for each in info.get(what, ()))
        wrong = [key for key in found if counts(model, key)]
        (unused if what == "unexpected_keys" else new).extend(key for key in found if key not in wrong)
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            faults.append(f"{len(wrong)} {what.partition('_')[0]} ({wrong[0]}{more})")
    if faults:
        todo = "give the weights of this config.json, and data of the model's own image size or vocabulary"
        raise ConfigError(f"the weights in {folder} do not fit", why=", ".join(faults), todo=todo)
    named = ("new", new), ("not used", unused)
    texts = (f"; {which}: {some_of(names)}" for which, names in named if names)
    vars(model)["differing"] = "".join(texts)
    return model


def key_attention(model: nn.Module, rate: float) -> None:
    """Give the modules that compute attention a dropout by sample."""
    named = [one for one in model.modules() if "Attention" in type(one).__name__]
    inner = [one for one in named if not any("Attention" in type(child).__name__ for child in one.children())]
    for site, module in enumerate(inner):
        module.add_module("keyed_dropout", Dropout(rate, site=site))


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention (N, heads, T, D) whose dropout is a function of the sample, as transformers calls it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale
    for bias in (position_bias, attention_mask):
        scores = scores if bias is None else scores + bias[..., : key.shape[-2]]
    dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = module.keyed_dropout(torch.softmax(scores, dim=-1, dtype=dtype).to(query.dtype))
    return (weights @ value).transpose(1, 2).contiguous(), weights
