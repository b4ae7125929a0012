"""Files beside weights for Hugging Face transformers, and the program that loads them there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.config import Config
from lib.data.types import Dataset, ImageSpec
from lib.errors import os_errors
from lib.nn.model_directory import copy_tokenizer
from train.export_card import first_weights

PROCESSOR = "preprocessor_config.json"
_LOAD = """import torch, transformers
model = transformers.{kind}.from_pretrained(".", dtype=torch.float32).eval()
"""
_CAUSAL = """
def predict(inputs):
    return model(torch.from_numpy(inputs)).logits.detach().numpy()
"""
_TOKENS = """
def predict(inputs):
    tokens = torch.from_numpy(inputs)
    logits = model(input_ids=tokens, attention_mask=(tokens != {pad}).long()).logits
    return logits.softmax(dim=-1).detach().numpy()
"""
_TEXTS = """tokenizer = transformers.AutoTokenizer.from_pretrained(".")

def classify(texts):
    given = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
    return [model.config.id2label[int(place)] for place in model(**given).logits.argmax(dim=-1)]
"""
_PIXELS = """mean, std = torch.tensor({mean})[:, None, None], torch.tensor({std})[:, None, None]

def predict(inputs):
    pixels = (torch.from_numpy(inputs) / 255 - mean) / std
    return model(pixel_values=pixels).logits.softmax(dim=-1).detach().numpy()
"""
_PROCESSED = """processor = transformers.AutoImageProcessor.from_pretrained(".")

def predict(inputs):
    given = processor([*inputs], input_data_format="channels_first", return_tensors="pt")
    return model(**given).logits.softmax(dim=-1).detach().numpy()
"""


def program_of(spec: Mapping[str, Any], *, has_processor: bool) -> str:
    """Return the lines that load an exported model in its folder. spec: of the data, as JSON has it."""
    if "classes" not in spec:
        return _LOAD.format(kind="AutoModelForCausalLM") + _CAUSAL
    if "pad" in spec:
        texts = _TEXTS if spec["published"] else ""
        return _LOAD.format(kind="AutoModelForSequenceClassification") + texts + _TOKENS.format_map(spec)
    pixels = {"mean": [*spec["mean"]], "std": [*spec["std"]]}
    images = _PROCESSED if has_processor else _PIXELS.format_map(pixels)
    return _LOAD.format(kind="AutoModelForImageClassification") + images


def write_settings(
    folder: Path, settings: dict[str, Any], *, labels: list[str], config: Config, dataset: Dataset
) -> None:
    """Write config.json with `settings` and the names of classes, and what reads inputs, to `folder`."""
    if labels:
        settings |= {"id2label": dict(enumerate(labels)), "label2id": {n: k for k, n in enumerate(labels)}}
    _write(folder / "config.json", settings)
    spec: Any = dataset.spec
    # Images of a folder are cropped and resized as no fields of this file say: the model card does.
    if isinstance(spec, ImageSpec) and spec.channels == 3 and config.image_size is None:
        _write(folder / PROCESSOR, _processor(spec))
    tokenizer = dataset.tokenizer
    source = tokenizer and tokenizer.to_json().get("folder")
    if source is None and not labels:
        # A language model: its first weights had to be in the tokens of the data.
        source = first_weights(config)
    if source is None or isinstance(spec, ImageSpec):
        return
    copy_tokenizer(str(source), folder)
    if getattr(spec, "published", False):
        file = folder / "tokenizer_config.json"
        with os_errors("read"):
            known = json.loads(file.read_bytes()) if file.is_file() else {}
        if known.get("pad_token") is None:
            known["pad_token"] = tokenizer.decode([spec.pad])  # type: ignore[union-attr]
        _write(file, known | {"model_max_length": spec.block_size, "padding_side": "right"})


def _processor(spec: ImageSpec) -> dict[str, Any]:
    """Return an image processor that only normalises: the images of such data have one size."""
    normalised = {"do_normalize": True, "image_mean": [*spec.mean], "image_std": [*spec.std]}
    scaled = {"do_rescale": True, "rescale_factor": 1 / 255}
    return {"image_processor_type": "ViTImageProcessor", "do_resize": False, **scaled, **normalised}


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
