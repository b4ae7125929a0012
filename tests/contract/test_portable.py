"""One configuration on every recorded machine: the same effective batch and the same mathematics."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.config import config_from_values
from lib.errors import PlanError
from lib.kconf.defconfig import available, compose
from lib.kconf.resolve import typed_value
from lib.kconf.tree import load_own_tree
from lib.plan import plan
from lib.plan.fitting import Parts, StepSettings
from lib.plan.types import ModelFacts, Plan
from tests.support.configs import SMALL_IMAGE_FACTS, hardware_names, load_hardware, make_facts

ROOT = Path(__file__).resolve().parents[2]
DEFCONFIGS = [path.name for path in available(ROOT)[0]]
# Machines whose GPUs differ so much that the plan asks which to use.
NOT_KNOWN = ModelFacts(
    name="a model", parameters=None, bytes_per_sample=None, train_size=None, has_batchnorm=False
)
ASKS_WHICH = "CUDA_VISIBLE_DEVICES="


def predicted(trial: StepSettings) -> Parts:
    """What a step takes of memory: a network of 30 million parameters, 30 MB a sample."""
    return {"parameters": 480_000_000, "activations": 30_000_000 * trial.micro_batch}


def plans(spec: str) -> dict[str, Plan]:
    """Machine -> plan for the configuration `spec`; machines that ask which GPU to use are left out."""
    tree = load_own_tree(ROOT)
    compose(tree, spec)
    values = {one.name: typed_value(one) for one in tree.unique_defined_syms if not one.choice}
    config = config_from_values(values)
    facts = make_facts(config.model) if config.model in SMALL_IMAGE_FACTS else NOT_KNOWN
    found = {}
    for machine in hardware_names():
        try:
            found[machine] = plan(config, load_hardware(machine), facts, predict=predicted)
        except PlanError as error:
            assert ASKS_WHICH in str(error), f"{spec} on {machine}: {error}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFCONFIGS)
def test_a_defconfig_trains_alike_on_every_machine(name: str) -> None:
    found = plans(name)
    assert len(found) >= len(hardware_names()) - 3
    assert len({(one.effective_batch, one.norm_batch) for one in found.values()}) == 1
    assert all(one.effective_batch == one.target for one in found.values())
    # They are not alike because the machines are.
    assert len({(one.micro_batch, one.world, one.precision, one.compile) for one in found.values()}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFCONFIGS)
def test_fragments_pin_what_may_differ(name: str) -> None:
    found = plans(f"{name}+fp32+compile-off")
    assert {(one.precision, one.compile) for one in found.values()} == {("fp32", False)}


def test_the_machines_are_those_that_are_promised() -> None:
    named = " ".join(hardware_names())
    for part in (
        *("h100-80g-70g-free", "h200", "b200", "a100-40g", "a100-80g", "l40s", "a10g", "rtx3090", "rtx4090"),
        *("6g-x8", "w7900", "mi210", "mi300x", "mixed", "mig", "m2", "cpu-8g", "cpu-24g", "cpu-256g"),
        *("tpu-v4-8", "tpu-v5e-8"),
    ):
        assert part in named
