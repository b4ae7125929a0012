"""Report of an experiment: a table, facts, and verdicts by bars that were set before; printed and kept."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib import atomic
from lib.devices.probe import environment, probe
from lib.errors import DataError, os_error
from scripts.eqprop.setting import Setting
from train.training_data import TrainingData


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
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.path, json.dumps(self._content() | {key: trained}))
        except OSError as error:
            raise os_error("keep a training", error, todo="OUT= names another folder") from error

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

    def __init__(
        self, number: str, question: str, setting: Setting, subject: TrainingData, columns: Sequence[str]
    ) -> None:
        self.number, self.setting, self.columns = number, setting, tuple(columns)
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, float] = {}
        self.series: list[dict[str, Any]] = []  # time series, for pictures
        self.lines: list[str] = []
        self.passed: list[tuple[bool, str]] = []
        spec = subject.dataset.spec
        self.data = f"{spec.name}{', synthetic' if spec.synthetic else ''}"
        self._log(f"Experiment {number}: {question}")
        self._log(f"Data: {subject.dataset.source}")
        lines = [line for line in setting.resolved.minimal.splitlines() if line.startswith("CONFIG_")]
        self._log(f"Configuration: {' '.join(line.removeprefix('CONFIG_') for line in lines)}")
        self.hardware = probe("cpu")
        self._log(f"Machine: {self.hardware.cpu_name}, {self.hardware.cpu_count} processor(s)")
        self.unfinished = Unfinished(self.folder / "unfinished.json")
        self._headed = False

    def note(self, text: str) -> None:
        """Add a line of text."""
        self._log(text)

    def row(self, values: Mapping[str, Any]) -> None:
        """Add a row to the table; columns that it lacks are empty."""
        if not self._headed:
            self._log("  ".join(f"{name[: _width(name)]:>{_width(name)}}" for name in self.columns))
            self._headed = True
        self.rows.append(dict(values))
        self._log("  ".join(f"{_format(values.get(name)):>{_width(name)}}" for name in self.columns))

    def verdict(self, passed: bool, text: str) -> None:
        """Add a verdict."""
        self.passed.append((passed, text))
        self._log(f"{'holds' if passed else 'DOES NOT HOLD'}: {text}")

    @property
    def folder(self) -> Path:
        """Folder of the report's files."""
        return self.setting.out / f"exp{self.number}"

    def write(self, pictures: Mapping[str, Callable[[], bytes]]) -> list[Path]:
        """Write the text, the numbers and the pictures (named without .png). Raises ToolkitError."""
        content = {
            "experiment": self.number, "quick": self.setting.quick, "data": self.data,
            "configuration": self.setting.resolved.minimal,
            "rows": self.rows, "facts": self.facts, "series": self.series, "verdicts": self.passed,
            "machine": {"cpu": self.hardware.cpu_name, "processors": self.hardware.cpu_count},
            "environment": environment(),
        }  # fmt: skip
        files = {"report.txt": "\n".join(self.lines).encode() + b"\n"}
        files["results.json"] = json.dumps(content, indent=1).encode() + b"\n"
        files |= {f"{name}.png": draw() for name, draw in pictures.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                atomic.write_bytes(self.folder / name, data)
            self.unfinished.path.unlink(missing_ok=True)  # the next experiment trains anew
        except OSError as error:
            raise os_error("write a report", error) from error
        return [self.folder / name for name in files]

    def _log(self, text: str) -> None:
        self.lines.append(text)
        self.setting.log(text)


def spread(values: Sequence[float], *, factor: float = 1.0, digits: int = 2) -> str:
    """Format the mean and, with several seeds, the standard deviation; nan if a value is missing."""
    mean, count = factor * statistics.fmean(values), len(values)
    if count < 2 or math.isnan(mean):
        return f"{mean:.{digits}f} ({'one seed' if count < 2 else f'{count} seeds'})"
    return f"{mean:.{digits}f} +- {factor * statistics.stdev(values):.{digits}f} ({count} seeds)"


def _width(name: str) -> int:
    return max(10, min(len(name), 16))


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if not 0.99 < abs(value) < 1 else f"{value:.7f}"
    return str(value)
