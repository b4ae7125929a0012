"""What a user's file can hold that nothing of ours would write: told as an error, never by an assertion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from lib.data.augment import Kind
from lib.data.datasets.token_bins.data import map_bins
from lib.errors import CheckpointError, ConfigError, DataError, ToolkitError
from lib.optim.factory import make_optimizer
from lib.plan.types import Plan
from lib.runs.directory import RunDir
from lib.runs.index import stored
from tests.support.training import random_data, small_config, small_job, small_plan
from train.job import Progress
from train.loop import load_state_dict, state_dict
from train.training_data import make_training_data


@pytest.mark.parametrize(
    "changed",
    [
        {"strategy": "ddp"},
        {"strategy": "conquer"},
        {"shard": 2},
        {"shard": 0},
        {"world": 0},
        {"accumulation": 0},
        {"last_micro_batch": 5},
        {"effective_batch": 9},
        {"micro_batch": "4"},
        {"reasons": {}},
        {"reasons": 7},
        {"memory": 5},
        {"memory": {"parts": {}}},
        {"surplus": 1},
    ],
)
def test_a_plan_that_was_edited_is_told(tmp_path: Path, changed: dict[str, Any]) -> None:
    plan = small_plan(4, 4).to_json()
    run = RunDir.create(
        tmp_path, model="lenet5", identity="01234567", files={"config": "", "plan": plan | changed}
    )
    told = r"the plan of .* cannot be read: it was written by another version, or changed \("
    with pytest.raises(ToolkitError, match=told):
        stored(run, "plan", Plan.from_json)
    run.write("plan", plan)
    assert stored(run, "plan", Plan.from_json).effective_batch == 8


def test_files_of_tokens_of_two_widths_are_told(tmp_path: Path) -> None:
    def shard(name: str, magic: int, version: int, dtype: Any) -> None:
        header = np.zeros(256, np.int32)
        header[:3] = magic, version, 100
        (tmp_path / name).write_bytes(header.tobytes() + np.zeros(100, dtype).tobytes())

    shard("x_train_1.bin", 20240520, 1, np.uint16)
    shard("x_train_2.bin", 20240801, 7, np.uint32)
    shard("x_val_1.bin", 20240520, 1, np.uint16)
    with pytest.raises(DataError, match=r"x_train_1.bin and .*x_train_2.bin have tokens of 2 and 4 bytes"):
        map_bins(tmp_path, vocab_size=300)


class Convolution(nn.Conv2d):
    """A model that takes a bias for a matrix, and names what no option is for."""

    def hidden_matrices(self) -> list[nn.Parameter]:
        assert self.bias is not None
        return [self.bias]

    def sign_parameters(self) -> list[nn.Parameter]:
        return [self.weight]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("muon", r"hidden_matrices of Convolution names a weight of shape \(2,\): Muon is for matrices"),
        ("adam_atan2", "Convolution names sign_parameters, and there is no CONFIG_SIGN_LEARNING_RATE"),
    ],
)
def test_weights_that_an_optimizer_is_not_for_are_told(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_optimizer(
            Convolution(1, 2, 3),
            name=name,
            learning_rate=0.1,
            weight_decay=0.0,
            momentum=0.9,
            nesterov=False,
            adam_beta1=0.9,
            adam_beta2=0.9,
            adam_eps=1e-8,
            muon_learning_rate=0.1,
            sign_learning_rate=None,
            product_dtype=None,
            shard_state=False,
        )


@pytest.mark.slow
def test_a_change_of_samples_that_is_not_for_the_data_is_told() -> None:
    """A model's Kconfig may select several kinds of data."""
    kind: Kind = "symmetries"
    config = small_config(augment=kind)
    data = random_data(small_config(), shape=(1, 28, 28), train_size=8)
    with pytest.raises(
        ConfigError, match="CONFIG_AUGMENT_SYMMETRIES=y is not for random; set CONFIG_AUGMENT_NO"
    ):
        small_job(config, small_plan(4), data)


def test_mixed_labels_are_refused_where_the_task_does_not_train_on_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a task of one's own: what it does not look at would be dropped silently."""
    data = random_data(small_config(), shape=(1, 28, 28), train_size=8).dataset
    monkeypatch.delattr("train.tasks.classify.task.MIXES")
    for name in ("augment_mixup_alpha", "augment_cutmix_alpha"):
        with pytest.raises(ConfigError, match="mixup and cutmix are not for the task classify of lenet5"):
            make_training_data(small_config(**{name: 0.2}), data)
    make_training_data(small_config(augment_flip_vertical=True), data)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["model", "optimizer", "ema", "progress"])
@pytest.mark.parametrize("value", [None, 3, [], {}])
def test_a_checkpoint_that_holds_something_else_is_told(part: str, value: Any) -> None:
    config = small_config().replace(ema=True, ema_decay=0.9)
    data = random_data(config, shape=(1, 28, 28), train_size=8)
    job = small_job(config, small_plan(4), data)
    state = state_dict(job, Progress())
    if part == "progress" and value == {}:
        assert load_state_dict(job, {**state, part: value}) == Progress()
        return
    with pytest.raises(CheckpointError, match="does not fit the model of this version"):
        load_state_dict(job, {**state, part: value})
