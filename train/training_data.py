"""Training data of a run, with the facts about the model that planning needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lib.config import Config
from lib.data import DataLocation, Dataset, check_described, describe_dataset, open_dataset, restrict
from lib.data.cache import checked_before
from lib.data.types import Spec
from lib.errors import ConfigError, DataError, PlanError, raise_faults
from lib.memory.facts import ROWS, model_facts
from lib.nn.activation_checkpointing import configure_recomputation
from lib.nn.dropout import key_stock_dropouts
from lib.nn.model_code import ModelCode, build_model, check_tokenizer, has_stock_layers
from lib.plan.types import ModelFacts, Precision, Weight, least_effective_batch
from lib.plugins import MODELS
from train.job import warm_up_text
from train.tasks.base import (
    Prepared,
    check_options,
    image_operations,
    load_task,
    loss_apart,
    make_task,
    preparation_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """Data set and model facts of a run, independent of the hardware."""

    dataset: Dataset  # its parts: train, and test for evaluation
    facts: ModelFacts
    prepared: Prepared | None = None  # by the task, before training

    @property
    def flop_per_sample(self) -> float | None:
        """Operations of training on a sample, with those of frozen models; None if unknown."""
        known, frozen = self.facts.flop_per_sample, self.facts.branches or ()
        return known and known + sum(branch.flop_per_sample for branch in frozen)

    def to_json(self) -> dict[str, Any]:
        """Return the content of data.json."""
        sizes = {"train_size": self.dataset.train.size, "evaluation_size": self.dataset.test.size}
        skipped = {"skipped": list(self.dataset.skipped)} if self.dataset.skipped else {}
        facts = {**sizes, **skipped, "flop_per_sample": self.flop_per_sample}
        return {"source": self.dataset.source, **facts, **dataclasses.asdict(self.dataset.spec)}

    def preprocess(self) -> dict[str, Any]:
        """Return the content of preprocess.json, for `lib.data.inputs.stored_dataset`."""
        dataset = self.dataset
        return {
            "kind": type(dataset.spec).__name__,
            "spec": dataclasses.asdict(dataset.spec),
            "source": dataset.source,
            "class_names": list(dataset.class_names),
            "tokenizer": dataset.tokenizer and dataset.tokenizer.to_json(),
            "fills_missing": dataset.fills_missing,
        }


def describe_training_data(config: Config, *, root: Path, log: Callable[[str], None]) -> TrainingData:
    """Return what a plan needs, from metadata where they suffice; texts and questions are opened.

    Raises what `open_training_data` does.
    """
    check_tokenizer(config.model, config.model_options, config.tokenizer, config.tokenizer_dir)
    dataset = _metadata(config, root=root)
    if dataset is None:
        return open_training_data(config, root=root, trained=False, log=log)
    log(f"Data: {dataset.source}")
    return make_training_data(config, dataset)


def _metadata(config: Config, *, root: Path) -> Dataset | None:
    """Return the data set by its metadata, limited by DATA_LIMIT and HOLDOUT; None if contents are needed."""
    data_dir = _data_dir(config, root=root, log=lambda _: None, fetch=False)
    place = place_of(config, root=root, data_dir=data_dir, log=lambda _: None)
    with _with_size_faults(config):
        dataset = describe_dataset(place, config.data_options)
    if dataset is None:
        return None
    return restrict(dataset, limit=config.data_limit, holdout=config.holdout, opened=False)


def open_to_train(
    config: Config, *, root: Path, log: Callable[[str], None], refuse: Callable[..., object] = lambda *_: None
) -> TrainingData:
    """Open the data to train on, after checks that need no data.

    refuse: called with `config` and None, with the metadata of data, if any, before they are downloaded or
    made, and before the task trains models.

    Raises ConfigError for initial weights that are missing or do not fit the model, or a warmup longer than
    the run; PlanError where the effective batch is larger than the data.
    """
    base = None
    if config.weights.initial_weights:
        from train.base_run import base_of, check_base, train_base
        from train.initial_weights import initial_weights

        base = base_of(config, root)
        if base is None:
            initial_weights(config, root)
    if config.weights.adapt == "qlora":  # a plan does without
        from lib.nn.packages import import_extra

        import_extra("bitsandbytes")
    check_tokenizer(config.model, config.model_options, config.tokenizer, config.tokenizer_dir)
    refuse(config, None)
    if (known := _metadata(config, root=root)) is not None:
        check_sizes(config, known.train.size)

    is_local = not config.data_dir or _data_dir(config, root=root, log=log, fetch=False) is not None

    def check() -> None:
        if known and is_local:  # of what is at a URL only the usual is known
            if base is None:
                check_start(config, known, root, log=lambda _: None)
            refuse(config, make_training_data(config, known))

    with checked_before(check):
        data = open_training_data(config, root=root, log=log, refuse=refuse)
    if known and is_local:
        check_described(known, data.dataset, config.dataset)
    if base is not None:  # it takes longest, and data that are there were not checked
        refuse(config, data)
        check_base(base, config, data.dataset.spec, describe=partial(describe_training_data, root=root))
        train_base(base, root, log=log)
    check_start(config, data.dataset, root, log=log)
    return data


def check_start(config: Config, dataset: Dataset, root: Path, *, log: Callable[[str], None]) -> None:
    """Raise ConfigError where the weights that training starts from, if any, do not fit model or data."""
    if config.weights.initial_weights:
        from train.initial_weights import check_tokens, check_weights

        check_weights(config, dataset.spec, root, log=log)
        check_tokens(config, dataset, root, log=log)
    elif config.model_options.get("dir"):
        from train.initial_weights import check_head

        check_head(config, dataset)


def check_sizes(config: Config, train_size: int) -> None:
    """Raise PlanError or ConfigError where there are too few samples for the batch or the warmup."""
    effective_batch = least_effective_batch(config)
    if effective_batch is None:
        return
    if effective_batch > train_size:
        group = config.norm_batch or 1
        most = train_size // group * group
        remedy = f"CONFIG_TARGET_EFFECTIVE_BATCH={most or train_size}"
        remedy += "" if most else f" CONFIG_NORM_BATCH={train_size}"
        raise PlanError(
            f"an effective batch of {effective_batch} cannot be planned",
            why=f"there are only {train_size} training samples",
            todo=f"use at most {train_size}, such as {remedy}",
        )
    warm_up_text(config, train_size=train_size, effective_batch=effective_batch)


def open_training_data(
    config: Config,
    *,
    root: Path,
    log: Callable[[str], None],
    trained: bool = True,
    refuse: Callable[..., object] | None = None,
) -> TrainingData:
    """Open, generate or download the data, and determine the model facts.

    trained: models that the task prepares need their trained weights, and are pretrained unless they are
    cached. refuse: called with what training needs before they are; sizes are checked with it. Raises
    DataError if the data are not available, ConfigError if the model does not fit them.
    """
    dataset = open_configured(config, root=root, log=log)
    data = make_training_data(config, restrict(dataset, limit=config.data_limit, holdout=config.holdout))
    if refuse is not None:
        check_sizes(config, data.dataset.train.size)
    prepare = preparation_of(config)
    if prepare is None:
        return data

    def prepared(learned: bool) -> TrainingData:
        return with_prepared(config, data, prepare(config, dataset, root=root, learned=learned, log=log))

    with checked_before(lambda: refuse and refuse(config, prepared(False))):
        return prepared(trained)


def open_configured(config: Config, *, root: Path, log: Callable[[str], None]) -> Dataset:
    """Open the whole configured data set. Raises ConfigError if it cannot be used."""
    place = place_of(config, root=root, data_dir=_data_dir(config, root=root, log=log), log=log)
    with _with_size_faults(config):
        return open_dataset(place, config.data_options)


@contextmanager
def _with_size_faults(config: Config) -> Iterator[None]:
    """Report with faults of the data what will be wrong with their number: it would be the next error."""
    try:
        yield
    except DataError as error:
        if error.train_size is not None:
            try:
                check_sizes(config, error.train_size)
            except ConfigError as other:
                raise_faults(error.what, [*(error.faults or (error.why,)), str(other)], todo=error.todo)
        raise


def with_prepared(config: Config, data: TrainingData, prepared: Prepared) -> TrainingData:
    """Return `data` with what its task has prepared, and the facts about that."""
    spec = data.dataset.spec
    branches = prepared.branches(lambda: built(config, spec), spec)
    return dataclasses.replace(
        data, prepared=prepared, facts=dataclasses.replace(data.facts, branches=branches)
    )


def place_of(
    config: Config, *, root: Path, data_dir: Path | None, log: Callable[[str], None]
) -> DataLocation:
    """Return the location and the options of the configured data set."""
    return DataLocation(
        name=config.dataset,
        root=root,
        data_dir=data_dir,
        cache_dir=cache_of(root),
        download=config.data_download,
        log=log,
        image_size=config.image_size,
        block_size=config.block_size,
        tokenizer=config.tokenizer,
        tokenizer_dir=config.tokenizer_dir,
    )


def _data_dir(config: Config, *, root: Path, log: Callable[[str], None], fetch: bool = True) -> Path | None:
    """Return the local directory of data files, None for data without files, or where nothing is fetched.

    Raises ToolkitError where a URL cannot be copied to it.
    """
    if not config.data_dir:
        return None
    if "://" not in config.data_dir:
        return (root / Path(config.data_dir).expanduser()).resolve()  # relative to the source tree
    from lib.data.remote import copied, local_copy

    if not fetch:
        return copied(config.data_dir, cache_dir=cache_of(root))
    return local_copy(config.data_dir, cache_dir=cache_of(root), log=log)


def cache_of(root: Path) -> Path:
    """Return the directory for downloaded and generated data of the source tree at `root`."""
    return root / "data"


def make_training_data(config: Config, dataset: Dataset) -> TrainingData:
    """Return the training data of the configured model on `dataset`.

    Raises ConfigError where the two do not fit together, or the model's own code fails.
    """
    with ModelCode(config.model):
        check_task(config, dataset)
    spec = dataset.spec
    known: dict[str, Any] = {"name": config.model, "train_size": dataset.train.size}
    errors, stock, iterated = list[ConfigError](), False, False

    def build() -> nn.Module:
        nonlocal stock, iterated
        model = build_model(config.model, config.model_options, spec, seed=config.seed)
        stock, iterated = has_stock_layers(model), hasattr(model, "compile_steps")
        return checked(converted(model, config, spec), config, spec)

    for rows in ROWS:
        try:
            with ModelCode(config.model, torchs=True):
                facts = model_facts(build, spec, rows=rows, **known)
            if stock:
                from train.stock_layers import with_trial  # models of the tree do without

                facts = with_trial(config, spec, facts)
            task = None if preparation_of(config) else make_task(config, spec)
            facts = dataclasses.replace(facts, loss_apart=loss_apart(task, iterated=iterated))
            return TrainingData(dataset=dataset, facts=facts)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def built(config: Config, spec: Spec) -> nn.Module:
    """Build the configured model for data of `spec`."""
    model = build_model(config.model, config.model_options, spec, seed=config.seed)
    return converted(model, config, spec)


def converted(model: nn.Module, config: Config, spec: Spec) -> nn.Module:
    """Key the stock dropout of a new `model` by sample, and configure recomputation and what is trained."""
    key_stock_dropouts(model)
    configure_recomputation(model, config.grad_checkpoint or "none")
    if config.weights.freeze:
        from lib.nn.weights import freeze

        freeze(model, config.weights.freeze)
    if config.weights.adapt != "full":
        from train import adapters

        adapters.add(model, config, spec)
    return model


def stored_units(data: TrainingData, config: Config, precision: Precision) -> Sequence[Sequence[Weight]]:
    """Return the weights by FSDP unit, which are known, each in the type that it is stored in."""
    assert data.facts.units is not None
    if config.weights.adapt != "full":
        from lib.distributed.fsdp import weight_units
        from train.adapters import halve

        with torch.device("meta"):
            if halve(model := built(config, data.dataset.spec), config, precision):
                return weight_units(model)
    return data.facts.units


def check_task(config: Config, dataset: Dataset) -> None:
    """Raise ConfigError where the task is not for such data or refuses an option, or the model hides one."""
    spec, (expected, kinds) = dataset.spec, load_task(config).DATA
    if not isinstance(spec, kinds):
        place = MODELS.place(config.model)
        raise ConfigError(
            f'{place}/model.py: TASK = "{config.task}" does not train on {spec.name}',
            why=f"it needs {expected}",
            todo=f"set another TASK, or select another MODEL_DATA_ symbol in {place}/Kconfig",
        )
    check_options(config)
    if preparation_of(config) is None:
        make_task(config, spec)
    if config.evaluation.metrics or config.evaluation.best_metric:
        from train.tasks.metrics import check_figures  # few runs ask for any

        check_figures(config, dataset)
    image_operations(config, spec)


def checked(model: nn.Module, config: Config, spec: Spec) -> nn.Module:
    """Return the configured `model` with a hook that checks what its forward pass returns.

    The forward pass raises ConfigError where the task cannot use that.
    """
    task, file, unused = load_task(config), f"{MODELS.place(config.model)}/model.py", set[str]()
    if config.weights.adapt != "full":
        from lib.nn.lora import unused_error, watch_use

        unused = watch_use(model)

    def check(_: nn.Module, inputs: tuple[Tensor, ...], returned: Any) -> None:
        wrong = task.fault(returned, spec, rows=len(inputs[0]))
        if wrong:
            raise ConfigError(f"{file}: forward returns {_shape(returned)}, {wrong}")
        if not any(leaf.requires_grad for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)):
            raise ConfigError(
                f"{file}: what forward returns depends on no weight",
                why="there is nothing to train",
            )
        if unused:
            raise unused_error(unused)

    model.register_forward_hook(check)
    return model


def _shape(returned: Any) -> str:
    """Return the shape of a tensor, with a dtype that no outputs have, or the type of what is none."""
    if not isinstance(returned, Tensor):
        return type(returned).__name__
    dtype = "" if returned.is_floating_point() else f"{str(returned.dtype).removeprefix('torch.')} "
    return f"{dtype}{tuple(returned.shape)}"
