"""Full plans over models, machines, device counts and targets: exact, or refused with offers that work."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest

from lib.config import Config
from lib.errors import PlanError
from lib.plan import plan
from lib.plan.tables import cpu_table_batch, table_batch
from lib.plan.types import Hardware, ModelFacts, Plan
from tests.support.configs import hardware_names, load_hardware, make_config, make_facts

MODELS = ("lenet5", "resnet18", "resnet50")
MACHINES = [load_hardware(name) for name in hardware_names() if not name.startswith("mixed")]


def with_devices(machine: Hardware, *, world: int) -> Hardware:
    """That many of the machine's first GPU; a CPU or an Apple GPU stays one device."""
    if machine.kind in ("cpu", "mps"):
        return machine
    return dataclasses.replace(machine, devices=machine.devices[:1] * world)


def sample(random_source: random.Random) -> tuple[Config, Hardware, ModelFacts]:
    model, world = random_source.choice(MODELS), random_source.randint(1, 64)
    machine = with_devices(random_source.choice(MACHINES), world=world)
    target = random_source.choice(
        (
            random_source.randint(1, 8192),
            world * random_source.randint(1, 512),
            world * 32 * random_source.randint(1, 64),
            2 ** random_source.randint(0, 14),
        )
    )
    changes: dict[str, object] = {
        "target_effective_batch": target,
        "num_devices": world if machine.kind == "cpu" else 0,
        "compile": random_source.choice(("auto", "manual")),
        "compile_model": False,
    }
    if model != "lenet5":
        changes["norm_batch"] = random_source.choice((0, 8, 32, 32))
        if machine.kind == "xla" and not changes["norm_batch"]:
            changes["norm_batch"] = 8  # plain batch normalisation is refused there, without offers of targets
    return make_config(model, **changes), machine, make_facts(model)


def check_plan(decided: Plan, config: Config, machine: Hardware) -> None:
    assert decided.effective_batch == decided.target == config.target
    ranks = [decided.micro_batches_of(rank) for rank in range(decided.world)]
    assert sum(sum(sizes) for _, sizes in ranks) == config.target
    assert all(row <= decided.micro_batch for rows, _ in ranks for row in rows)
    free = min(device.free_bytes for device in machine.devices)
    bound = (
        cpu_table_batch(scale=config.table_scale)
        if decided.device == "cpu"
        else table_batch(free, scale=config.table_scale, compiled=decided.compile)
    )
    norm_batch = config.norm_batch or 0
    assert decided.micro_batch <= max(bound, norm_batch)
    assert all(size % (norm_batch or 1) == 0 for size in decided.micro_batches)
    if decided.compile:
        assert {row for rows, _ in ranks for row in rows} == {decided.micro_batch}
    if config.norm_batch == 0:
        assert decided.last_micro_batch == decided.micro_batch and not decided.is_padded
    assert 2 * decided.micro_batch >= min(bound, decided.shares[0])


def check_refusal(text: str, config: Config, machine: Hardware, facts: ModelFacts) -> None:
    offers = re.search(r"CONFIG_TARGET_EFFECTIVE_BATCH=(\d+)(?: or (\d+))?$", text)
    if offers is None:
        assert "CONFIG_NORM_BATCH to " in text and "more than the free-memory table gives" in text, text
        return
    for offer in filter(None, offers.groups()):
        offered = config.replace(target_effective_batch=int(offer))
        check_plan(plan(offered, machine, facts), offered, machine)


def check_samples(count: int, *, seed: int) -> None:
    random_source = random.Random(seed)
    refused = 0
    for _ in range(count):
        config, machine, facts = sample(random_source)
        try:
            decided = plan(config, machine, facts)
        except PlanError as error:
            refused += 1
            check_refusal(str(error), config, machine, facts)
        else:
            check_plan(decided, config, machine)
    assert 0.1 < refused / count < 0.8, "the samples are one-sided"


@pytest.mark.slow
def test_sampled_plans() -> None:
    check_samples(2_000, seed=0)


@pytest.mark.long
@pytest.mark.slow
def test_many_sampled_plans() -> None:
    check_samples(20_000, seed=1)
