"""Two frozen models on a device each: when that is chosen, and the messages where it is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lib import kconf
from lib.errors import ConfigError, PlanError
from lib.plan import plan
from lib.plan.fitting import Parts, StepSettings
from lib.plan.gpus import parse_gpu
from lib.plan.planner import compare_strategies
from lib.plan.sharding import exchanges, shares, splits_over
from lib.plan.sizing import Candidate
from lib.plan.strategy_table import format_strategies
from lib.plan.types import Branch, Layout, ModelFacts, Plan, Weight
from scripts import cluster
from tests.support.configs import ROOT, load_hardware, make_config, make_facts
from train.stored_run import for_one_process

GB = 10**9
TRAINED = tuple((Weight((1000, 1000), True),) for _ in range(10))
TERA = 1e12


def facts_of(*flop_per_sample: float) -> ModelFacts:
    """Ten million weights that compute next to nothing, and two frozen models that compute so much."""
    first, second = (Branch(flop_per_sample=flop, parameters=8 * GB) for flop in flop_per_sample)
    return make_facts(
        "lenet5", units=TRAINED, flop_per_sample=1e6, train_size=10**6, branches=(first, second)
    )


FACTS = facts_of(TERA, TERA)


def config_of(**changes: Any) -> Any:
    requested = {
        "auto_method": "predict",
        "target_effective_batch": 64,
        "optimizer": "adamw",
        "precision": "bf16",
    }
    return make_config("lenet5", **requested | changes)


def needs(each: float) -> Any:
    """Of two frozen models of so many GB each, with 0.05 GB of activations for a sample of each.

    A device with one of several copies of a model has a part of the samples.
    """

    def predict(trial: StepSettings) -> Parts:
        assert trial.layout is not None
        models = 2 if trial.layout.replica.strategy == "single" else 1
        cut = shares(TRAINED, trial.layout)
        parts = {name: round(40_000_000 * cut[name]) for name in ("parameters", "gradients", "optimizer")}
        activations = models * trial.micro_batch * GB // 20
        return {**parts, "frozen models": round(models * each * GB), "activations": activations}

    return predict


def decide(machine: str, each: float, **changes: Any) -> Plan:
    return plan(config_of(**changes), parse_gpu(machine), FACTS, predict=needs(each))


def spread(machine: str, each: float, facts: ModelFacts = FACTS, **changes: Any) -> dict[str, Candidate]:
    found = compare_strategies(config_of(**changes), parse_gpu(machine), facts, predict=needs(each))
    named: dict[str, Candidate] = {}
    for candidate in found:  # of splits the one with the most processes
        named.setdefault(candidate.layout.strategy, candidate)
    return named


# GB of each of the two, with 41.9 free on a card: strategy and processes.
TABLE = {
    ("a100-40g", 10): ("single", 1, ()),
    ("a100-40g", 25): ("sequential", 1, ()),
    ("a100-40gx2", 10): ("ddp", 2, ()),
    ("a100-40gx2", 25): ("split", 1, (1, 1)),
    ("a100-40gx3", 25): ("split", 1, (2, 1)),
    ("a100-40gx4", 25): ("split", 2, (1, 1)),
    ("a100-40gx5", 25): ("split", 1, (3, 2)),
    ("a100-40gx6", 25): ("split", 3, (1, 1)),
    ("a100-40gx7", 25): ("split", 1, (4, 3)),
    ("a100-40gx9", 25): ("split", 3, (2, 1)),
    ("a100-40gx11", 25): ("sequential", 11, ()),
    ("a100-40gx16", 25): ("split", 8, (1, 1)),
    ("h200x2", 25): ("ddp", 2, ()),
    ("h200x3", 25): ("ddp", 3, ()),
}


@pytest.mark.parametrize(("machine", "each"), TABLE)
def test_the_table_of_choices(machine: str, each: int) -> None:
    decided = decide(machine, each)
    strategy, world, branches = TABLE[machine, each]
    assert (decided.strategy, decided.world, decided.branch_devices) == (strategy, world, branches)
    assert decided.memory is not None and decided.memory.fits
    assert decided.effective_batch == 64 == sum(decided.shares)
    assert decided.shares[0] == sum(decided.micro_batches)
    assert decided.layout.devices == len(parse_gpu(machine).devices)
    assert Plan.from_json(decided.to_json()) == decided


def test_every_rival_is_told_why_it_lost() -> None:
    found = spread("a100-40gx4", 25)
    assert list(found) == ["ddp", "zero1", "zero2", "fsdp", "hsdp", "split", "sequential"]
    assert found["split"].verdict == "chosen"
    for strategy in ("ddp", "zero1", "zero2", "fsdp", "hsdp"):
        verdict = found[strategy].verdict
        assert "of 41.88 GB usable" in verdict
        assert "50.00 GB of it for frozen models, whole on each device" in verdict, "why parts do not help"
        assert "GB more on each device" in verdict
    reasons = decide("a100-40gx4", 25).reasons
    assert reasons["strategy"].startswith("the simplest of the fastest, by estimate; ddp needs")
    assert reasons["world"].endswith("each process has 2 of them")
    assert reasons["effective_batch"] == "32 on each of 2 pairs of devices, as requested"
    assert reasons["shard"] == "each process has all weights on its devices"


def test_the_time_of_a_split_is_that_of_the_slower_model() -> None:
    """Copies on two devices share the sum of both; one device alone would compute all of it."""
    found = spread("h200x2", 25, facts_of(3 * TERA, TERA))
    ddp, split = found["ddp"], found["split"]
    assert ddp.seconds is not None and split.seconds is not None
    for copies, parted in zip(ddp.seconds, split.seconds, strict=True):
        assert parted / copies == pytest.approx(3 / ((3 + 1) / 2), rel=0.02)
    assert split.verdict == "estimated to take 1.50 times as long"
    even = spread("h200x2", 25)["split"]
    assert even.verdict == "not faster, and less simple"


def test_what_no_strategy_has_room_for_is_refused_with_the_nearest_change() -> None:
    with pytest.raises(PlanError, match=r"fsdp with .* GB more on each device, split with .* GB more"):
        decide("a100-40gx2", 45)
    with pytest.raises(PlanError, match=r"split with CONFIG_NUM_DEVICES=10, sequential.ddp with .* GB more"):
        decide("a100-40gx11", 45)
    assert decide("a100-40gx3", 25, num_devices=2).strategy == "split"


def test_what_cannot_be_split_says_why() -> None:
    requested = config_of(dist_strategy="split")
    plain = dataclasses.replace(FACTS, branches=None)
    refusal = "CONFIG_DIST_STRATEGY_SPLIT=y is not possible: "
    with pytest.raises(PlanError, match=refusal + "lenet5 has no two frozen models"):
        plan(requested, parse_gpu("a100-40gx2"), plain, predict=needs(1))
    with pytest.raises(PlanError, match=refusal + "11 devices are no groups of 2 to 8 of one size"):
        plan(requested, parse_gpu("a100-40gx11"), FACTS, predict=needs(1))
    many = requested.replace(dist_nnodes="1:2")
    with pytest.raises(PlanError, match=refusal + "several nodes need a process for each device"):
        plan(many, parse_gpu("a100-40gx4"), FACTS, predict=needs(1))
    processor = requested.replace(num_devices=2)
    with pytest.raises(PlanError, match=refusal + "it is for devices with memory of their own"):
        plan(processor, load_hardware("cpu-24g-amx"), FACTS, predict=needs(0.1))
    for strategy in ("split", "sequential"):
        with pytest.raises(PlanError, match="is not possible: TPUs hold replicas only"):
            plan(config_of(dist_strategy=strategy), parse_gpu("tpu-v4-8"), FACTS, predict=needs(1))
    uneven = decide("a100-40gx4", 25, target_effective_batch=65, dist_strategy="split")
    assert uneven.shares == (33, 32) and "of 2 pairs of devices 1 has" in uneven.reasons["effective_batch"]


def test_it_is_done_where_it_is_asked_for_and_something_simpler_fits() -> None:
    decided = decide("h200x2", 10, dist_strategy="split")
    assert (decided.strategy, decided.world) == ("split", 1)
    assert decided.reasons["strategy"] == "CONFIG_DIST_STRATEGY_SPLIT=y"
    by_hand = decide("h200x4", 10, dist_strategy="split", hyper_param="manual", batch_size=8)
    assert (by_hand.world, by_hand.micro_batch, by_hand.accumulation) == (2, 8, 4)


def test_devices_are_divided_by_what_the_models_compute() -> None:
    """Three times the work: three copies, which four devices have at once and two processes of two do not."""
    found = compare_strategies(
        config_of(), parse_gpu("a100-40gx4"), facts_of(TERA, 3 * TERA), predict=needs(25)
    )
    splits = [each for each in found if each.layout.strategy == "split"]
    assert [(each.layout.world, each.layout.branch_devices) for each in splits] == [(2, (1, 1)), (1, (1, 3))]
    pairs, four = splits
    assert pairs.seconds is not None and four.seconds is not None
    assert pairs.seconds[0] / four.seconds[0] == pytest.approx(1.5, rel=0.05)
    assert four.verdict == "chosen" and pairs.verdict.startswith("estimated to take 1.")
    lines = list(format_strategies(found, columns=120))
    assert any(line.startswith("  split(1,3) ") for line in lines)
    reasons = decide("a100-40gx3", 25).reasons
    assert reasons["branch_devices"] == (
        "of a process: the first frozen model on 0, 1, the second on 2, the trained model on 0"
    )


def test_one_model_at_a_time_is_the_last_resort_and_not_for_fp16() -> None:
    found = spread("a100-40g", 10)
    assert found["single"].verdict == "chosen"
    assert found["sequential"].verdict.startswith("estimated to take ")
    alone = decide("a100-40g", 25)
    assert "one model at a time is on its device" in alone.reasons["shard"]
    assert alone.reasons["strategy"].startswith("the simplest of the fastest, by estimate; single needs ")
    with pytest.raises(PlanError, match="no loss scaling within a frozen model"):
        decide("a100-40g", 25, precision="fp16", dist_strategy="sequential")
    requested = decide("h200x4", 10, dist_strategy="sequential")
    assert (requested.strategy, requested.world) == ("sequential", 4)
    stored = {**decide("a100-40gx2", 25).to_json()}
    del stored["branch_devices"], stored["reasons"]["branch_devices"]
    assert Plan.from_json(stored).branch_devices == (1, 1), "of a version that had pairs only"


def test_models_in_main_memory_have_to_fit_there() -> None:
    """Those of all processes of a node; a machine that is named only has an unknown amount."""
    named = parse_gpu("a100-40gx4")
    config = config_of(dist_strategy="sequential")
    needed = 4 * sum(branch.weight_bytes("bf16") for branch in FACTS.branches or ())

    def on(free_bytes: int | None, per_node: int = 0) -> str:
        hardware = dataclasses.replace(named, host_free_bytes=free_bytes, per_node=per_node)
        return plan(config, hardware, FACTS, predict=needs(10)).reasons["shard"]

    assert on(None).endswith("NOTE: not checked on a named machine")
    assert on(needed).endswith("which are free")
    with pytest.raises(PlanError, match=r"not possible: .* of main memory, and .* are free"):
        on(needed - 1)
    assert on(needed // 2, per_node=2).endswith("which are free"), "two nodes of two devices"


def test_models_without_frozen_ones_are_not_offered_it() -> None:
    found = compare_strategies(
        config_of(),
        parse_gpu("a100-40gx2"),
        dataclasses.replace(FACTS, branches=None),
        predict=needs(1),
    )
    assert "split" not in {candidate.layout.strategy for candidate in found}
    with pytest.raises(ConfigError, match="1 fault in the configuration"):
        kconf.load(
            root=ROOT,
            config_file=ROOT / "defconfigs/lenet5",
            overrides={"CONFIG_DIST_STRATEGY_SPLIT": "y"},
        )


def test_what_was_trained_on_pairs_is_evaluated_on_one() -> None:
    trained = decide("a100-40gx4", 25)
    config, hardware = config_of(), parse_gpu("a100-40gx4")
    alone = plan(for_one_process(config, trained, devices=4), hardware, FACTS)
    assert (alone.strategy, alone.world, alone.effective_batch) == ("split", 1, trained.micro_batch)
    on_one = plan(for_one_process(config, trained, devices=1), parse_gpu("h200"), FACTS)
    assert (on_one.strategy, on_one.world) == ("sequential", 1), "both at once may have no room there"
    waiting = for_one_process(config, decide("a100-40g", 25), devices=2)
    assert plan(waiting, hardware, FACTS).strategy == "sequential"
    copied = for_one_process(config, decide("a100-40gx2", 10), devices=2)
    assert plan(copied, hardware, FACTS).strategy == "single"


def test_pairs_average_what_is_trained_and_nothing_else() -> None:
    branches = FACTS.branches or ()
    (two,), (sixteen,) = (tuple(splits_over(devices, branches)) for devices in (2, 16))
    assert not list(exchanges(TRAINED, two, accumulation=2))
    (only,) = exchanges(TRAINED, sixteen, accumulation=2)
    assert (only.kind, only.processes, only.among, only.tensor_bytes) == ("all_reduce", 8, 16, 40_000_000)


def test_they_are_shown_by_name() -> None:
    found = list(spread("a100-40gx4", 25).values())
    lines = list(format_strategies(found, columns=120))
    (line,) = (line for line in lines if "chosen" in line)
    assert line.startswith("  split+ddp          32 x 1 ")
    assert spread("a100-40gx2", 25)["split"].to_json()["world"] == 1


def test_as_many_processes_are_started_as_there_are_pairs() -> None:
    config = dataclasses.replace(config_of(dist_strategy="split"), device="cpu", num_devices=4)
    command = cluster.command_line(config, name="run", runs=ROOT)
    assert "starts 2 processes" in command
    assert Layout(strategy="split", world=2, shard=1, branch_devices=(1, 1)).devices == 4


def test_frozen_weights_are_read_in_the_precision_of_products() -> None:
    """Of models that compute next to nothing, reading them is what takes the time."""
    seconds = {}
    for precision in ("bf16", "fp32"):
        config = config_of(precision=precision)
        one, waiting = compare_strategies(config, parse_gpu("a100-80g"), facts_of(1.0, 1.0), predict=needs(8))
        assert one.seconds is not None and waiting.seconds is not None
        copied = 2 * 8 * GB * (2 if precision == "bf16" else 4)  # of both, over PCIe, in each micro-batch
        assert waiting.split is not None and waiting.split.accumulation == 1
        assert waiting.seconds[0] - one.seconds[0] == pytest.approx(copied / 32e9, rel=0.01)
        seconds[precision] = one.seconds[0]
    assert 1.5 < seconds["fp32"] / seconds["bf16"] < 2
