"""What is planned by what a step is said to need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import PlanError
from lib.hyperparams import apply_hyperparams
from lib.plan import plan
from lib.plan.fitting import (
    GAPS,
    MemoryEstimator,
    Parts,
    StepSettings,
    largest_fitting,
    predicted,
    sizes_to_try,
)
from lib.plan.gpus import machine_names, parse_gpu
from lib.plan.tables import COMPILED_PEAK_FACTOR, GPU_RESERVE_BYTES, PEAK_FACTOR
from lib.plan.types import Memory, Plan
from lib.units import GB
from tests.contract.plan_facts import config_of, estimator_of, facts_of
from tests.support.configs import load_hardware, make_config, make_facts

MB = 10**6


def line(fixed: int, per_sample: int, *, gradients: int = 0) -> MemoryEstimator:
    """A step that needs `fixed` bytes, `per_sample` for each sample, and gradients while it accumulates."""

    def predict(trial: StepSettings) -> Parts:
        rest = gradients * (trial.accumulates or trial.several_devices)
        return {"parameters": fixed, "activations": per_sample * trial.micro_batch, "gradients": rest}

    return predict


def decide(model: str, machine: str, predict: MemoryEstimator | None, **changes: object) -> Plan:
    config = make_config(model, **{"auto_method": "predict"} | changes)
    return plan(config, load_hardware(machine), make_facts(model), predict=predict)


@given(
    fixed=st.integers(0, 10**6),
    per_sample=st.integers(1, 10**4),
    bend=st.integers(0, 10**4),
    most=st.integers(0, 3000),
    step=st.sampled_from([1, 8, 32]),
    usable=st.integers(0, 4 * 10**7),
)
def test_the_largest_that_fits_is_found_in_few_trials(
    fixed: int, per_sample: int, bend: int, most: int, step: int, usable: int
) -> None:
    tried: list[int] = []

    def need(size: int) -> int:
        return fixed + per_sample * size + bend * max(0, size - 200)

    def memory_of(size: int) -> Memory:
        tried.append(size)
        return Memory(parts={"all": need(size)}, reserve_bytes=0, usable_bytes=usable)

    sizes = range(step, most + 1, step)
    largest = max((size for size in sizes if need(size) <= usable), default=0)
    assert largest_fitting(memory_of, sizes) == largest
    assert len(tried) == len(set(tried)) <= 5 + most.bit_length(), "three slow guesses, else halves"
    tried.clear()
    doubled = [step * 2**power for power in range(12) if step * 2**power <= most]
    assert largest_fitting(memory_of, sizes, first=doubled) == largest
    between = [size for size in tried if size not in doubled]
    assert all(largest / 2 < size < 2 * largest for size in between), "only between the right two of them"
    assert len(tried) == len(set(tried)) <= 8 + len(doubled) + most.bit_length()


@pytest.mark.parametrize(
    ("share", "limit", "prefers_divisor", "expected"),
    [
        (64, 64, True, [1, 2, 4, 8, 16, 32, 64]),
        (60, 20, True, [1, 2, 3, 4, 5, 6, 10, 12, 15, 20]),
        (64, 64, False, range(1, 65)),
        (77, 77, True, range(1, 78)),  # 7 is more than twice 1
        (66, 10, True, [1, 2, 3, 6]),
        (69, 10, True, range(1, 11)),  # 10 is more than twice 3
    ],
)
def test_divisors_alone_are_tried_where_one_will_be_chosen_anyway(
    share: int, limit: int, prefers_divisor: bool, expected: Sequence[int]
) -> None:
    exact, sizes = sizes_to_try(share, limit=limit, step=1, prefers_divisor=prefers_divisor)
    assert exact == [size for size in range(1, limit + 1) if share % size == 0]
    assert sizes == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("gpt2", 47), ("resnet50", 13), ("vit-tiny-scenes", 15)])
def test_machines_ask_for_the_same_few_sizes(name: str, most: int) -> None:
    """Each takes a trace, which is what `make plan GPU=all` spends its time with."""
    facts, config, asked = facts_of(name), config_of(name), set[tuple[str, str, int]]()
    estimate = estimator_of(name, facts)

    def predict(step: StepSettings) -> Parts:
        asked.add((step.device, step.precision, step.micro_batch))
        return estimate(step)

    for machine in machine_names("all"):
        apply_hyperparams(config, False, hardware=parse_gpu(machine), facts=facts, predict=predict)
    assert len(machine_names("all")) > 40 and len(asked) <= most


def test_a_need_that_jumps_takes_few_trials_too() -> None:
    """The line through both sides of the jump would go on by one sample at a time."""
    tried: list[int] = []

    def memory_of(size: int) -> Memory:
        tried.append(size)
        return Memory(parts={"all": 1 if size <= 1500 else 10**9}, reserve_bytes=0, usable_bytes=2000)

    assert largest_fitting(memory_of, range(1, 3001)) == 1500 and len(tried) <= 2 + 2 * (3000).bit_length()


def test_a_straight_line_takes_few_looks() -> None:
    tried = []

    def memory_of(size: int) -> Memory:
        tried.append(size)
        return Memory(parts={"all": 4000 + 500 * size}, reserve_bytes=0, usable_bytes=71_400)

    assert largest_fitting(memory_of, range(1, 257)) == 134
    assert len(tried) <= 4, "each is a step run without contents, a second or two of it"


def test_a_gpu_is_filled_to_what_is_left_of_it() -> None:
    # 80 GB free, compiled: (fixed + n x per sample) x both factors + reserve
    predict = line(2 * GB, 400 * MB)
    decided = decide("lenet5", "a100-80g", predict, target_effective_batch=4096)
    free = load_hardware("a100-80g").devices[0].free_bytes
    most = int(((free - GPU_RESERVE_BYTES) / (PEAK_FACTOR * COMPILED_PEAK_FACTOR) - 2 * GB) / (400 * MB))
    assert decided.compile
    assert decided.micro_batch == max(size for size in range(1, most + 1) if 4096 % size == 0)
    assert decided.memory is not None and decided.memory.fits
    assert decided.memory.peak_bytes == 2 * GB + decided.micro_batch * 400 * MB
    reason = decided.reasons["micro_batch"]
    assert f"{decided.micro_batch} is predicted to need" in reason
    assert f"({2 * decided.micro_batch}: " in reason, "what the next divisor would need"
    assert Plan.from_json(decided.to_json()) == decided


def test_gradients_that_are_kept_while_others_come_count() -> None:
    alone = decide("lenet5", "rtx3090", line(0, 10 * MB, gradients=8 * GB), target_effective_batch=4096)
    without = decide("lenet5", "rtx3090", line(0, 10 * MB), target_effective_batch=4096)
    assert alone.accumulation > 1 and alone.micro_batch < without.micro_batch


@pytest.mark.parametrize(
    ("fixed", "traced"),
    [(15 * GB, {1, 16}), (20 * GB + 200 * MB, {1, 16}), (30 * GB, {1})],
    ids=["fits", "near", "never"],
)
def test_a_share_may_fit_at_once_where_gradients_of_several_micro_batches_do_not(
    fixed: int, traced: set[int]
) -> None:
    tried, predict = set[int](), line(fixed, 50 * MB, gradients=8 * GB)

    def watched(trial: StepSettings) -> Parts:
        tried.add(trial.micro_batch)
        return predict(trial)

    try:
        decided = decide("lenet5", "rtx3090", watched, target_effective_batch=16)
    except PlanError as error:
        assert fixed > 15 * GB and "a micro-batch of 1 is predicted to need" in str(error)
    else:
        assert (decided.micro_batch, decided.accumulation) == (16, 1) and fixed == 15 * GB
        assert decided.memory is not None and decided.memory.fits
    assert tried == traced, "only where it may fit"


def test_on_a_processor_more_than_the_table_gives_is_not_wanted() -> None:
    decided = decide("lenet5", "cpu-24g-amx", line(0, MB))
    assert (decided.micro_batch, decided.effective_batch) == (64, 512)
    assert "larger is no faster on CPUs" in decided.reasons["micro_batch"]
    assert decide("lenet5", "cpu-8g", line(0, 1000 * MB)).micro_batch < 8, "nor more than fits"
    for target in (16, 64):
        whole = decide("lenet5", "cpu-24g-amx", line(0, MB), target_effective_batch=target)
        assert whole.micro_batch == target and "; the whole share of a" in whole.reasons["micro_batch"]


def test_what_does_not_fit_is_refused_with_figures_and_ways_out() -> None:
    with pytest.raises(PlanError) as error:
        decide("resnet18", "t4", line(GB, GB))
    assert "resnet18 does not fit on Tesla T4: a micro-batch of 32 is predicted to need" in str(error.value)
    assert "CONFIG_NORM_BATCH lower" in str(error.value) and "CONFIG_GRAD_CHECKPOINT" in str(error.value)
    assert "BF16" not in str(error.value), "which a T4 has not"


def test_a_batch_set_by_hand_is_kept_and_the_plan_says_that_it_is_too_much() -> None:
    by_hand = {"hyper_param": "manual", "auto_method": None, "batch_size": 256, "gradient_accumulation": 1}
    decided = decide("lenet5", "rtx3090", line(0, GB), **by_hand)
    assert decided.micro_batch == 256
    assert decided.reasons["memory"].startswith("MORE than there is: 282.31 GB of")
    sound = decide("lenet5", "rtx3090", line(0, MB), **by_hand)
    assert not sound.reasons["memory"].startswith("MORE")
    unknown = decide("lenet5", "rtx3090", None, **by_hand)
    assert unknown.memory is None and unknown.reasons["memory"] == "not predicted"


def test_the_table_is_looked_at_too() -> None:
    decided = decide("lenet5", "rtx3090", line(0, GB), auto_method="table")
    assert decided.micro_batch == decide("lenet5", "rtx3090", None, auto_method="table").micro_batch
    assert decided.reasons["memory"].startswith("MORE than there is")


def test_a_prediction_is_not_made_up() -> None:
    with pytest.raises(PlanError, match="there is no model to predict the memory of"):
        decide("lenet5", "rtx3090", None)


def test_main_memory_is_shared_and_a_gpu_has_a_context() -> None:
    trial = StepSettings(
        device="cpu", several_devices=False, micro_batch=1, accumulates=False, norm_batch=0,
        precision="fp32", channels_last=False, compile=False,
    )  # fmt: skip
    on_cpu = predicted(trial, line(0, GB), free_bytes=10 * GB)
    assert (on_cpu.need_bytes, on_cpu.usable_bytes) == (1_020_000_000, 8 * GB)
    on_gpu = predicted(dataclasses.replace(trial, device="cuda"), line(0, GB), free_bytes=10 * GB)
    assert (on_gpu.need_bytes, on_gpu.usable_bytes) == (1_020_000_000 + GPU_RESERVE_BYTES, 10 * GB)


def test_what_is_lost_between_tensors_is_needed_and_is_no_tensor() -> None:
    trial = StepSettings(
        device="cuda", several_devices=False, micro_batch=1, accumulates=False, norm_batch=0,
        precision="fp32", channels_last=False, compile=False,
    )  # fmt: skip
    whole = predicted(trial, lambda _: {"activations": GB}, free_bytes=10 * GB)
    torn = predicted(trial, lambda _: {"activations": GB, GAPS: 300 * MB}, free_bytes=10 * GB)
    assert torn.need_bytes == whole.need_bytes + 300 * MB
    assert torn.parts == whole.parts == {"activations": GB} and torn.gaps_bytes == 300 * MB
