"""Directories of published text classifiers, made here: weights and a tokenizer of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import processors

WORDS = ["good", "bad", "dull", "fine", "film", "a", "the", "was", "and", "very", "unbearable", "plot"]
LABELS = ["bad", "good"]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, "vocab_size": 320}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", SIZES | {"pad_token_id": 0}),
    # Positions are counted from the id of padding, and the vocabulary has rows that no token has.
    "roberta": ("roberta", SIZES | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
    "distilbert": (
        "distilbert",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 320},
    ),
    # Its tokenizer has no padding; the end of a text takes its place.
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 320}),
    "llama": ("llama", SIZES | {"num_key_value_heads": 1, "bos_token_id": 1, "pad_token_id": 0}),
}


def word_pieces() -> tuple[Any, dict[str, str]]:
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(WORDS, tokenizers.trainers.WordPieceTrainer(vocab_size=90, special_tokens=names))
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    given = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return made, given | {"mask_token": "[MASK]"}


def byte_pairs(kind: str) -> tuple[Any, dict[str, str]]:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    names = {
        "roberta": ["<s>", "<pad>", "</s>"],
        "gpt2": ["<|endoftext|>"],
        "llama": ["<pad>", "<s>", "</s>"],
    }
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    wanted = {"vocab_size": 300, "special_tokens": names[kind], "initial_alphabet": alphabet}
    made.train_from_iterator(WORDS, tokenizers.trainers.BpeTrainer(**wanted))
    if kind == "gpt2":
        return made, {"eos_token": "<|endoftext|>"}
    ends = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    template = "<s> $A </s>" if kind == "roberta" else "<s> $A"
    made.post_processor = processors.TemplateProcessing(template, special_tokens=ends)
    return made, {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def folder_of(
    kind: str,
    folder: Path,
    *,
    labels: list[str] | None = None,
    auto: str = "AutoModelForSequenceClassification",
    **changes: Any,
) -> Path:
    """Write a directory with random weights for `labels`; none: as of a model without a head for classes."""
    made, special = word_pieces() if kind[-4:] == "bert" and kind != "roberta" else byte_pairs(kind)
    longest = {} if kind == "gpt2" else {"model_max_length": 62}
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])]
    options: dict[str, Any] = {"tokenizer_object": made, "model_input_names": inputs, **special, **longest}
    transformers.PreTrainedTokenizerFast(**options).save_pretrained(folder)
    name, values = KINDS[kind]
    if labels is not None:
        numbers = {n: k for k, n in enumerate(labels)}
        changes |= {"id2label": dict(enumerate(labels)), "label2id": numbers}
    config = transformers.AutoConfig.for_model(name, **{**values, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, "AutoModel" if labels is None else auto).from_config(config)
    with torch.no_grad():
        for weight in model.parameters():  # logits that differ between texts
            weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return folder


def lines(count: int = 60) -> list[dict[str, str]]:
    """Texts whose label is a word in them; some of them long."""
    rows = []
    for n in range(count):
        word = ("bad", "good")[n % 3 == 0]
        filler = " and very fine plot" * (n % 7) + f" {n} été"
        rows.append({"text": f"The film was {word}{filler}", "label": word})
    return rows


def tagged_lines(count: int = 60) -> list[dict[str, Any]]:
    """Words with tags; some texts are long, and a character has several tokens."""
    rows = []
    for n in range(count):
        words = ["The", "unbearable", "plot", "was", ("bad", "good")[n % 3 == 0], f"été{n}"]
        words += ["dull"] * (2 * (n % 9))
        rows.append({"tokens": words, "tags": ["B-X" if word[0] in "pué" else "O" for word in words]})
    return rows


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
