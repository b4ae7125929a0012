"""Recorded facts of every shipped configuration that a plan depends on, so that planning builds no model.

    python -m tests.contract.plan_facts NAME...      records them in tests/fixtures/plan_facts.json.gz

A configuration of data that are read needs them in data/, some text in data/text_files among them.

Memory is recorded for two sizes of a micro-batch and taken to be linear in between and beyond.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lib import kconf
from lib.config import Config, config_from_values
from lib.plan.fitting import MemoryEstimator, Parts, StepSettings
from lib.plan.gpus import parse_gpu
from lib.plan.sharding import shares
from lib.plan.types import Branch, Layout, ModelFacts, StageFacts, Weight

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "fixtures" / "plan_facts.json.gz"
SHIPPED = sorted(path.name for path in (ROOT / "defconfigs").iterdir() if path.is_file())


def config_of(name: str) -> Config:
    loaded = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides={})
    return config_from_values(loaded.values)


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))
    return found


def facts_of(name: str) -> ModelFacts:
    data = dict(recorded()[name]["facts"])
    if data["units"] is not None:
        data["units"] = tuple(
            tuple(Weight(tuple(shape), trainable) for shape, trainable in unit) for unit in data["units"]
        )
    if data.get("stages") is not None:
        ends = {
            end: tuple(Weight(tuple(each["shape"]), each["trainable"]) for each in data["stages"][end])
            for end in ("first", "last")
        }
        data["stages"] = StageFacts(**data["stages"] | ends)
    if data["branches"] is not None:
        first, second = (Branch(**branch) for branch in data["branches"])
        data["branches"] = (first, second)
    return ModelFacts(**data)


def estimator_of(name: str, facts: ModelFacts) -> MemoryEstimator:
    (small, of_small), (large, of_large) = recorded()[name]["memory"]

    def estimate(step: StepSettings) -> Parts:
        factors: Mapping[str, float] = {}
        if step.layout is not None and step.layout.world > 1 and facts.units is not None:
            factors = shares(facts.units, step.layout)
        slope = (step.micro_batch - small) / (large - small)
        parts = {part: of_small[part] + slope * (of_large[part] - of_small[part]) for part in of_small}
        return {part: round(size * factors.get(part, 1)) for part, size in parts.items()}

    return estimate


def main() -> None:
    from train.planning.memory_estimate import MemoryTraces
    from train.training_data import describe_training_data

    hardware = parse_gpu("h100-80g")
    found = recorded() if FILE.exists() else {}
    for name in sys.argv[1:]:
        config = config_of(name)
        data = describe_training_data(config, root=ROOT, log=print)
        unit = (config.norm_batch or 1) if data.facts.has_batchnorm else 1
        predict = MemoryTraces(config, data).predictor(hardware)
        step = StepSettings(
            device="cuda",
            several_devices=True,
            accumulates=True,
            norm_batch=unit if data.facts.has_batchnorm else 0,
            precision="bf16",
            channels_last=config.channels_last,
            compile=False,
            layout=Layout(strategy="single", world=1, shard=1),
        )
        memory = [
            (size, dict(predict(dataclasses.replace(step, micro_batch=size)))) for size in (unit, 2 * unit)
        ]
        facts = dataclasses.asdict(data.facts)
        if facts["units"] is not None:
            facts["units"] = [
                [(weight["shape"], weight["trainable"]) for weight in unit] for unit in facts["units"]
            ]
        found[name] = {"facts": facts, "memory": memory}
        print(f"{name}: {memory}")
    FILE.write_bytes(gzip.compress(json.dumps(found, sort_keys=True).encode(), mtime=0))


if __name__ == "__main__":
    main()
