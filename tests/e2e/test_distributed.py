"""Several processes train what one process trains: real process groups, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.devices.base import Backend
from lib.plan.types import rank_shares
from tests.e2e.ddp_worker import CASES, EFFECTIVE, STEPS, TEST_SIZE, TRAIN_SIZE, Outcome, outcome
from tests.e2e.device_combinations import (
    EXACT,
    LARGE,
    MODELS,
    difference,
    everything,
    fullest,
    pairs_of,
    pairwise,
    sharded,
)
from tests.e2e.workers import run_worker
from tests.support.examples import merged, told_of
from tests.support.once import made_once
from tests.support.training import largest_difference

pytestmark = pytest.mark.slow

# Plain batch normalisation depends on the micro-batch, and the others end by their clocks.
PORTABLE = [
    "ghost",
    "frozen ghost",
    "adapters",
    "padded ghost",
    "ghost of large images",
    "padded",
    "ragged",
    "counted",
    "augmented",
    "augmented ghost",
    *merged("DISTRIBUTED"),
]
PORTABLE += ["metrics", "early stop", "several labels", "tags", "chats", "packed chats"]
WITH_A_CARRY = [name for names in told_of("WITH_A_CARRY") for name in names]
SMALL = [name for name in MODELS if name not in LARGE]
# Those that no case of several processes has, and the others.
FULL, ALSO_FULL = (
    [name for name in SMALL if (name in ("lenet5", "mlp", "gpt2", "vit")) == of_others]
    for of_others in (False, True)
)
PAIRWISE = pairwise(SMALL)
SHARDED_MODELS = ("gpt2", "resnet18")
SHARDED = sharded(SHARDED_MODELS)


# By one program: what one process makes of the cases and of the fullest combinations, and what several make.
FEW = [
    ("alone", 1),
    ("ranks", 2),
    ("fullest-alone", 1, "fullest", *FULL),
    ("fullest", 3, "fullest", *FULL),
]


def trained_by(directory: Path, *parts: tuple[Any, ...]) -> None:
    """Each part: a folder for its outcomes, the number of processes, a kind of combinations and models."""
    words = [word for part in parts for word in ("/", *part)]
    run_worker("ddp_worker", directory, *words[1:])


def made_by(factory: pytest.TempPathFactory, world: int, kind: str = "", models: Sequence[str] = ()) -> Any:
    """What each process makes of the cases, or of the combinations of that kind."""

    def make(directory: Path) -> None:
        trained_by(directory, ("ranks", world, *([kind] if kind else []), *models))

    directory = made_once(factory, f"{kind or 'cases'}-{world}-{len(models)}", make) / "ranks"
    return [torch.load(directory / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Outcome]]]:
    """What each process has of the parts of FEW."""
    directory = made_once(tmp_path_factory, "distributed", lambda path: trained_by(path, *FEW))
    return {
        name: [torch.load(directory / name / f"{rank}.pt") for rank in range(world)]
        for name, world, *_ in FEW
    }


@pytest.fixture(scope="module")
def one(few: dict[str, list[dict[str, Outcome]]]) -> dict[str, Outcome]:
    """What one process makes of the cases."""
    return few["alone"][0]


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 5, 7))])
def ranks(
    request: pytest.FixtureRequest,
    few: dict[str, list[dict[str, Outcome]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Outcome]]:
    """What each of several processes has at the end of each case."""
    found: list[dict[str, Outcome]] = few["ranks"]
    return found if request.param == len(found) else made_by(tmp_path_factory, request.param)


@pytest.fixture(scope="module", params=[2, 3, 5, 7])
def combined(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    return made_by(tmp_path_factory, int(request.param), "pairwise", SMALL)


@pytest.fixture(scope="module", params=[5, 7])
def with_shards(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    return made_by(tmp_path_factory, int(request.param), "sharded", SHARDED_MODELS)


@cache
def alone(case: str) -> Outcome:
    return outcome((everything(SMALL) | SHARDED)[case], Backend("cpu"))


@pytest.mark.parametrize("case", fullest(FULL))
def test_the_most_options_change_nothing_together(
    case: str, few: dict[str, list[dict[str, Outcome]]]
) -> None:
    assert_the_same(case, few["fullest-alone"][0][case], few["fullest"])


@pytest.mark.long
def test_so_it_is_with_other_models(tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks = made_by(tmp_path_factory, 3, "fullest", ALSO_FULL)
    for case in fullest(ALSO_FULL):
        assert_the_same(case, alone(case), ranks)


@pytest.mark.long
@pytest.mark.parametrize("case", PAIRWISE)
def test_options_change_nothing_together(case: str, combined: list[dict[str, Outcome]]) -> None:
    assert_the_same(case, alone(case), combined)


@pytest.mark.long
@pytest.mark.parametrize("case", SHARDED)
def test_sharded_state_changes_nothing(case: str, with_shards: list[dict[str, Outcome]]) -> None:
    """With all options of a model; test_sharded.py has none of them, on two to four processes."""
    assert_the_same(case, alone(case), with_shards)


@pytest.mark.long
def test_options_change_nothing_together_in_a_large_network(tmp_path: Path) -> None:
    trained_by(tmp_path, ("ranks", 3, "pairwise", *LARGE))
    ranks = [torch.load(tmp_path / "ranks" / f"{rank}.pt") for rank in range(3)]
    for name, case in pairwise(LARGE).items():
        assert_the_same(name, outcome(case, Backend("cpu")), ranks)


def assert_the_same(case: str, expected: Outcome, ranks: list[dict[str, Outcome]]) -> None:
    assert all(difference(expected, rank[case]) <= EXACT for rank in ranks)
    assert ("EMA" in case) == bool(expected["ema"]) and expected["step"] >= STEPS


def test_pairs_of_options_are_all_covered() -> None:
    covered = set[Any]().union(*map(pairs_of, PAIRWISE))
    assert covered == set[Any]().union(*map(pairs_of, everything(SMALL)))
    assert len(PAIRWISE) < len(everything(SMALL)) / 4


@pytest.mark.parametrize("case", PORTABLE)
def test_several_processes_train_what_one_trains(
    case: str, one: dict[str, Outcome], ranks: list[dict[str, Outcome]]
) -> None:
    """Weights, averages and running statistics; the uneven last micro-batch and counts on the device, too."""
    expected = one[case]
    assert ("ghost" in case) == any("running_var" in name for name in expected["model"])
    for rank in ranks:
        assert rank[case]["step"] == expected["step"] >= STEPS
        assert largest_difference(expected["model"], rank[case]["model"]) <= EXACT
        if expected.get("ema"):
            assert largest_difference(expected["ema"], rank[case]["ema"]) <= EXACT
        assert rank[case]["losses"] == pytest.approx(expected["losses"], rel=EXACT)


@pytest.mark.parametrize("case", PORTABLE)
def test_every_sample_is_evaluated_once(
    case: str, one: dict[str, Outcome], ranks: list[dict[str, Outcome]]
) -> None:
    evaluations = len(one[case]["checked"]) // TEST_SIZE
    together = [name for rank in ranks for name in rank[case]["checked"]]
    assert evaluations >= 1 and sorted(together) == sorted(one[case]["checked"])
    assert all(together.count(name) == evaluations for name in together)
    for rank in ranks:
        assert rank[case]["result"].get("samples", TEST_SIZE) == TEST_SIZE
        assert rank[case]["result"] == pytest.approx(one[case]["result"], rel=EXACT)


def test_every_sample_of_an_epoch_is_seen_once(
    one: dict[str, Outcome], ranks: list[dict[str, Outcome]]
) -> None:
    world, steps = len(ranks), TRAIN_SIZE // EFFECTIVE
    each = rank_shares(EFFECTIVE, world=world)
    seen = [rank["ragged"]["seen"][: steps * share] for rank, share in zip(ranks, each, strict=True)]
    together = [name for names in seen for name in names]
    assert len(set(together)) == len(together) == TRAIN_SIZE
    for step in range(STEPS):
        parts = [
            rank["ragged"]["seen"][step * share : (step + 1) * share]
            for rank, share in zip(ranks, each, strict=True)
        ]
        whole = one["ragged"]["seen"][step * EFFECTIVE : (step + 1) * EFFECTIVE]
        assert [name for part in parts for name in part] == whole


@pytest.mark.parametrize("case", CASES)
def test_all_processes_end_with_the_same_weights_at_the_same_step(
    case: str, ranks: list[dict[str, Outcome]]
) -> None:
    first = ranks[0][case]
    for rank in ranks[1:]:
        assert largest_difference(first["model"], rank[case]["model"]) == 0
        for part in ("step", "stopped", "saved", "result", "losses"):
            assert rank[case][part] == first[part], part


@pytest.mark.parametrize("case", WITH_A_CARRY)
def test_the_carry_of_all_processes_is_saved_in_the_order_of_the_batch(
    case: str, one: dict[str, Outcome], ranks: list[dict[str, Outcome]]
) -> None:
    expected, found = one[case]["carry"], ranks[0][case]["carry"]
    assert {len(part) for part in found.values()} == {EFFECTIVE}
    assert len(found["inputs_BL"].unique(dim=0)) > EFFECTIVE // 2, "rows are told apart"
    assert largest_difference(found, expected) <= EXACT
    assert not ranks[1][case]["carry"], "the others have nothing to write"


def test_gradients_are_exchanged_once_in_a_step(ranks: list[dict[str, Outcome]]) -> None:
    for rank in ranks:
        averaged = rank["ragged"]["averaged"]
        pieces = len(averaged) // STEPS
        assert pieces > (len(ranks) < 4) and averaged == ([False] * (pieces - 1) + [True]) * STEPS


def test_they_stop_early_together(one: dict[str, Outcome], ranks: list[dict[str, Outcome]]) -> None:
    """The first evaluation is the one to beat, and three are no better."""
    assert {outcome["early stop"]["step"] for outcome in (*ranks, one)} == {4}
    assert all(outcome["early stop"]["saved"][-1][0] == 4 for outcome in ranks[:1])


def test_their_clocks_decide_together(ranks: list[dict[str, Outcome]]) -> None:
    assert [step for step, _ in ranks[0]["clocks"]["saved"]][-1] == 12
    assert len(ranks[0]["clocks"]["saved"]) >= 3
    assert 1 < ranks[0]["seconds"]["step"] < 30


def test_a_signal_to_one_stops_all(ranks: list[dict[str, Outcome]]) -> None:
    """It comes in the second step, and is agreed on while the third is computed."""
    assert all(rank["signal"]["stopped"] == 3 for rank in ranks)
    assert ranks[0]["signal"]["saved"] == [(3, False)]
