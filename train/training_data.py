"""What a run learns from: its data, and what planning has to know of the model that takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.config import Config
from lib.data import (
    AnswerSpec,
    Dataset,
    ImageSpec,
    Place,
    PuzzleSpec,
    open_dataset,
    outline,
    restrict,
)
from lib.data.remote import copied, local_copy
from lib.data.types import Spec
from lib.errors import ConfigError, PlanError
from lib.memory.facts import ROWS, model_facts
from lib.nn.activation_checkpointing import configure_recomputation
from lib.nn.model_code import ModelCode, build_model
from lib.plan.asked import least_effective_batch
from lib.plan.types import ModelFacts
from lib.runs.storage import is_url
from train.budget import warm_up_text
from train.contract import check_task, checked
from train.initial_weights import check_file, check_weights
from train.tasks.base import Prepared
from train.tasks.opening import preparation_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is trained on what, before anything is known of the machine."""

    dataset: Dataset  # train: what to train on; test: what to evaluate on
    facts: ModelFacts
    prepared: Prepared | None = None  # what the task has made before

    def to_json(self) -> dict[str, Any]:
        sizes = {"train_size": self.dataset.train.size, "evaluation_size": self.dataset.test.size}
        skipped = {"skipped": list(self.dataset.skipped)} if self.dataset.skipped else {}
        return {"source": self.dataset.source, **sizes, **skipped, **dataclasses.asdict(self.dataset.spec)}


def unopened_subject(config: Config, *, root: Path, say: Callable[[str], None]) -> Subject:
    """What a plan must know, as far as that can be without the data: texts and questions alone are opened.

    Raises what `open_subject` does.
    """
    dataset = _unopened(config, root=root)
    if dataset is None:
        return _opened(config, root=root, learned=False, say=say)
    say(f"Data: {dataset.source}")
    return measure(config, dataset)


def _unopened(config: Config, *, root: Path) -> Dataset | None:
    """What a look at files tells, cut by DATA_LIMIT and HOLDOUT; None where contents have to be read."""
    if config.data_dir and is_url(config.data_dir):
        data_dir = copied(config.data_dir, cache_dir=cache_of(root))
    else:
        data_dir = _data_dir(config, root=root, say=lambda _: None)
    place = place_of(config, root=root, data_dir=data_dir, say=lambda _: None)
    dataset = outline(place, config.data_options)
    if dataset is None:
        return None
    return restrict(dataset, limit=config.data_limit, holdout=config.holdout, opened=False)


def open_to_train(config: Config, *, root: Path, say: Callable[[str], None]) -> Subject:
    """`open_subject` for training. What would be refused later is refused before data are made or packed.

    Raises ConfigError for initial weights that are none or not the model's, or a warm-up that has no end;
    PlanError where the effective batch is larger than the data.
    """
    check_file(config, root)
    if (known := _unopened(config, root=root)) is not None:
        check_sizes(config, known.train.size)
    subject = _opened(config, root=root, learned=True, say=say, to_train=True)
    check_weights(config, subject.dataset.spec, root)
    return subject


def check_sizes(config: Config, train_size: int) -> None:
    """Raise PlanError or ConfigError where no machine could train on so few samples as is asked."""
    effective_batch = least_effective_batch(config)
    if effective_batch is None:
        return
    if effective_batch > train_size:
        raise PlanError(
            f"an effective batch of {effective_batch} cannot be planned",
            why=f"there are only {train_size} training samples",
            todo=f"take at most {train_size}, such as CONFIG_TARGET_EFFECTIVE_BATCH={train_size}",
        )
    warm_up_text(config, train_size=train_size, effective_batch=effective_batch)


def open_subject(config: Config, *, root: Path, say: Callable[[str], None]) -> Subject:
    """Open (or generate, or fetch) the data and take the model's measure.

    Frozen language models of the toolkit are trained, where that was not done before. Raises DataError if the
    data cannot be had, ConfigError if the model cannot take them.
    """
    return _opened(config, root=root, learned=True, say=say)


def _opened(
    config: Config, *, root: Path, learned: bool, say: Callable[[str], None], to_train: bool = False
) -> Subject:
    """learned: whether what the task prepares is to have the weights that it is trained with.

    to_train: refuse what could not be trained before that.
    """
    place = place_of(config, root=root, data_dir=_data_dir(config, root=root, say=say), say=say)
    dataset = open_dataset(place, config.data_options)
    subject = measure(config, restrict(dataset, limit=config.data_limit, holdout=config.holdout))
    if to_train:
        check_sizes(config, subject.dataset.train.size)
    prepare = preparation_of(config.model)
    if prepare is None:
        return subject
    return with_prepared(config, subject, prepare(config, dataset, root=root, learned=learned, say=say))


def with_prepared(config: Config, subject: Subject, prepared: Prepared) -> Subject:
    """`subject` with what its task has made before, and what planning has to know of it."""
    spec = subject.dataset.spec
    branches = prepared.branches(lambda: built(config, spec), spec)
    return dataclasses.replace(
        subject, prepared=prepared, facts=dataclasses.replace(subject.facts, branches=branches)
    )


def place_of(config: Config, *, root: Path, data_dir: Path | None, say: Callable[[str], None]) -> Place:
    """Where the configured data set is looked for, and what it is asked."""
    return Place(
        name=config.dataset,
        root=root,
        data_dir=data_dir,
        cache_dir=cache_of(root),
        download=config.data_download,
        say=say,
        image_size=config.image_size,
        block_size=config.block_size,
        tokenizer=config.tokenizer,
    )


def _data_dir(config: Config, *, root: Path, say: Callable[[str], None]) -> Path | None:
    """Where files are looked for on this disk. Raises ToolkitError where a URL cannot be copied to it."""
    if not config.data_dir:
        return None
    if is_url(config.data_dir):
        return local_copy(config.data_dir, cache_dir=cache_of(root), say=say)
    return (root / Path(config.data_dir).expanduser()).resolve()  # relative to the source tree


def cache_of(root: Path) -> Path:
    """Where what is made of data sets is kept, for the source tree at `root`."""
    return root / "data"


def measure(config: Config, dataset: Dataset) -> Subject:
    """The subject of training the configured model on `dataset`.

    Raises ConfigError where the two do not go together, or the model's own code fails.
    """
    check_task(config, dataset.spec)
    errors = list[ConfigError]()
    for rows in ROWS:
        try:
            return Subject(dataset=dataset, facts=_facts(config, dataset, rows=rows))
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _facts(config: Config, dataset: Dataset, *, rows: int) -> ModelFacts:
    with ModelCode(config.model, torchs=True):
        return model_facts(
            lambda: checked(built(config, dataset.spec), config.model, dataset.spec),
            dataset.spec,
            name=config.model,
            train_size=dataset.train.size,
            rows=rows,
        )


def evaluation_part(config: Config, dataset: Dataset) -> str:
    """What evaluation looks at, in words."""
    spec = dataset.spec
    whole = "test part" if isinstance(spec, ImageSpec | PuzzleSpec | AnswerSpec) else "validation part"
    part = "held-out training samples" if config.holdout else whole
    return f"{part} of {spec.name}{', synthetic' if spec.synthetic else ''}"


def built(config: Config, spec: Spec) -> torch.nn.Module:
    """The configured model for such data."""
    model = build_model(config.model, config.model_options, spec, seed=config.seed)
    configure_recomputation(model, config.grad_checkpoint or "none")
    return model
