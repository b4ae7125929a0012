"""Report of an experiment: a table, facts, plots, and verdicts by bars that were set before."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from lib import atomic
from lib.devices.probe import environment, probe
from lib.errors import DataError, os_error, os_errors
from lib.scaling.pictures import draw_page
from lib.units import counted
from scripts.eqprop.setting import Setting

_COLOURS = ("#2a6f97", "#d1495b", "#4f772d", "#7f5539", "#5a189a")


class Lines(NamedTuple):
    """A plot of lines of y over x, one for each value of the column `each`.

    series: from the time series, not the table. only: values of columns that rows must have. base: of a
    logarithmic x; 0: linear. yscale: "zero" is linear from 0 on.
    """

    x: str
    y: str
    each: str
    series: bool = False
    only: Mapping[str, Any] = {}
    base: int = 0
    yscale: str = "linear"
    marker: str = "o"
    title: str = ""

    def shows(self, row: Mapping[str, Any]) -> bool:
        """Return whether `row` is of the plot and has x and y."""
        wanted = all(row[name] == value for name, value in self.only.items())
        return wanted and row.get(self.x) is not None and row.get(self.y) is not None


def _over_steps(y: str, yscale: str = "linear") -> Lines:
    return Lines("step", y, "way", series=True, only={"seed": 1}, yscale=yscale, marker="")


def _errors(dtype: str) -> Lines:
    only = {"dtype": dtype, "block": "energy_cross"}
    title = f"keys from the input, {dtype}"
    return Lines("beta", "relative_error", "gradient", only=only, base=10, yscale="log", title=title)


PLOTS: dict[str, tuple[Lines | None, Lines]] = {  # None: a histogram of the iterations of samples
    "1": (_errors("float64"), _errors("float32")),
    "2": (_over_steps("loss", "log"), _over_steps("cosine")),
    "ablation": (_over_steps("loss", "log"), _over_steps("rho")),
    "3": (
        Lines("width", "over_bptt", "gradient", base=2, yscale="zero"),
        Lines("width", "peak_mib", "gradient", base=2, yscale="zero"),
    ),
    "4": (None, Lines("budget", "accuracy", "way", series=True, base=10)),
    "scaling_laws": (
        Lines("width", "iterations", "block", base=2, yscale="zero"),
        Lines("iterations", "peak_bytes", "gradient", series=True, base=10, yscale="log"),
    ),
}


class Trained(NamedTuple):
    """Result of one training.

    accuracy: on the evaluation part. last: final figures. looks: figures over steps.
    """

    accuracy: float
    last: dict[str, float]
    looks: list[dict[str, float]]


class Unfinished:
    """File of the trainings of an unfinished experiment, so that it resumes with them.

    The key of a training identifies everything that it depends on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str) -> Trained | None:
        """Return the training of an earlier start for `key`.

        Raises ToolkitError if the file is unreadable.
        """
        found = self._content().get(key)
        return None if found is None else Trained(*found)

    def put(self, key: str, trained: Trained) -> None:
        """Add a training. Raises ToolkitError if the file cannot be written."""
        content = json.dumps(self._content() | {key: trained})
        atomic.save(self.path, content, action="keep a training", todo="OUT= names another folder")

    def _content(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise os_error("read trainings of an earlier start", error) from error
        except ValueError as error:
            raise DataError(f"{self.path} is damaged", why=str(error), todo="remove it") from error
        return content


class Report:
    """Report of one experiment. Rows are printed as they come; `write` keeps everything with the pictures."""

    def __init__(self, number: str, question: str, setting: Setting, columns: Sequence[str]) -> None:
        self.number, self.setting, self.columns = number, setting, tuple(columns)
        self.config = setting.config()
        self.data = setting.data(self.config)
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, float] = {}
        self.series: list[dict[str, Any]] = []  # time series, for pictures
        self.lines: list[str] = []
        self.passed: list[tuple[bool, str]] = []
        spec = self.data.dataset.spec
        self.data_name = f"{spec.name}{', synthetic' if spec.synthetic else ''}"
        self.note(f"Experiment {number}: {question}")
        self.note(f"Data: {self.data.dataset.source}")
        lines = [line for line in setting.resolved.minimal.splitlines() if line.startswith("CONFIG_")]
        self.note(f"Configuration: {' '.join(line.removeprefix('CONFIG_') for line in lines)}")
        self.hardware = probe("cpu")
        self.note(f"Machine: {self.hardware.cpu_name}, {counted(self.hardware.cpu_count, 'processor')}")
        self.unfinished = Unfinished(self.folder / "unfinished.json")
        self._headed = False

    def note(self, text: str) -> None:
        """Add a line of text."""
        self.lines.append(text)
        self.setting.log(text)

    def row(self, values: Mapping[str, Any]) -> None:
        """Add a row to the table; columns that it lacks are empty."""
        if not self._headed:
            self.note("  ".join(f"{name[: _width(name)]:>{_width(name)}}" for name in self.columns))
            self._headed = True
        self.rows.append(dict(values))
        self.note("  ".join(f"{_format(values.get(name)):>{_width(name)}}" for name in self.columns))

    def verdict(self, passed: bool, text: str) -> None:
        """Add a verdict."""
        self.passed.append((passed, text))
        self.note(f"{'holds' if passed else 'DOES NOT HOLD'}: {text}")

    @property
    def folder(self) -> Path:
        """Folder of the report's files."""
        return self.setting.out / f"exp{self.number}"

    def write(self) -> list[Path]:
        """Write the text, the numbers and the plots. Raises ToolkitError."""
        content = {
            "experiment": self.number, "quick": self.setting.quick, "data": self.data_name,
            "configuration": self.setting.resolved.minimal,
            "rows": self.rows, "facts": self.facts, "series": self.series, "verdicts": self.passed,
            "machine": {"cpu": self.hardware.cpu_name, "processors": self.hardware.cpu_count},
            "environment": environment(),
        }  # fmt: skip
        files = {"report.txt": "\n".join(self.lines).encode() + b"\n"}
        files["results.json"] = json.dumps(content, indent=1).encode() + b"\n"
        files["picture.png"] = self.picture()
        for name, data in files.items():
            atomic.save(self.folder / name, data, action="write a report")
        with os_errors("write a report"):
            self.unfinished.path.unlink(missing_ok=True)  # the next experiment trains anew
        return [self.folder / name for name in files]

    def picture(self) -> bytes:
        """Draw the plots of the experiment, as PNG."""
        plots = PLOTS[self.number]
        draws = [partial(self._draw, plot=plot) if plot else self._draw_histogram for plot in plots]
        title = f"experiment {self.number}, {self.data_name}"
        return draw_page(draws, rows=1, inches=(11.0, 4.6), fontsize=8, title=title)

    def _draw(self, axes: Axes, *, plot: Lines) -> None:
        rows = [row for row in (self.series if plot.series else self.rows) if plot.shows(row)]
        for number, name in enumerate(dict.fromkeys(row[plot.each] for row in rows)):
            own = [row for row in rows if row[plot.each] == name]
            points = [row[plot.x] for row in own], [row[plot.y] for row in own]
            colour = _COLOURS[number % 5]
            axes.plot(*points, marker=plot.marker, markersize=3, color=colour, label=str(name))
        axes.set(xlabel=plot.x.replace("_", " "), ylabel=plot.y.replace("_", " "))
        axes.set_title(plot.title, fontsize=9)
        if plot.base:
            axes.set_xscale("log", base=plot.base)
        if plot.yscale == "zero":
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale(plot.yscale)

    def _draw_histogram(self, axes: Axes) -> None:
        for number, way in enumerate(dict.fromkeys(row["way"] for row in self.series)):
            counts = [row["iterations"] for row in self.series if row["way"] == way and "iterations" in row]
            axes.hist(counts, bins=40, histtype="step", color=_COLOURS[number], label=way)
        axes.set(xlabel="iterations of a sample", ylabel="samples")


def spread(values: Sequence[float], *, factor: float = 1.0) -> str:
    """Format the mean and, with several seeds, the standard deviation; nan if a value is missing."""
    mean, count = factor * statistics.fmean(values), len(values)
    if count < 2 or math.isnan(mean):
        return f"{mean:.2f} ({'one seed' if count < 2 else f'{count} seeds'})"
    return f"{mean:.2f} +- {factor * statistics.stdev(values):.2f} ({count} seeds)"


def _width(name: str) -> int:
    return max(10, min(len(name), 16))


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if not 0.99 < abs(value) < 1 else f"{value:.7f}"
    return str(value)
