"""Small models of timm and transformers as a run has them, with dropout of every kind, and data for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lib.config import Config
from lib.data import ArrayPart, Dataset
from lib.data.types import TextClassSpec, TextSpec, TokenPart
from tests.support.training import random_data, small_config
from train.training_data import TrainingData, make_training_data

PAD, TOKENS = 256, 12
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_DROPS = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
_VIT = "patch_size=8 depth=2 embed_dim=16 num_heads=2"
# Name -> name and options of timm, or a configuration of transformers.
TIMM = {
    "vit": (
        "vit_tiny_patch16_224",
        f"{_VIT} drop_rate=0.2 drop_path_rate=0.3 attn_drop_rate=0.2 proj_drop_rate=0.1 pos_drop_rate=0.1",
    ),
    "resnet": ("resnet10t", "drop_rate=0.2"),
    "levit": (
        "levit_128s",
        "embed_dim=(16,24,32) num_heads=(1,1,1) depth=(1,1,1) drop_path_rate=0.2",
    ),
}
HUGGING_FACE: dict[str, dict[str, Any]] = {
    "hf-vit": {"model_type": "vit", "image_size": 32, "patch_size": 8, **_SIZES, **_DROPS},
    "hf-resnet": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 2]},
    "hf-bert": {"model_type": "bert", "vocab_size": 300, "max_position_embeddings": 16, **_SIZES, **_DROPS},
    "hf-gpt2": {"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2},
}
_DECODER = {**_SIZES, "vocab_size": 300, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
CAUSAL: dict[str, dict[str, Any]] = {
    "lm-llama": {"model_type": "llama", "attention_dropout": 0.2, **_DECODER},
    "lm-gemma3": {"model_type": "gemma3_text", "sliding_window": 4, **_DECODER},
    "lm-gpt2": HUGGING_FACE["hf-gpt2"],
}
SINGLE = {"lm-llama", "lm-gemma3"}  # norms and positions in single precision, whatever the weights are in
HUGGING_FACE |= CAUSAL
NAMES = [*TIMM, *HUGGING_FACE]
WITH_NORMS = {"resnet", "levit", "hf-resnet"}
PIXELS = {"levit": 80}


def is_text(name: str) -> bool:
    return name in ("hf-bert", "hf-gpt2", *CAUSAL)


def config_of(name: str, place: Path, **changes: Any) -> Config:
    """Three steps of SGD; a directory of transformers is written below `place`."""
    if name in TIMM:
        model, (chosen, options) = "timm", TIMM[name]
        own: dict[str, Any] = {"name": chosen, "options": options}
    else:
        model, folder = "huggingface", place / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(HUGGING_FACE[name]))
        own = {
            "dir": str(folder),
            "input": "causal" if name in CAUSAL else "text" if is_text(name) else "images",
        }
    more = {"norm_batch": 2, "grad_checkpoint": "none", "auto_method": "predict", "recommended_target": 8}
    more |= {"augment": None} if is_text(name) else {}
    more |= {"task": "lm", "task_options": {}, "block_size": TOKENS} if name in CAUSAL else {}
    return small_config(model, **{"model_options": own, **more, **changes})


def data_of(name: str, config: Config) -> TrainingData:
    if not is_text(name):
        pixels = PIXELS.get(name, 32)
        return random_data(config, shape=(3, pixels, pixels), train_size=32, test_size=8)
    random = torch.Generator().manual_seed(0)
    if name in CAUSAL:
        tokens = torch.randint(0, PAD, (34 * TOKENS,), generator=random).to(torch.uint16).numpy()
        parts = TokenPart(tokens, TOKENS, shifted=True), TokenPart(tokens[: 8 * TOKENS], TOKENS)
        text = TextSpec(name="random", vocab_size=PAD, block_size=TOKENS, unit="token")
        return make_training_data(config, Dataset(text, *parts, "random"))

    def part(size: int) -> ArrayPart:
        tokens = torch.randint(0, PAD, (size, TOKENS), generator=random)
        tokens[::2, TOKENS // 2 :] = PAD
        return ArrayPart(tokens.numpy(), torch.randint(0, 3, (size,), generator=random).numpy())

    spec = TextClassSpec(name="random", vocab_size=PAD + 1, block_size=TOKENS, classes=3, pad=PAD)
    return make_training_data(config, Dataset(spec=spec, train=part(32), test=part(8), source="random"))
