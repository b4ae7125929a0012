"""Each check of preflight passes on what is sound, and fails on what was broken for it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch, EvalLoader, TrainLoader
from lib.errors import ConfigError, ToolkitError
from lib.plan.types import Memory
from lib.runs import checkpoint
from models.lenet5.model import LeNet5
from tests.support.chats import random_chats
from tests.support.labels import random_table
from tests.support.tokens import small_lm_config
from tests.support.training import CPU, random_data, small_config, small_plan
from train import loop
from train.preflight import checks as checks
from train.preflight import command as preflight
from train.preflight import ranks as preflight_ranks
from train.preflight.checks import ROWS, Candidate
from train.preflight.ranks import RULE, Results, compare_ranks, outcome
from train.tasks.classify.task import Classify, naive_loss
from train.tasks.naive_loss import naive_loss_of

ROOT = Path(__file__).resolve().parents[3]


def candidate_of(tmp_path: Path, **changes: Any) -> Candidate:
    settings = {"optimizer": "adam_atan2", "adam_beta1": 0.9, "adam_beta2": 0.95}
    config = small_config("lenet5", **settings | {"augment": "none", "warmup_pct": 5} | changes)
    return Candidate(
        config=config,
        data=random_data(config, shape=(1, 28, 28), train_size=48, test_size=10),
        hardware=CPU,
        plan=small_plan(ROWS),
        root=tmp_path,
        runs=tmp_path / "runs",
    )


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    return candidate_of(tmp_path)


def breaks(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Replace owner.name by one whose result is changed."""
    whole = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *words, **options: change(whole(*words, **options)))


def test_first_loss(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, told = checks.first_loss(candidate)
    assert passed and "a uniform guess has 2.3026" in told
    for factor in (0.6, 0.7, 1.3, 1.4):
        with monkeypatch.context() as known:
            known.setattr(checks, "_losses", lambda *_, loss=factor * 2.3026: iter([loss]))
            assert checks.first_loss(candidate)[0] == (0.65 < factor < 1.35)
    breaks(monkeypatch, LeNet5, "forward", lambda logits: 30 * logits)
    assert not checks.first_loss(candidate)[0]


def test_first_loss_of_another_loss(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that imports `naive_loss`, as one of make new-task, and trains by a smaller loss."""
    breaks(monkeypatch, Classify, "training", lambda sums: dataclasses.replace(sums, loss=sums.loss / 4))
    passed, told = checks.first_loss(candidate)
    start = "start with smaller weights of the last layer"
    assert not passed and told.endswith(f", a uniform guess has 2.3026; {start}")
    monkeypatch.setattr(naive_loss, "__module__", "train.tasks.another.task")
    passed, told = checks.first_loss(candidate)
    assert passed and told.endswith(", outputs of zero have 0.5756")
    assert naive_loss_of(candidate.config, candidate.data.dataset.spec) is None, "reports show none"
    breaks(monkeypatch, LeNet5, "forward", lambda logits: 30 * logits)
    passed, told = checks.first_loss(candidate)
    or_define = (
        "or define naive_loss(spec) in train/tasks/classify/task.py: the loss to expect, or None if it"
    )
    assert not passed and told.endswith(f"zero have 0.5756; {start}, {or_define} is not known")


def test_first_loss_with_class_weights(tmp_path: Path) -> None:
    """Of several labels the weights of ones change the loss of a uniform guess."""
    of_labels = {"task": "multilabel", "task_options": {}, "class_weights": "20,20,20", "augment": "none"}
    config = small_config("mlp", **of_labels)
    data = random_table(config, train=48, test=10)
    candidate = dataclasses.replace(candidate_of(tmp_path), config=config, data=data)
    passed, told = checks.first_loss(candidate)
    expected = float(told.rpartition(" ")[2])
    assert passed and "outputs of zero have" in told and expected > 3 * math.log(2)


@pytest.mark.slow
def test_loss_falls(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, told = checks.loss_falls(candidate)
    steps = int(told.partition(" in ")[2].partition(" ")[0])
    assert passed and 1 < steps < checks.FALL_STEPS, "no longer than it takes"
    flat = torch.zeros(())
    breaks(monkeypatch, LeNet5, "forward", lambda logits: logits.detach() + flat * logits)
    passed, told = checks.loss_falls(candidate)
    assert not passed and told.endswith(f"in {checks.FALL_STEPS} steps on one batch")


@pytest.mark.slow
def test_shards_of_training(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, told = checks.shards(candidate)
    assert passed and "10 samples are evaluated" in told
    whole = TrainLoader.micro_batches
    monkeypatch.setattr(
        TrainLoader, "micro_batches", lambda self, **place: whole(self, **{**place, "firsts": [0]})
    )
    passed, told = checks.shards(candidate)
    assert not passed and "differ" in told


@pytest.mark.slow
def test_shards_of_evaluation(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_ones(batches: Any) -> list[Batch]:
        return [dataclasses.replace(batch, weights=torch.ones(len(batch.inputs))) for batch in batches]

    def twice(batches: Any) -> list[Batch]:
        return [dataclasses.replace(batch, weights=2 * batch.weights) for batch in batches]

    for change in (all_ones, twice):
        with monkeypatch.context() as broken:
            breaks(broken, EvalLoader, "batches", change)
            assert not checks.shards(candidate)[0], change


def test_evaluation(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, told = checks.evaluation(candidate)
    assert passed and "accuracy" in told
    with monkeypatch.context() as broken, pytest.raises(ConfigError, match="report returns NoneType, not"):
        breaks(broken, Classify, "report", lambda _: None)
        checks.evaluation(candidate)
    breaks(monkeypatch, Classify, "evaluation", lambda sums: dataclasses.replace(sums, loss=sums.loss / 0))
    assert not checks.evaluation(candidate)[0]


@pytest.mark.slow
def test_accumulation_of_means(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.accumulation(candidate)[0]
    monkeypatch.setattr(loop, "_nominal_count", lambda job: job.plan.micro_batch * job.plan.accumulation)
    assert not checks.accumulation(candidate)[0]


@pytest.mark.slow
def test_gradients_that_are_not_finite_are_no_small_difference(
    candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = iter([0.0, float("nan"), 0.0, 0.0])
    monkeypatch.setattr(checks, "_gradients", lambda *_, **__: [])
    monkeypatch.setattr(checks, "relative_difference", lambda *_: next(differences))
    passed, told = checks.accumulation(candidate)
    assert not passed and told.startswith("nan")


@pytest.mark.slow
def test_ranks_that_would_wait_for_each_other(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EvalLoader.batches
    monkeypatch.setattr(
        EvalLoader,
        "batches",
        lambda self, **place: list(whole(self, **place))[place["rank"] :],
    )
    with pytest.raises(ToolkitError, match=r"2 ranks evaluate \[1, 0\] batches"):
        checks.shards(candidate)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_back(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_: Path, *, log: Callable[[str], object]) -> None:
        log("it is damaged")

    monkeypatch.setattr(checkpoint, "load", damaged)
    assert checks.round_trip(candidate) == (False, "it is damaged")


@pytest.mark.slow
def test_round_trip(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.round_trip(candidate)[0]

    def without(found: Any) -> Any:
        step, state = found
        return step, {**state, "optimizer": {**state["optimizer"], "state": {}}}

    breaks(monkeypatch, checkpoint, "load", without)
    assert not checks.round_trip(candidate)[0]


def test_a_loss_that_is_another_after_the_round_trip(
    candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = loop.optimizer_step, list[int]()

    def last_one_differs(*words: Any) -> Any:
        calls.append(1)
        sums = step(*words)
        return [dataclasses.replace(part, loss=part.loss + (len(calls) == 4)) for part in sums]

    monkeypatch.setattr(loop, "optimizer_step", last_one_differs)
    assert not checks.round_trip(candidate)[0], "though the weights are the same"


@pytest.mark.slow
def test_static_graph(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, told = checks.static_graph(candidate)
    assert passed and told.startswith("one graph of ") and "CUDA" not in told
    graphs = {"compile": True, "compile_parts": ("model", "loss"), "accumulation": 1, "cuda_graphs": True}
    _, told = checks.static_graph(
        dataclasses.replace(candidate, plan=dataclasses.replace(candidate.plan, **graphs))
    )
    assert "CUDA graphs are not checked" in told

    def looks(logits: Any) -> Any:
        assert logits.sum().item() < 100
        return logits

    breaks(monkeypatch, LeNet5, "forward", looks)
    passed, told = checks.static_graph(candidate)
    assert not passed and "asks the host" in told


@pytest.mark.slow
def test_rows_that_are_cut_to_their_longest_pass(candidate: Candidate) -> None:
    config = small_lm_config(task="chat")
    data = random_chats(config, train=48, test=10, bucketed=True)
    candidate = dataclasses.replace(candidate, config=config, data=data)
    widths = {row.shape[-1] for row in checks._inputs(candidate.job(ROWS), target=8, world=8)}
    assert len(widths) > 1
    for check in (checks.shards, checks.accumulation, checks.static_graph):
        assert check(candidate)[0], check(candidate)[1]


@pytest.mark.slow
def test_learning_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for schedule in ("constant", "cosine"):
        passed, told = checks.learning_rates(
            candidate_of(tmp_path, schedule=schedule, lr_min_ratio=0.1, max_steps=100)
        )
        assert passed and told.startswith("by step 1: ") and ", 100: " in told, "of the run, to its end"
    breaks(monkeypatch, loop, "rate_factor", lambda factor: factor - 0.5)
    assert not checks.learning_rates(candidate_of(tmp_path, max_steps=100))[0]
    monkeypatch.setattr(loop, "rate_factor", lambda _, progress: 0.5 + progress.step / 1000)
    assert not checks.learning_rates(candidate_of(tmp_path, max_steps=100))[0], "it rises to the end"


def test_storage(tmp_path: Path) -> None:
    here = small_config()
    assert checks.storage(tmp_path / "runs", here)[0]
    assert not list((tmp_path / "runs").iterdir())
    (tmp_path / "file").write_text("")
    passed, told = checks.storage(tmp_path / "file", here)
    assert not passed and "File exists" in told
    copied = here.replace(checkpoint_url=f"file://{tmp_path}/copies")
    passed, told = checks.storage(tmp_path / "runs", copied)
    assert passed and f"{copied.checkpoints.checkpoint_url} can be written" in told
    nowhere = here.replace(checkpoint_url=f"file://{tmp_path}/file")
    passed, told = checks.storage(tmp_path / "runs", nowhere)
    assert not passed and "CONFIG_CHECKPOINT_URL" in told


def test_a_plan_for_two_frozen_models_shrinks_to_one_device() -> None:
    split = small_plan(ROWS, strategy="split", branch_devices=(1, 1))
    small = checks.small_plan(split, (5, 5), world=1, device=False)
    assert (small.strategy, small.layout.devices, small.effective_batch) == ("single", 1, 10)


def test_memory() -> None:
    plan = small_plan(ROWS)
    assert checks.memory(plan) == (True, "not predicted: CONFIG_AUTO_METHOD_TABLE is set")
    enough = memory_of(usable_bytes=3 * 10**9)
    assert checks.memory(dataclasses.replace(plan, memory=enough))[0]
    assert not checks.memory(dataclasses.replace(plan, memory=memory_of(usable_bytes=10**9)))[0]


def test_an_error_of_a_model_is_a_failed_check(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(error: Exception) -> list[tuple[str, bool, str]]:
        def forward(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(LeNet5, "forward", forward)
        found = preflight.timed(("a", "b"), lambda: {"a": checks.first_loss(candidate)}, root=ROOT)
        return [(check.name, check.passed, check.finding) for check in found]

    shapes = "RuntimeError: shapes cannot be multiplied"
    assert told(RuntimeError("shapes cannot be multiplied\nand so on")) == [
        ("a", False, shapes),
        ("b", False, shapes),
    ]
    with pytest.raises(KeyError):
        told(KeyError("a mistake of ours"))


# What stands for the process of a rank: the folder's name says which of them fails, and how.
PROGRAM = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
if folder.name == "well":
    sys.exit()
if rank == "1":
    if folder.name == "silent":
        os._exit(3)
    raise RuntimeError("shapes cannot be multiplied")
while folder.name != "both" or b"RuntimeError: " not in (folder / "1.log").read_bytes():
    time.sleep(0.01)
time.sleep(0.1)  # clocks of file systems are coarser than a loop
sys.exit("error: Connection closed by peer")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("one", "process 1 of two failed: RuntimeError: shapes cannot be multiplied"),
        ("both", "process 1 of two failed: RuntimeError: shapes cannot be multiplied"),
        ("silent", "process 1 of two failed: it ended with status 3 and no message"),
    ],
)
def test_a_dead_rank_is_told_at_once(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "train" / "preflight").mkdir(parents=True)
    (tmp_path / "train" / "preflight" / "ranks.py").write_text(PROGRAM)
    (tmp_path / "well").mkdir()
    preflight_ranks._run(tmp_path / "well", root=tmp_path)
    (tmp_path / name).mkdir()
    began = time.monotonic()
    with pytest.raises(ToolkitError) as error:
        preflight_ranks._run(tmp_path / name, root=tmp_path)
    assert str(error.value) == told and time.monotonic() - began < 30


def memory_of(*, usable_bytes: int) -> Memory:
    return Memory(parts={"parameters": 2 * 10**9}, reserve_bytes=0, usable_bytes=usable_bytes)


@pytest.fixture
def two(candidate: Candidate) -> tuple[list[Results], Results, dict[str, Tensor]]:
    """What two ranks would have, as one process has it; and the weights before."""
    alone = outcome(candidate)
    before = {name: tensor.clone() for name, tensor in candidate.job(ROWS, **RULE).model.state_dict().items()}
    copies = [
        {kind: {n: t.clone() for n, t in part.items()} for kind, part in alone.items()} for _ in range(2)
    ]
    return copies, alone, before


def test_ranks_that_agree_pass(two: tuple[list[Results], Results, dict[str, Tensor]]) -> None:
    ranks, alone, before = two
    assert all(passed for passed, _ in compare_ranks(ranks, alone, before=before).values())


def test_ranks_that_sum_instead_of_averaging_fail(
    two: tuple[list[Results], Results, dict[str, Tensor]],
) -> None:
    ranks, alone, before = two
    for rank in ranks:
        for name, tensor in rank["weights"].items():
            tensor.copy_(before[name] + 2 * (tensor - before[name]))
    found = compare_ranks(ranks, alone, before=before)
    assert not found["gradients of 2 ranks"][0] and found["averages of 2 ranks"][0]


@pytest.mark.parametrize(
    ("kind", "name"), [("weights", "gradients of 2 ranks"), ("averages", "averages of 2 ranks")]
)
def test_ranks_that_drift_apart_fail(
    kind: str, name: str, two: tuple[list[Results], Results, dict[str, Tensor]]
) -> None:
    ranks, alone, before = two
    next(iter(ranks[1][kind].values())).add_(1e-9)
    assert [
        check for check, (passed, _) in compare_ranks(ranks, alone, before=before).items() if not passed
    ] == [name]
