"""What every data set keeps to: a run that reads its files trains the same, whole or cut, from any step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from lib.config import Config, config_from_values
from lib.plugin_folders import ROOT
from lib.plugins import DATASETS
from scripts.deletion import EXPERIMENTS
from tests.contract import options, small_data
from tests.contract.small_runs import say_nothing
from tests.contract.test_every_option_counts import assignments
from tests.support.training import largest_difference, small_job, small_plan, trained
from train import loop
from train.job import Job, Progress
from train.training_data import TrainingData, open_training_data

EIGHT, STEPS = 8, 4
# A model for each data set, and options; experiments have tests of theirs.
READERS = {
    "image_folder": "RESNET18 AUGMENT_RESIZED_CROP",
    "cifar10": "RESNET18",
    "cifar100": "RESNET18",
    "scenes": "RESNET18",
    "mnist": "LENET5",
    "fashion_mnist": "LENET5",
    "digits": "LENET5",
    "friedman": "MLP",
    "tabular": "MLP",
    "tabular TABULAR_TARGET_LABELS TABULAR_TARGETS=small,odd": "MLP",
    "jsonl": "GPT2",
    "tagged": "GPT2",
    "chat": "GPT2 BLOCK_SIZE=32",
    "sst2": "GPT2",
    "text_files": "GPT2",
    "token_bins": "GPT2",
    "pysource": "GPT2",
    "markov": "GPT2",
    "shakespeare": "GPT2",
    "wikitext2": "GPT2",
    "wikitext103": "GPT2",
}
TWINS = {"cifar100", "wikitext103"}  # of cifar10 and wikitext2, which the same plug-ins read
NAMES = [pytest.param(name, marks=[pytest.mark.long] if name in TWINS else []) for name in READERS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("readers")
    small_data.write_files(place / "data")
    with small_data.few_generated():
        yield place


@cache
def opened(name: str, root: Path) -> tuple[Config, TrainingData]:
    dataset, *more = name.split()
    shown = " ".join([READERS[name], f"DATASET_{dataset.upper()}", *more])
    values = options.resolved(options.settle(assignments(shown))).values
    config = config_from_values(values).replace(target_effective_batch=EIGHT, max_steps=STEPS)
    return config, open_training_data(config, root=root, log=say_nothing)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_does_not_depend_on_the_split_or_on_where_it_resumes(name: str, root: Path) -> None:
    config, data = opened(name, root)
    assert config.dataset == name.split()[0]
    plans = [
        small_plan(*sizes, norm_batch=2 * data.facts.has_batchnorm) for sizes in ((8,), (6, 2), (2, 2, 2, 2))
    ]
    streamed = config.replace(data_placement="stream")  # a reader's samples are taken by micro-batch
    whole = trained(small_job(config.replace(data_placement="resident"), plans[0], data))
    cut = [trained(small_job(streamed, plan, data)) for plan in plans]
    assert max(largest_difference(whole, each) for each in cut) <= 1e-11
    first, second = (small_job(streamed, plans[0], data) for _ in range(2))
    loop.optimizer_step(first, Progress())
    loop.load_state_dict(second, copy.deepcopy(loop.state_dict(first, Progress(step=1))))
    loop.train(second, Progress(step=1))
    assert largest_difference(whole, second.model.state_dict()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_the_gradient_of_one_process_together(name: str, root: Path) -> None:
    config, data = opened(name, root)
    norm_batch = 2 * data.facts.has_batchnorm
    whole = gradients(small_job(config, small_plan(EIGHT, norm_batch=norm_batch), data))
    parts = []
    for rank in range(2):
        alone = small_job(config, small_plan(EIGHT // 2, norm_batch=norm_batch), data)
        alone.backend.rank = rank
        shared = small_plan(EIGHT // 2, world=2, norm_batch=norm_batch)
        parts.append(gradients(dataclasses.replace(alone, plan=shared)))
    averaged = {name: (parts[0][name] + parts[1][name]) / 2 for name in whole}
    assert largest_difference(whole, averaged) <= 1e-12
    assert largest_difference(whole, parts[0]) > 1e-6, "a rank has other samples"


def gradients(job: Job) -> dict[str, Tensor]:
    assert [*loop.accumulate_gradients(job, Progress())]
    found = {name: weight.grad for name, weight in job.model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def test_every_data_set_of_the_core_is_among_them() -> None:
    named = {name.split()[0] for name in READERS}
    own = [home for homes in EXPERIMENTS.values() for home in homes]
    others = [name for name in DATASETS.names() if name not in named]
    assert [
        name for name in others if not str(DATASETS.home(name).relative_to(ROOT)).startswith((*own,))
    ] == []
