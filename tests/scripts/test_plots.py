import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from lib.errors import ToolkitError
from lib.reports.series import series_of
from lib.runs.directory import RunDir
from lib.runs.metrics import MetricsWriter
from scripts import plots

ROOT = Path(__file__).parents[2]


def rows(count: int = 100) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for step in range(10, 10 * count + 1, 10):
        loss, epoch = 2.3 * 0.995**step, step / 200
        train = {"kind": "train", "step": step, "epoch": epoch, "loss": loss, "accuracy": 1 - loss / 3}
        made.append(
            {**train, "learning_rate": 1e-3, "samples_per_second": 2e4 + step % 30, "seconds": step / 10}
        )
        if step % 200 == 0:
            made.append(
                {"kind": "eval", "step": step, "epoch": epoch, "loss": loss, "accuracy": 0.9, "samples": 9}
            )
    return made


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    saved: list[Figure] = []
    savefig = Figure.savefig

    def keep(self: Figure, *arguments: Any, **options: Any) -> None:
        saved.append(self)
        savefig(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


@pytest.mark.slow
def test_all_four_are_pictures_that_say_what_they_show(tmp_path: Path, figures: list[Figure]) -> None:
    said: list[str] = []
    paths = plots.write_plots(
        series_of(rows()), tmp_path / "plots", title="lenet5 on digits", log=said.append
    )
    assert [path.name for path in paths] == [
        "loss.png",
        "accuracy.png",
        "learning_rate.png",
        "throughput.png",
    ]
    assert said == []
    for path, figure in zip(paths, figures, strict=True):
        pixels = image.imread(path)
        assert pixels.shape[:2] == (550, 968) and len(np.unique(pixels)) > 10
        axes = figure.axes[0]
        assert figure.get_suptitle() == "lenet5 on digits" and axes.get_xlabel() == "optimizer step"
        assert axes.get_ylabel().endswith(")"), "the axis names its unit"
        (top,) = axes.child_axes
        assert top.get_xlabel() == "epoch"
        assert top.get_xlim() == pytest.approx([limit / 200 for limit in axes.get_xlim()])


@pytest.mark.slow
def test_lines_hold_the_numbers(tmp_path: Path, figures: list[Figure]) -> None:
    made = rows()
    plots.write_plots(series_of(made), tmp_path, title="", log=print)
    loss, accuracy, _, throughput = (figure.axes[0] for figure in figures)
    train = [row for row in made if row["kind"] == "train"]
    raw, smoothed, evaluation = loss.lines
    assert list(raw.get_ydata()) == [row["loss"] for row in train]
    assert list(evaluation.get_xdata()) == [200, 400, 600, 800, 1000]
    assert list(accuracy.lines[2].get_ydata()) == [90.0] * 5
    assert np.std(np.diff(smoothed.get_ydata()[5:-5])) < 0.1
    assert loss.get_yscale() == "log" and accuracy.get_yscale() == "linear"
    assert throughput.get_ylim()[0] == 0


def test_smoothing_is_a_centred_mean() -> None:
    assert list(plots._smoothed(np.full(100, 3.0))) == [3.0] * 100
    ramp = np.arange(600.0)
    assert list(plots._smoothed(ramp)[20:-20]) == pytest.approx(ramp[20:-20])
    assert plots._smoothed(np.eye(101)[50])[50] == pytest.approx(1 / 3)


def test_what_has_no_numbers_is_left_out_and_told(tmp_path: Path) -> None:
    made = [{"kind": "train", "step": 1, "loss": 1.0, "accuracy": None, "note": "accuracy is nan"}]
    said: list[str] = []
    paths = plots.write_plots(series_of(made), tmp_path, title="", log=said.append)
    assert [path.name for path in paths] == ["loss.png"]
    assert said == [
        "no accuracy plot: no row has a number for accuracy",
        "no learning_rate plot: no row has a number for learning_rate",
        "no throughput plot: no row has a number for samples_per_second",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [-1.0, 5.0, 1e9], [0.0, 1e-30], [1e38, 1e-30]])
def test_odd_numbers_are_drawn(tmp_path: Path, values: list[float]) -> None:
    made = [{"kind": "train", "step": step, "loss": value} for step, value in enumerate(values)]
    assert plots.write_plots(series_of(made), tmp_path, title="$x_1 %", log=lambda _: None)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("")
    with pytest.raises(ToolkitError, match="cannot write a plot"):
        plots.write_plots(series_of(rows(3)), tmp_path / "plots", title="", log=print)


# make plots


def make_plots(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "scripts.plots", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_the_command_prints_the_paths(tmp_path: Path) -> None:
    data = {"name": "digits", "synthetic": True}
    run = RunDir.create(tmp_path, model="lenet5", identity="0123abcd", files={"config": "", "data": data})
    writer = MetricsWriter(run.metrics)
    writer.close()
    empty = make_plots("--runs", str(tmp_path))
    assert (empty.returncode, empty.stdout) == (1, "")
    assert empty.stderr == f"error: {run.metrics} has no rows yet\n"
    writer = MetricsWriter(run.metrics)
    for row in rows(5):
        writer.write(row)
    writer.close()
    run.release()
    (run.path / "data.json").write_text('{"name": "digits"}')
    lacking = make_plots("--runs", str(tmp_path))
    assert lacking.returncode == 1
    assert lacking.stderr == (
        f"error: the data of {run.path} cannot be read: it was written by another version, or changed "
        "('synthetic'); start again with make train CONFIG_RESUME_NEVER=y\n"
    )
    run.write("data", data)
    done = make_plots("--runs", str(tmp_path), run.name[:6])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(run.plots / f"{name}.png") for name in plots.PLOTS]


@pytest.mark.slow
def test_the_command_without_a_run(tmp_path: Path) -> None:
    done = make_plots("--runs", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"error: there is no run in {tmp_path}; make one with make train\n"


@pytest.mark.slow
def test_a_recursive_model_has_a_picture_of_its_steps(tmp_path: Path, figures: list[Figure]) -> None:
    last = {"kind": "eval", "step": 9999, "exact_after_1": 0.2, "exact_after_4": 0.6, "exact_after_16": 0.5}
    paths = plots.write_plots(series_of([*rows(), last]), tmp_path, title="trm on sudoku", log=print)
    assert paths[-1].name == "supervision_steps.png" and image.imread(paths[-1]).shape[:2] == (550, 968)
    (line,) = figures[-1].axes[0].lines
    assert [list(points) for points in line.get_data()] == [[1, 4, 16], [20.0, 60.0, 50.0]]


def test_a_line_of_a_million_points_keeps_its_extremes_and_few_others() -> None:
    values, axes = np.ones(1_000_000), Figure().add_subplot()
    values[123_456], values[654_321] = 9.0, -9.0
    plots._draw_line(axes, range(1_000_000), values)
    steps, drawn = axes.lines[0].get_data()
    assert len(drawn) <= plots._MAX_DRAWN and (max(drawn), min(drawn)) == (9.0, -9.0)
    assert list(steps) == sorted(steps) and {123_456, 654_321} <= set(steps)


@pytest.mark.slow
def test_curves_take_few_bytes_a_row() -> None:
    made = ({"kind": "train", "step": n, "loss": 1.0, "accuracy": 0.5} for n in range(100_000))
    tracemalloc.start()
    loss, _ = series_of(made)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loss.steps) == 100_000 and peak < 100_000 * 2 * 32
