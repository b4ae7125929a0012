"""make randconfig, many times: files lose nothing, every option is reached, all plan or say why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lib.config import config_from_values
from lib.errors import ConfigError, ToolkitError
from lib.kconf import from_environment, load, write
from lib.kconf.extremes import make_extreme
from lib.kconf.reader import read_text
from lib.kconf.resolve import load_file, override, typed_value
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import has_prompt, load_own_tree
from lib.plan import plan
from lib.plan.fitting import Parts, StepSettings
from lib.plan.types import ModelFacts
from tests.contract.options import can_be_set
from tests.support.configs import load_hardware
from tests.support.examples import merged, told_of

ROOT = Path(__file__).resolve().parents[2]
MANY = [60, pytest.param(1000, marks=pytest.mark.long)]
MOST = 10_000
MACHINES = ("h100-80g-70g-free-x4", "rtx3090", "cpu-8g")
PARTS, PART = 4, 5  # of the sample that trains; the workers of the tests share them

# What keeps a run of two steps small, where a configuration lets it be set.
SMALL = {
    "DEVICE_CPU": "y",
    "BUDGET_STEPS": "y",
    "MAX_STEPS": "2",
    "WARMUP_STEPS": "1",
    "WARMUP_SAMPLES": "32",
    "TARGET_EFFECTIVE_BATCH": "32",
    "BATCH_SIZE": "32",
    "DATA_LIMIT": "64",
    "HOLDOUT": "32",
    "COMPILE_MANUAL": "y",
    "COMPILE_MODEL": "n",
    "LOG_INTERVAL_STEPS": "1",
    "BLOCK_SIZE": "16",
    "GPT2_SIZE_CUSTOM": "y",
    "GPT2_LAYERS": "1",
    "GPT2_HEADS": "1",
    "GPT2_WIDTH": "8",
    "RESNET18_WIDTH": "8",
    "RESNET50_WIDTH": "8",
    "VIT_WIDTH": "8",
    "VIT_HEADS": "1",
    "VIT_LAYERS": "1",
    "RESNET_BK_LAYERS": "1",
    "RESNET_BK_WIDTH": "16",
    "SINK_WANDB": "n",  # packages of others
    "SINK_TRACKIO": "n",
    "SINK_TENSORBOARD": "n",
} | merged("SMALLEST")
# In place of data that are not there: texts for the models that read them, images for the others.
EMBEDDED = (
    "markov",
    *(name for names in told_of("EMBEDDED") for name in names),
    "scenes",
    "digits",
    "friedman",
)


@pytest.fixture(scope="module")
def trees() -> tuple[Any, Any]:
    """One to write with, one to read into."""
    return load_own_tree(ROOT), load_own_tree(ROOT)


def read(tree: Any, text: str) -> dict[str, str]:
    configuration = StrictLoad(tree)
    configuration.add(read_text(text.encode(), name="file"))
    assert configuration.finish().findings == ()
    return values(tree)


def values(tree: Any) -> dict[str, str]:
    return {symbol.name: symbol.str_value for symbol in tree.unique_defined_syms}


def facts_of(config: Any, *, has_batchnorm: bool) -> ModelFacts:
    return ModelFacts(
        name=config.model,
        parameters=10**6,
        bytes_per_sample=10**6,
        train_size=50_000,
        has_batchnorm=has_batchnorm,
    )


def predicted(trial: StepSettings) -> Parts:
    return {"activations": 1_000_000 * trial.micro_batch}


def planned(tree: Any, machine: str) -> str:
    """What becomes of the configuration in `tree` on a machine: nothing to say, or a reason."""
    try:
        config = config_from_values(
            {one.name: typed_value(one) for one in tree.unique_defined_syms if not one.choice}
        )
        facts = facts_of(config, has_batchnorm=bool(tree.syms["MODEL_HAS_BATCHNORM"].tri_value))
        plan(config, load_hardware(machine), facts, predict=predicted)
    except ConfigError as error:
        assert "\n" not in str(error) and str(error)
        return str(error)
    return ""


def visible(tree: Any) -> set[str]:
    return {symbol.name for symbol in tree.unique_defined_syms if symbol.visibility}


@pytest.mark.slow
@pytest.mark.parametrize("many", MANY)
def test_random_configurations_lose_nothing_and_plan_or_say_why(trees: tuple[Any, Any], many: int) -> None:
    writer, reader = trees
    texts: set[str] = set()
    plans = dict.fromkeys(MACHINES, 0)
    for seed in range(many):
        make_extreme(writer, "randconfig", {}, seed=seed)
        wanted = values(writer)
        full = write.full_text(writer)
        texts.add(full)
        assert read(reader, full) == wanted, seed
        assert read(reader, write.minimal_text(writer)) == wanted, seed
        for machine in MACHINES:
            plans[machine] += not planned(writer, machine)
    assert len(texts) > 0.99 * many
    # Devices are drawn too: about a quarter ask for one that a machine has not.
    assert all(count > 0.03 * many for count in plans.values()), plans


@pytest.mark.long
def test_every_option_is_reached(trees: tuple[Any, Any]) -> None:
    """Some need several others, which about one configuration in a thousand has."""
    tree, _ = trees
    missing = {one.name for one in tree.unique_defined_syms if has_prompt(one) and can_be_set(one)}
    for seed in range(MOST):
        make_extreme(tree, "randconfig", {}, seed=seed)
        missing -= visible(tree)
        if not missing:
            break
    assert missing == set()


def small(tree: Any, file: Path) -> dict[str, str]:
    """Those of SMALL that the configuration in `file` lets be set, and data that are there."""
    chosen: dict[str, str] = {}
    load_file(tree, file)
    data = tree.syms["DATASET"].str_value
    of_package = tree.syms["MODEL_TIMM"].tri_value or tree.syms["MODEL_HUGGINGFACE"].tri_value
    candidates = [("MODEL_RESNET18", "y")] if of_package else []
    if data not in EMBEDDED or of_package:
        candidates += [(f"DATASET_{name.upper()}", "y") for name in EMBEDDED]
    # What this machine, or a model without linear layers, would refuse.
    candidates += [("ADAPT_FULL", "y")]
    candidates += [("PRECISION_AUTO", "y")] if tree.syms["PRECISION_FP16"].tri_value else []
    candidates.append(("RESET_HEAD", "n"))  # of initial weights, which there are none
    if tree.syms["AUTO_METHOD_PROBE"].tri_value:  # measuring has tests of its own
        candidates.append(("AUTO_METHOD_TABLE", "y"))
    if not tree.syms["MODEL_BY_TIER"].tri_value:  # it would be refused
        candidates.append(("TIER_NONE", "y"))
    for name, value in [*candidates, *SMALL.items()]:
        if name.startswith("DATASET_") and any(each.startswith("CONFIG_DATASET_") for each in chosen):
            continue
        if not tree.syms[name].visibility:  # most are of other models: it would be refused
            continue
        try:
            override(load_file(tree, file)[0], {**chosen, f"CONFIG_{name}": value})
        except ConfigError:
            override(load_file(tree, file)[0], chosen)
            continue
        chosen[f"CONFIG_{name}"] = value
    return chosen


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_of_them_trains_or_says_why(
    part: int, trees: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train.commands import train

    file = tmp_path / ".config"
    monkeypatch.setenv("KCONFIG_CONFIG", str(file))
    done, reasons = 0, []
    for seed in range(part * PART, (part + 1) * PART):
        configuration, _ = make_extreme(trees[0], "randconfig", {}, seed=seed)
        file.write_text(write.full_text(configuration.tree))
        file.write_text(load(root=ROOT, config_file=file, overrides=small(trees[1], file)).text)
        try:
            requested = from_environment(ROOT)
            assert train(requested, root=ROOT, runs=tmp_path / "runs", started=time.monotonic()) == 0
            done += 1
        except ToolkitError as error:
            assert "\n" not in str(error)
            reasons.append(f"{seed}: {error}")
    assert done, reasons
