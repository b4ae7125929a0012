"""Model cards: what an exported model is, where it comes from, and how to load it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lib import plugin_folders
from lib.config import Config
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.chat.templates import PlainTemplate, template_of
from lib.data.types import Dataset, ImageSpec
from lib.errors import ConfigError
from lib.runs import metrics
from lib.runs.identity import EXPORTED, source_of_base
from lib.runs.metrics import NOT_METRICS
from train.export_inputs import reading
from train.stored_run import Restored
from train.summary import eval_part

UNKNOWN = "unknown"
_PATH = re.compile(
    r"(?<![\w.~:])/(?:[^\s/,;()]+/)*([^\s/,;()]+)"
)  # a card is for others: no folders of this machine

# Commands that load a format in its folder, but for huggingface. They are in the card, and export runs them.
LOADS = {
    "safetensors": """import safetensors.torch
weights = safetensors.torch.load_file("model.safetensors")  # tensors by name
""",
    "adapter": """import safetensors.torch
weights = safetensors.torch.load_file("adapter_model.safetensors")  # for PeftModel.from_pretrained(base, ".")
""",
    "pt2": """import torch
program = torch.export.load("model.pt2").module()

def predict(inputs):
    return program(torch.from_numpy(inputs)).detach().numpy()
""",
    "onnx": """import onnxruntime
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])

def predict(inputs):
    return session.run(["outputs"], {"inputs": inputs})[0]
""",
}


def earlier_facts(directory: Path) -> dict[str, Any]:
    """Return the model.json of an earlier export in `directory`, {} where there is none."""
    try:
        facts = json.loads((directory / EXPORTED).read_bytes())
    except (OSError, ValueError):  # it is no file of an export
        return {}
    return facts if isinstance(facts, dict) else {}


def check_replaceable(directory: Path, layout: str) -> None:
    """Raise ConfigError for a folder with files that are not of an earlier export in the same format."""
    files = sorted(each.name for each in directory.glob("[!.]*"))
    earlier = earlier_facts(directory).get("format")
    if files and earlier != layout:
        others = f" and {len(files) - 1} more" if files[1:] else ""
        why = (
            f"it has an export in FORMAT={earlier}"
            if str(earlier) in (*LOADS, "huggingface")
            else f"it has {files[0]}{others}"
        )
        raise ConfigError(f"DIRECTORY={directory} is in use", why=why, todo="name a new folder")


def facts_of(
    restored: Restored,
    *,
    layout: str,
    difference: float | None,
    dtype: torch.dtype,
    merged: dict[str, float] | None,
    licences: list[str],
) -> dict[str, Any]:
    """Return the content of model.json.

    dtype: of the stored weights. merged: figures after merging adapters, None without. licences: names of
    the files with those of the base.
    """
    job, dataset = restored.job, restored.data.dataset
    spec: Any = dataset.spec
    base, source = getattr(first_weights(job.config), "name", None), source_of_base(restored.run) or {}
    if base is None:  # random weights, though their configuration may have been fetched
        source = {}
    tokenizer = dict(dataset.tokenizer.to_json()) if dataset.tokenizer else None
    if tokenizer and "folder" in tokenizer:
        tokenizer["folder"] = Path(tokenizer["folder"]).name  # as in other texts for others
    return {
        "format": layout,
        "model": job.config.model,
        "task": job.config.task,
        "run": restored.run.name,
        "step": restored.step,
        "input": _input(spec, layout),
        "output": _output(spec),
        "preprocessing": _preprocessing(spec),
        "labels": labels_of(dataset),
        "spec": dataclasses.asdict(spec),  # with the normalisation, or columns and targets
        "tokenizer": tokenizer,
        "data": _PATH.sub(r"\1", dataset.source),
        "evaluation": _evaluation(restored),
        "evaluation_merged": merged,
        "evaluated_on": eval_part(job.config, dataset),
        "base_model": source.get("repository", base),
        "base_commit": source.get("commit"),
        "license": "other" if licences and not _licence(source) else _licence(source) or UNKNOWN,
        "license_files": licences,
        "trained_in": job.plan.precision,
        "stored_in": str(dtype).removeprefix("torch."),
        "largest_difference": difference,
    }


def labels_of(dataset: Dataset) -> list[str]:
    """Return the names of classes in the order of the outputs, their numbers where they have none."""
    return list(dataset.class_names or map(str, range(getattr(dataset.spec, "classes", 0))))


def _input(spec: Any, layout: str) -> str:
    if layout in ("pt2", "onnx", "huggingface") and isinstance(spec, ImageSpec):
        return f"uint8 images (N, {spec.channels}, {spec.height}, {spec.width}), pixels 0 to 255"
    if layout in ("pt2", "onnx") and hasattr(spec, "columns"):
        return (
            f"float64 rows (N, {len(spec.columns)}): numbers in their units, nan if missing; a category "
            "is its place among the values of its column"
        )
    is_padded = hasattr(spec, "pad") and not answers_in_logits(spec)
    padding = f" tokens, padded at the end with {spec.pad}" if is_padded else ""
    return f"{spec.input_dtype} (N, {', '.join(map(str, exported_shape(spec)))}){padding}"


def _preprocessing(spec: Any) -> dict[str, Any] | None:
    """Return how an image file becomes an input before it is normalised; None for other data."""
    if not isinstance(spec, ImageSpec) or spec.height != spec.width:
        return None
    return {
        "orientation": "EXIF",
        "colours": "L" if spec.channels == 1 else "RGB",
        "transparency": "white",
        "bits": 8,
        "crop": "centre square",
        "resize": [spec.height, spec.width],
        "interpolation": "bilinear",
    }


def _licence(source: Mapping[str, Any]) -> str:
    """Return the licence of fetched weights, "" where it is unknown."""
    return str(source.get("license", "")).replace(UNKNOWN, "")


def exported_shape(spec: Any) -> tuple[int, ...]:
    """Return the shape of one sample for an exported model: of one text, where runs pack several."""
    shape: tuple[int, ...] = (spec.block_size,) if hasattr(spec, "block_size") else spec.input_shape
    return shape


def answers_in_logits(spec: Any) -> bool:
    """Return True for data of language models: texts and conversations, whose tokens have a unit."""
    return hasattr(spec, "unit")


def _output(spec: Any) -> str:
    if answers_in_logits(spec):
        return f"logits of the next token (N, {spec.block_size}, {spec.vocab_size})"
    if hasattr(spec, "targets"):
        return f"numbers in the units of the targets (N, {len(spec.targets)})"
    return f"probabilities of the labels (N, {getattr(spec, 'classes', '...')})"


def _evaluation(restored: Restored) -> dict[str, float]:
    """Return the metrics of the checkpoint's step, empty where the run has none of it."""
    if not restored.run.metrics.is_file():
        return {}
    rows = metrics.rows(restored.run.metrics)
    own = [row for row in rows if row.get("kind") == "eval" and row.get("step") == restored.step]
    last = own[-1] if own else {}
    return {n: v for n, v in last.items() if n not in NOT_METRICS and isinstance(v, int | float)}


def card(facts: dict[str, Any], program: str) -> str:
    """Return the README.md of an exported model, from its `facts_of`. program: the lines that load it."""
    before, merged = (_figures(facts[name] or {}) for name in ("evaluation", "evaluation_merged"))
    figures = f"{merged}; before adapters were merged {before}" if merged else before
    licences, graph = facts["license_files"], facts["format"] in ("pt2", "onnx")
    base, commit, named = facts["base_model"], facts["base_commit"], facts["license"]
    named = "" if named in ("other", UNKNOWN) else named
    parts = (named, f"in {', '.join(licences)}" if licences else "")
    licence = ", ".join(filter(None, ("that of the base model" * any(parts), *parts)))
    difference, data = facts["largest_difference"], facts["data"]
    is_bare = facts["format"] in ("safetensors", "adapter")  # weights, whose program is not known
    rows = {
        "task": _task(facts),
        "evaluation": f"{figures or UNKNOWN} ({facts['evaluated_on']}), step {facts['step']}",
        "data": data + ("" if "SHA-256" in data else "; content hash unknown"),
        "base model": f"{base}, commit {commit}" if commit else base or "none: trained from random weights",
        "licence": f"{licence}; of the data unknown"
        if licence
        else "unknown: the run records none of its data and weights",
        "precision": f"evaluated in {facts['trained_in']}; "
        + ("these files compute in fp32" if graph else f"these weights are {facts['stored_in']}"),
        "largest difference from the run": "outputs not compared"
        if difference is None
        else f"{difference:.1e}",
        "input": f"normalised {facts['input']}" if is_bare else facts["input"],
        "output": "those of the model" if is_bare else facts["output"],
    }
    table = "\n".join(f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows.items())
    link = "\nlicense_name: that-of-the-base-model" * (facts["license"] == "other")
    link += f"\nlicense_link: {licences[0]}" if licences else ""
    link += f"\nbase_model: {base}" if commit else ""
    return f"""---
license: {facts["license"]}{link}
---
# {facts["model"]}, trained on {facts["spec"]["name"]}

Exported from run `{facts["run"]}` of Anneal. `model.json` has labels, normalisation and tokenizer.
`check.npz`, if there is one, has inputs and outputs of generated samples.

| fact | value |
|---|---|
{table}

## Load it

```python
{program}```
{reading(facts)}"""


def _task(facts: Mapping[str, Any]) -> str:
    """Return the task. A language model classifies texts by the same one."""
    return "classify (by lm)" if facts["task"] == "lm" and facts["labels"] else str(facts["task"])


def _figures(evaluation: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in evaluation.items())


def first_weights(config: Config) -> Path | None:
    """Return the file or directory of the weights that training started from; None for random ones."""
    directory = config.model_options.get("dir")
    if config.weights.initial_weights:
        return _path(config.weights.initial_weights)
    has_weights = directory and any(_path(directory).glob("*.safetensors"))
    return _path(directory) if has_weights else None


def _path(named: object) -> Path:
    return plugin_folders.ROOT / Path(str(named)).expanduser()


def copy_beside(config: Config, dataset: Dataset, folder: Path, log: Callable[[str], None]) -> list[str]:
    """Copy the licence and the notice beside the model and its first weights; log and return their names.

    A tokenizer in `folder` gets the chat template that the run was trained with, if it has none of its own.
    """
    if isinstance(dataset.spec, ChatSpec) and [*folder.glob("tokenizer*")]:
        assert dataset.tokenizer is not None
        template = template_of(dataset.tokenizer)
        if isinstance(template, PlainTemplate):
            plain = template.jinja()
            if plain is None:
                log("No chat template was written: the plain one has other tokens in transformers")
            else:
                (folder / "chat_template.jinja").write_text(plain, "utf-8")
    named = config.model_options.get("dir") or config.weights.initial_weights
    base = _path(named) if named else folder
    beside = sorted((base.parent if base.is_file() else base).glob("*"))
    found = [each for each in beside if each.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))]
    for file in found:
        shutil.copy(file, folder / file.name)
    if found:
        log(f"Copied from {base}: {', '.join(file.name for file in found)}")
    return [file.name for file in found]
