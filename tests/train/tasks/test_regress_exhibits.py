"""What a regression shows, and a classifier of rows: against the evaluation and the table itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lib import kconf
from lib.config import config_from_values
from lib.data import Dataset
from lib.data.types import Column, row_text
from tests.lib.data.datasets.test_tabular import lines, read, table
from tests.support.training import small_job, small_plan
from train.job import Job, evaluate
from train.tasks.classify.exhibits import exhibits as exhibits_of_classes
from train.tasks.regress.exhibits import SHOWN, exhibits, predict
from train.training_data import make_training_data

ROOT = Path(__file__).resolve().parents[3]


def job_of(dataset: Dataset, *members: str) -> Job:
    chosen = "".join(f"CONFIG_{name}=y\n" for name in ("MODEL_MLP", "DATASET_TABULAR", *members))
    config = config_from_values(kconf.load_written(f"{chosen}CONFIG_MLP_WIDTH=4\n", root=ROOT).values)
    return small_job(config, small_plan(8), make_training_data(config, dataset), dtype=torch.float32)


def test_a_row_is_shown_in_its_own_units() -> None:
    columns = Column(name="size", mean=100.0, std=10.0), Column(name="city", values=("Oslo", "Rome"))
    assert row_text(columns, np.array([1.5, 0, 1], np.float32)) == "size 115, city Rome"
    assert row_text(columns, np.array([0, 0, 0], np.float32)) == "size 100, city ?"


@pytest.mark.parametrize("numbers", [[1] + [0] * 49, [1_700_000_017, 1_700_000_020], [1e-9, 3.25e-9]])
def test_numbers_of_a_table_read_as_they_were_written(numbers: list[float]) -> None:
    """Not as float32 rounds them: a zero was 5.96046e-08."""
    column = Column.of_numbers("n", np.array(numbers))
    rows = column.normalised(np.array(numbers))
    shown = [row_text([column], rows[[place]]) for place in range(len(numbers))]
    assert shown == [f"n {number:.6g}" for number in numbers]


@pytest.mark.slow
def test_exhibits_of_numbers_agree_with_the_evaluation(tmp_path: Path) -> None:
    dataset = read(table(tmp_path, lines(120)))
    job = job_of(dataset)
    with job.train_loader, job.eval_loader:
        result, (predicted, targets) = evaluate(job), predict(job)
        curve, worst = exhibits(job, dataset, iter(()))
    assert np.array_equal(targets, dataset.test.take()[1])
    error = np.abs(predicted - targets)[:, 0]
    assert np.mean(error**2) == pytest.approx(result["loss"], rel=1e-5)
    assert result["mae"] == pytest.approx(error.mean() * dataset.spec.targets[0].std, rel=1e-5)
    assert len(worst["rows"]) == SHOWN
    assert [line["name"] for line in curve["lines"]] == ["model", "predicted = true"]
    row, shown, true = worst["rows"][0]
    column, hardest = dataset.spec.targets[0], int(error.argmax())
    assert float(true) == pytest.approx(targets[hardest, 0] * column.std + column.mean, rel=1e-4)
    assert abs(float(shown) - float(true)) == pytest.approx(error.max() * column.std, rel=1e-2)
    assert row == row_text(dataset.spec.columns, dataset.test.take()[0][hardest])
    assert curve["kind"] == "chart"


@pytest.mark.slow
def test_exhibits_of_classes_show_rows(tmp_path: Path) -> None:
    dataset = read(table(tmp_path, lines(120)), targets="city", target="classes")
    job = job_of(dataset, "TABULAR_TARGET_CLASSES")
    with job.train_loader, job.eval_loader:
        matrix, _, worst, _ = exhibits_of_classes(job, dataset, iter(()))
    assert matrix["names"] == ["Oslo", "Paris", "Rome"]
    assert worst["rows"][0][0].startswith("size ") and ", year " in worst["rows"][0][0]
