"""Tasks: their interfaces to the training loop, and those of train/tasks, found by model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from lib.config import Config
from lib.data.augment import Operation
from lib.data.loader import Batch
from lib.data.types import Part, Spec
from lib.devices.base import Backend, send
from lib.errors import ConfigError, ToolkitError
from lib.nn.model_code import ModelCode, TaskCode, load_model
from lib.plan.types import ITERATED, WITHOUT_DOUBLE, Branch, Plan
from lib.plugins import MODELS, TASKS
from lib.runs.metrics import RESERVED, RESERVED_SUMS, higher_is_better

Forward = Callable[..., Any]  # a module, perhaps wrapped or compiled
_Training = TypeVar("_Training", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over one micro-batch; the loop divides by the global count, so all samples weigh the same."""

    loss: Tensor  # scalar, differentiable in training
    count: Tensor | int  # number of summands; an int needs no synchronization with the device
    metrics: Mapping[str, Tensor]  # further sums of any shape, without gradient
    rows: tuple[Tensor, ...] = ()  # of an evaluation, for `HasRowFigures`: (N, ...) each, weights last


def pure(training: _Training) -> _Training:
    """Mark a `Task.training` that depends on model and batch alone, so that it is compiled with the model.

    It keeps no state and asks the host for no value of a tensor, nor does a method that it calls, which a
    derived task may override. A method that overrides `training` itself is not marked.
    """
    vars(training)["is_pure"] = True
    return training


def loss_apart(task: Task | None, *, iterated: bool) -> str:
    """Return why the loss of `task` is not compiled with its model; "" where it is.

    task: None for one with a preparation. iterated: the model is compiled by iteration.
    """
    if task is None:
        return "the task trains with frozen models"
    if iterated:
        return ITERATED
    is_pure = getattr(task.training, "is_pure", False)
    return "" if is_pure else f"{type(task).__name__}.training is not marked as pure"


def count_of(batch: Batch) -> Tensor | int:
    """Return the number of rows that are samples."""
    return len(batch.inputs) if batch.weights is None else batch.weights.sum()


def weighted_sum(values_N: Tensor, batch: Batch) -> Tensor:
    """Sum one value per row, without padding."""
    return values_N.sum() if batch.weights is None else (values_N * batch.weights).sum()


class Totals:
    """Sums that stay on the device until they are read, which synchronizes."""

    def __init__(self) -> None:
        self._parts: list[Sums] = []

    def add(self, sums: Sums) -> None:
        """Add the sums of a micro-batch, detached, so that its graph is freed."""
        rows = tuple(column.detach().cpu() for column in sums.rows)
        self._parts.append(Sums(sums.loss.detach(), sums.count, sums.metrics, rows))

    def means(self, backend: Backend) -> dict[str, Any]:
        """Return the means over all ranks, and the global count as "count"; arrays of sums that are some."""
        # Sums over an evaluation exceed the precision of float32, but some devices lack float64.
        dtype = torch.float32 if backend.kind in WITHOUT_DOUBLE else torch.float64
        first = self._parts[0]
        names = ["loss", *first.metrics]
        counts = [part.count for part in self._parts]
        host = sum(count for count in counts if isinstance(count, int))
        columns = [
            [send(host, first.loss.device), *(c for c in counts if isinstance(c, Tensor))],
            [part.loss for part in self._parts],
            *([part.metrics[name] for part in self._parts] for name in names[1:]),
        ]
        sums = [torch.stack(column).to(dtype).sum(dim=0) for column in columns]
        packed = torch.cat([each.flatten() for each in sums])
        backend.all_reduce_sum(packed)
        parts = torch.split(packed.cpu().double(), [each.numel() for each in sums])
        if not parts[0]:
            raise ToolkitError("no target was counted: Sums.count is 0", todo="count samples, as by count_of")
        total, *reduced = (part.view(each.shape) for part, each in zip(parts, sums, strict=True))
        means = {name: value / total for name, value in zip(names, reduced, strict=True)}
        scalars = {name: value if value.dim() else value.item() for name, value in means.items()}
        return {"count": total.item(), **scalars}

    def rows(self, backend: Backend) -> tuple[Tensor, ...] | None:
        """Gather `Sums.rows` of all ranks to rank 0, in the order of the evaluation part, without padding.

        Collective; empty on other ranks. None where the task asks for no rows. Every rank has equally many
        batches of one size, and the ranks take turns (`EvalLoader.batches`).
        """
        if not self._parts[0].rows:
            return None
        gathered = [
            torch.stack(ranks, dim=1).flatten(0, 2)
            for column in zip(*(part.rows for part in self._parts), strict=True)
            if (ranks := backend.gather(torch.stack(column)))
        ]
        return tuple(column[gathered[-1] > 0] for column in gathered[:-1])


class Task(Protocol):
    """A kind of learning: classification, language modelling, ..."""

    targets_per_sample: int  # `Sums.count` per sample if it is an int

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the training loss of one micro-batch; `batch.weights` are of its rows, None for all 1."""

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss without regularisation; rows are weighted by `batch.weights`."""

    def report(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures of an evaluation from `Totals.means`; "count" comes first, named by its unit."""

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the score of a `report`; larger is better."""


class Carry(Protocol):
    """State of the rows of the effective batch between optimizer steps."""

    def seek(self, *, step: int, first: int, offset: int, count: int, rows: int) -> None:
        """Select the rows of the next micro-batch: `count` with samples, and padding up to `rows`."""

    def commit(self) -> None:
        """Keep the state of the finished step."""

    def discard(self) -> None:
        """Discard the state of an abandoned step."""

    def gathered(self, backend: Backend) -> dict[str, Tensor] | None:
        """Gather the state of all ranks for a checkpoint."""

    def load(self, state: Mapping[str, Tensor] | None, backend: Backend, *, shares: Sequence[int]) -> None:
        """Load the state of a checkpoint. shares: rows of each rank."""


@runtime_checkable
class Carries(Protocol):
    """A task whose samples stay for several steps."""

    @property
    def carry(self) -> Carry:
        """State of the rows."""


class HasRowFigures(Protocol):
    """A task with figures that are no function of sums, such as the area under a curve."""

    def row_figures(self, *rows: Tensor) -> dict[str, float]:
        """Return figures of the evaluation part from its `Sums.rows`, in its order; called on one rank."""


@runtime_checkable
class SeesTraining(Protocol):
    """A task that depends on the training part, such as on how often each class occurs."""

    def see_training(self, part: Part) -> None:
        """Take what is needed of the training part. Of metadata all targets are 0."""


class Figures(NamedTuple):
    """Names of the figures of a task, as its optional definition `figures(options, spec)` returns them.

    always: of `Task.report`. requested: those that CONFIG_METRICS can add. by_rows: those of them that come
    from `HasRowFigures`, so that CONFIG_EVAL_ROWS_MAX limits the evaluation part.
    """

    always: tuple[str, ...]
    requested: tuple[str, ...] = ()
    by_rows: tuple[str, ...] = ()


@runtime_checkable
class HoldsWeights(Protocol):
    """A task with frozen models."""

    def watch_weights(self, seen: Callable[[list[Tensor]], None]) -> None:
        """Call `seen` with the weights of the frozen models, and with each copy that training makes."""


class Prepared(Protocol):
    """Result of a task's preparation, such as pretrained frozen models."""

    def branches(self, build: Callable[[], torch.nn.Module], spec: Spec) -> tuple[Branch, Branch]:
        """Return the two branches for the planner; `build` makes the trained model."""

    def load(self, plan: Plan, backend: Backend, dtype: torch.dtype) -> Any:
        """Load onto the devices of the plan what the task's `build` takes as `prepared`."""


class TaskModule(Protocol):
    """Required definitions of train/tasks/NAME/task.py; `preparation_of` and others take optional ones."""

    Options: type[Any]  # a frozen dataclass; its fields are the task's own symbols
    DATA: tuple[str, tuple[type, ...]]  # data that it learns from: description and specs
    build: Callable[..., Task]  # takes Options and spec; keywords config, and prepared after a preparation
    fault: Callable[..., str]  # takes what a model returns, the spec and rows: the fault, or ""


def load_task(config: Config) -> TaskModule:
    """Load the configured task. Raises ConfigError if it or the model's file is invalid."""
    load_model(config.model)
    with ModelCode(config.model):
        task = cast(TaskModule, TASKS.load(config.task))
    if not isinstance(task.DATA, tuple) or len(task.DATA) != 2:
        what = f"{TASKS.place(config.task)}/task.py: DATA is {task.DATA!r}"
        raise ConfigError(what, todo='write a description and specs: DATA = "images", (ImageSpec,)')
    return task


def image_operations(config: Config, spec: Spec) -> list[Operation]:
    """Return the further augmentations of images. Raises ConfigError where data or task forbid one."""
    if not any(astuple(config.augmentation)):
        return []
    from lib.data.image_augment import operations  # few runs have any

    found = operations(config.augmentation, spec)
    if found[-1].name == "mix" and "MIXES" not in vars(load_task(config)):
        raise ConfigError(
            f"mixup and cutmix are not for the task {config.task} of {config.model}",
            why=f"train/tasks/{config.task}/task.py does not define MIXES: it trains on one label per sample",
            todo="set CONFIG_AUGMENT_MIXUP_ALPHA and CONFIG_AUGMENT_CUTMIX_ALPHA to 0",
        )
    return found


def make_task(config: Config, spec: Spec, *, prepared: Any = None, train: Part | None = None) -> Task:
    """Build the configured task. Raises ConfigError for options that it refuses.

    prepared: from `Prepared.load`, for a task with a preparation. train: the training part.
    """
    given = {} if preparation_of(config) is None else {"prepared": prepared}
    with TaskCode(config.task):
        task = load_task(config).build(_options(config), spec, config=config, **given)
        if isinstance(task, type) or not callable(getattr(task, "training", None)):
            kind = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
            what = f"{TASKS.place(config.task)}/task.py: build returns {kind}, not a Task"
            raise ConfigError(what, todo="return an object with its methods, such as training")
        if train is not None and isinstance(task, SeesTraining):
            task.see_training(train)
    return task


def _options(config: Config) -> Any:
    return TASKS.options(config.task, config.task_options)


def optional_function(config: Config, name: str) -> Callable[..., Any] | None:
    """Return a function that the task may define, None if it does not."""
    function = vars(load_task(config)).get(name)
    return None if function is None else TaskCode(config.task)(function)


def preparation_of(config: Config) -> Callable[..., Prepared] | None:
    """Return the preparation of the task, None if it has none.

    It takes configuration, data set, root, learned (false for random weights) and log.
    """
    return optional_function(config, "prepare")


Columns = dict[str, npt.NDArray[Any]]


def figures_of(config: Config, spec: Spec) -> Figures:
    """Return the names of the figures that the task reports; by default only the loss is known."""
    figures = optional_function(config, "figures")
    return Figures(("loss",)) if figures is None else figures(_options(config), spec)


def requested_metrics(config: Config) -> tuple[str, ...]:
    """Return the names in CONFIG_METRICS."""
    return tuple(dict.fromkeys(config.evaluation.metrics.replace(",", " ").split()))


def check_options(config: Config) -> None:
    """Raise ConfigError if a symbol of the task is hidden because the model's Kconfig does not select it."""
    hidden = [name for name, value in config.task_options.items() if value is None]
    if hidden:
        place = MODELS.place(config.model)
        raise ConfigError(
            f'{place}/model.py: TASK = "{config.task}" has no CONFIG_{hidden[0].upper()}',
            todo=f"select {vars(load_task(config))['SELECTS']} in {place}/Kconfig",
        )


def refuse_label_smoothing(config: Config, predicts: str, *, weights: bool = False) -> None:
    """Raise ConfigError for label smoothing and class weights, unless the task has `weights`."""
    if config.label_smoothing:
        given, todo = f"CONFIG_LABEL_SMOOTHING={config.label_smoothing:g} is", "leave it at 0"
    elif config.class_weights and not weights:
        given, todo = f"CONFIG_CLASS_WEIGHTS={config.class_weights} are", "leave it empty"
    else:
        return
    raise ConfigError(f"{given} for labels", why=f"{config.model} predicts {predicts}", todo=todo)


def no_logits(returned: Any, before: tuple[int, ...], classes: int, *, padded: bool = False) -> str:
    """Return the fault if `returned` is no floating-point (*before, classes) tensor, else "".

    padded: there may be more classes, which nothing is.
    """
    if isinstance(returned, Tensor) and returned.is_floating_point() and returned.shape[:-1] == before:
        found = returned.shape[-1]
        if found == classes or (padded and found > classes):
            return ""
    return f"not floating-point logits {(*before, classes)}"


def check_sums(sums: Any, config: Config, *, targets: int | None = None) -> None:
    """Raise ConfigError unless `sums` of a micro-batch are what a task returns.

    targets: those of its samples in training, which a count that is an int must equal; None in evaluation.
    """
    if isinstance(sums, Sums) and isinstance(sums.metrics, Mapping) and isinstance(sums.loss, Tensor):
        loss, count, metrics = sums.loss, sums.count, sums.metrics.values()
        counts = not count.dim() if isinstance(count, Tensor) else type(count) is int and count == targets
        trains = not loss.dim() and (loss.requires_grad or targets is None)
        named = RESERVED_SUMS.isdisjoint(sums.metrics)
        if counts and trains and named and all(isinstance(each, Tensor) for each in metrics):
            return
    from train.tasks.faults import sums_error

    raise sums_error(sums, config, targets, are_sums=isinstance(sums, Sums))


def report_of(task: Task, totals: Totals, backend: Backend, config: Config) -> dict[str, float]:
    """Return the figures of an evaluation, the same on every rank. Collective. Raises ConfigError."""
    figures = _checked("report", task.report(totals.means(backend)), config)
    if (rows := totals.rows(backend)) is None:
        return figures
    of_rows = cast(HasRowFigures, task).row_figures(*rows) if backend.is_main else None
    return figures | _checked("row_figures", backend.broadcast(of_rows), config)


def _checked(function: str, figures: Any, config: Config) -> dict[str, float]:
    """Return `figures`. Raises ConfigError unless they are what `function` of a task returns."""
    if isinstance(figures, dict) and RESERVED.isdisjoint(figures):
        numbers = [each for each in figures.values() if isinstance(each, int | float)]
        counted = function != "report" or (numbers and float(numbers[0]).is_integer())
        if counted and len(numbers) == len(figures):
            return figures
    from train.tasks.faults import figures_error

    raise figures_error(figures, config, function)


class _Reported(dict[str, float]):
    """Figures of an evaluation. Raises ConfigError for one that is not there."""

    def __init__(self, figures: Mapping[str, float], config: Config) -> None:
        super().__init__(figures)
        self._config = config

    def __missing__(self, name: str) -> NoReturn:
        from train.tasks.faults import missing_error

        raise missing_error(name, self, self._config)


def score_of(task: Task, figures: Mapping[str, float], config: Config) -> float:
    """Return CONFIG_BEST_METRIC, or else the score of `task`: the higher, the better. Raises ConfigError."""
    figures = _Reported(figures, config)
    if metric := config.evaluation.best_metric:
        return figures[metric] if higher_is_better(metric) else -figures[metric]
    score: Any = task.score(figures)
    if isinstance(score, int | float):
        return score
    raise ConfigError(
        f"{TASKS.place(config.task)}/task.py: score returns {type(score).__name__}, not a number"
    )
