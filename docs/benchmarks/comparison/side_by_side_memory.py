"""Print what four ways of predicting memory say about published training runs.

    pip install transformers==5.23.0 peft==0.21.2 accelerate==1.15.0 torch-kitsune==0.7.0
    PYTHONPATH=. python docs/benchmarks/comparison/side_by_side_memory.py

accelerate: what `accelerate estimate-memory` prints as "Training using Adam", by its own functions, of the
same model made from its configuration (the command itself reads the hub). kitsune: predict_memory and
estimate_lora_memory. formula: bytes for a weight in Hugging Face's documentation, which adds "activations"
without a number: 16 in fp32, 18 in mixed precision, 8 in pure half precision; with LoRA 2 (in four bits a
half) and 16 for a trained one. Seconds are CPU time of one process, without imports.
"""

import time
import tomllib

from scripts.bench.timm_models import import_timm

import_timm()  # accelerate imports it, and torchvision with it

import published_memory as runs  # noqa: E402
import torch  # noqa: E402
from accelerate.commands.estimate import estimate_training_usage  # noqa: E402
from accelerate.utils import calculate_maximum_sizes  # noqa: E402
from kitsune.predict import estimate_lora_memory, predict_memory  # noqa: E402
from kitsune.predict.lora_estimator import LoRAConfig  # noqa: E402

GIB = 2**30
NAMES = ("BERT-large", "Llama-3.2-3B, all", "TinyLlama QLoRA, T4, 2048", "Qwen-1.8B LoRA", "SmolLM2")
PURE = {"fp32": "float32", "fp16": "float16", "bf16-true": "bfloat16", "fp16-true": "float16"}


def on_meta(run, models):
    with torch.device("meta"):
        return runs.build(run, models)


def by_accelerate(run, models):
    total, _ = calculate_maximum_sizes(on_meta({**run, "precision": "fp32"}, models))
    return max(estimate_training_usage(total, PURE[run["precision"]]).values())


def by_kitsune(run, models):
    plain = {name: value for name, value in run.items() if name not in ("rank", "four_bit")}
    model, shape, dtype = on_meta(plain, models), (run["tokens"],), PURE[run["precision"]]
    if "rank" in run:
        config = LoRAConfig(rank=run["rank"], use_qlora=run.get("four_bit", False))
        return estimate_lora_memory(model, shape, run["batch"], dtype, config).total_bytes
    return predict_memory(model, shape, run["batch"], dtype, "adamw", training=True).total_bytes


def by_formula(run, models):
    model = on_meta({**run, "four_bit": False}, models)
    weights = sum(each.numel() for each in model.parameters())
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    if "rank" in run:
        return (0.5 if run.get("four_bit") else 2) * weights + 16 * trained
    return {"fp32": 16, "fp16": 18}.get(run["precision"], 8) * weights


def main():
    file = tomllib.loads(runs.Path(runs.__file__).with_suffix(".toml").read_text())
    ways = {"ours": runs.predicted, "accelerate": by_accelerate, "kitsune": by_kitsune, "formula": by_formula}
    print(f"| run | published, GiB | {' | '.join(ways)} |\n|---|---|---|---|---|---|")
    for run in file["runs"]:
        if "figure" not in run or not run["name"].startswith(NAMES):
            continue
        published = run["figure"] * runs.UNITS[run["unit"]] / GIB
        cells = [f"{run['name']}", f"{published:.1f}"]
        for way in ways.values():
            start = time.process_time()
            size = way(run, file["models"]) / GIB
            cells.append(f"{size:.1f} ({size / published - 1:+.0%}), {time.process_time() - start:.1f} s")
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
