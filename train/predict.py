"""make predict: what a stored run says about files, without its training data."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lib import atomic, units
from lib.data import EvalLoader, LoaderConfig
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.inputs import Inputs, read_inputs, split_inputs, unlabelled
from lib.data.types import Dataset, Spec
from lib.errors import ConfigError
from lib.nn.precision import full_precision
from lib.runs.console import Console
from train.generate import Sampling
from train.job import Job, evaluated_weights
from train.record import log
from train.stored_run import Restored, restore
from train.tasks.answers import answers_of

SUFFIXES = (".csv", ".json", ".jsonl")
GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "tokens": 200, "seed": 1}
SHOWN_ROWS, SHOWN_COLUMNS = 20, 6  # of a table on the screen

Progress = Callable[[int, int], None]  # samples done, samples in all


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Predictions:
    """Predictions of a run: the names of N samples in the order of the input, and columns (N,) by name."""

    run: Path
    step: int  # of the checkpoint
    precision: str
    names: tuple[str, ...]
    columns: dict[str, npt.NDArray[Any]]

    def __repr__(self) -> str:
        """Return the number of predictions, the names of the columns and the run."""
        made = units.counted(len(self.names), "prediction")
        return f"<{made} of {self.run}, step {self.step}: {', '.join(self.columns)}>"

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each sample as plain values, its name first, as "input"."""
        columns = {name: [*map(_plain, column)] for name, column in self.columns.items()}
        for row, name in enumerate(self.names):
            yield {"input": name} | {key: column[row] for key, column in columns.items()}


def predict(
    restored: Restored,
    inputs: Inputs,
    *,
    top: int = 0,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    log: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> Predictions:
    """Return what a run predicts of `inputs` (`lib.data.inputs.read_inputs`), or answers to conversations.

    The preprocessing, weights and precision are those of `make eval`. top: keep the probabilities of this
    many classes; 0: of each. sampling: fields of Sampling, of answers; greedy decoding by default. Raises
    ConfigError for inputs that cannot be read or do not fit, and for a run whose task has no predictions.
    """
    job, dataset = restored.job, restored.data.dataset
    chats = isinstance(dataset.spec, ChatSpec)
    if top and chats:
        raise ConfigError(f"TOP={top} is for classes, and the run answers conversations", todo="leave it out")
    if sampling and not chats:
        first = next(iter(sampling)).upper()
        raise ConfigError(f"{first}= is for answers, and the run writes none", todo="leave it out")
    predicted = _answered if chats else _predicted
    names, columns = predicted(job, dataset, inputs, top=top, sampling=sampling, log=log, progress=progress)
    return Predictions(
        run=restored.run.path,
        step=restored.step,
        precision=job.plan.precision,
        names=tuple(names),
        columns=columns,
    )


def _predicted(
    job: Job, dataset: Dataset, inputs: Inputs, *, top: int, log: Callable[[str], None], **others: Any
) -> tuple[list[str], dict[str, npt.NDArray[Any]]]:
    answers = answers_of(job.config)
    columns = answers.predictions(dataset.spec, class_names=dataset.class_names, top=top)
    names, parts = list[str](), list[npt.NDArray[Any]]()
    with evaluated_weights(job):
        total, chunks = read_inputs(inputs, dataset, rows=job.plan.micro_batch, log=log)
        for rows in chunks:
            outputs = outputs_of(job, dataset.spec, rows.inputs)
            parts.append(answers.postprocess(outputs, dataset.spec).cpu().numpy())
            names += rows.names
            if len(names) < total:
                others["progress"](len(names), total)
    return names, columns(np.concatenate(parts))


def _answered(
    job: Job, dataset: Dataset, inputs: Inputs, *, sampling: Mapping[str, Any], **others: Any
) -> tuple[list[str], dict[str, npt.NDArray[Any]]]:
    from train.tasks.chat.exhibits import answered

    if isinstance(inputs, np.ndarray | Mapping):
        raise ConfigError("conversations are no array and no table", todo="name files of JSON Lines")
    paths = [str(path) for path in ([inputs] if isinstance(inputs, str | Path) else inputs)]
    own = Sampling(**{**GREEDY, **sampling})
    return answered(job, dataset, paths, sampling=own, log=others["log"], progress=others["progress"])


@torch.no_grad()
def outputs_of(job: Job, spec: Spec, inputs: npt.NDArray[Any]) -> Tensor:
    """Return what the model returns for samples (N, ...) as they are stored, normalised as in evaluation."""
    loader_config = LoaderConfig(
        device=job.backend.device, channels_last=job.plan.channels_last, placement="resident"
    )
    with EvalLoader(unlabelled(inputs), spec, loader_config) as loader:
        (batch,) = loader.batches(rank=0, world=1, batch_size=len(inputs))
    with job.backend.autocast(job.plan.precision):
        outputs: Tensor = job.forward(batch.inputs)
    job.backend.mark_step()
    return full_precision(outputs)


def command(
    name: str,
    *,
    root: Path,
    runs: Path,
    best: bool,
    given: str,
    out: Path | None,
    top: int,
    sampling: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Write the predictions of run `name` for INPUT= to `out`, or print the first of them."""
    if not given:
        raise ConfigError("there is nothing to predict", todo="name files, a folder or - by INPUT=")
    inputs = split_inputs(given)
    if out is not None:
        _check_out(out, inputs)
    restored = restore(name, root=root, runs=runs, best=best, needs_data=False, check=answers_of)
    with _progress() as progress:
        found = predict(restored, inputs, top=top, sampling=sampling, log=log, progress=progress)
    if out is None:
        _print(found)
    else:
        atomic.save(out, _text(found, out.suffix.lower()))
    where = f", written to {out}" if out else ""
    made = units.counted(len(found.names), "prediction")
    log(f"{found.run}, step {found.step}: {made} in {found.precision}{where}")
    return 0


def _check_out(out: Path, inputs: Sequence[str]) -> None:
    """Raise ConfigError where predictions cannot be written, before they are made."""
    if any(Path(each).resolve() == out.resolve() for each in inputs):
        raise ConfigError(f"OUT={out} is an input", todo="name another file")
    atomic.check_writable(out, "OUT", log=log, suffixes=SUFFIXES)


def _text(found: Predictions, suffix: str) -> str:
    if suffix == ".csv":
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["input", *found.columns])
        writer.writerows(row.values() for row in found.rows())
        return file.getvalue()
    lines = [json.dumps(row, ensure_ascii=False) for row in found.rows()]
    return "\n".join(lines) + "\n" if suffix == ".jsonl" else "[" + ",\n".join(lines) + "]\n"


def _plain(value: Any) -> Any:
    """Return a number with as many digits as its type has, or a text."""
    return float(str(value)) if isinstance(value, np.floating) else value


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _print(found: Predictions) -> None:
    shown = [*itertools.islice(found.rows(), SHOWN_ROWS)]
    heads = ["input", *found.columns][: SHOWN_COLUMNS + 1]
    cells = [[_short(row[head]) for head in heads] for row in shown]
    for line in units.aligned([*zip(heads, *cells, strict=True)]):
        log(line)
    more = {"more row": len(found.names) - len(shown), "more column": len(found.columns) + 1 - len(heads)}
    if left := " and ".join(units.counted(count, noun) for noun, count in more.items() if count):
        log(f"{left}: OUT=predictions.csv writes all")


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console()
    console.start(None, description="predict")
    try:
        yield console.count
    finally:
        console.stop()
