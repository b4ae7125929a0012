"""What an experiment found: a table, facts, and verdicts by bars that were set before; printed and kept."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib import atomic
from lib.devices.probe import environment, probe
from lib.errors import os_error
from scripts.eqprop.subject import Setting
from scripts.eqprop.unfinished import Unfinished
from train.training_data import Subject


class Report:
    """Rows are told as they come; `write` keeps everything beside the pictures."""

    def __init__(
        self, number: str, question: str, setting: Setting, subject: Subject, columns: Sequence[str]
    ) -> None:
        self.number, self.setting, self.columns = number, setting, tuple(columns)
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, float] = {}
        self.series: list[dict[str, Any]] = []  # of what changes in time, for pictures
        self.lines: list[str] = []
        self.passed: list[tuple[bool, str]] = []
        spec = subject.dataset.spec
        self.data = f"{spec.name}{', synthetic' if spec.synthetic else ''}"
        self._say(f"Experiment {number}: {question}")
        self._say(f"Data: {subject.dataset.source}")
        self._say(f"Configuration: {' '.join(_set_lines(setting.resolved.minimal))}")
        self.hardware = probe("cpu")
        self._say(f"Machine: {self.hardware.cpu_name}, {self.hardware.cpu_count} processor(s)")
        self.unfinished = Unfinished(self.folder / "unfinished.json")
        self._headed = False

    def note(self, text: str) -> None:
        self._say(text)

    def row(self, values: Mapping[str, Any]) -> None:
        """One line of the table; columns that it lacks are empty."""
        if not self._headed:
            self._say("  ".join(f"{name[: _width(name)]:>{_width(name)}}" for name in self.columns))
            self._headed = True
        self.rows.append(dict(values))
        self._say("  ".join(f"{_shown(values.get(name)):>{_width(name)}}" for name in self.columns))

    def verdict(self, passed: bool, text: str) -> None:
        self.passed.append((passed, text))
        self._say(f"{'holds' if passed else 'DOES NOT HOLD'}: {text}")

    @property
    def folder(self) -> Path:
        return self.setting.out / f"exp{self.number}"

    def write(self, pictures: Mapping[str, Callable[[], bytes]]) -> list[Path]:
        """Keep the text, the numbers and the pictures (named without .png). Raises ToolkitError."""
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
            self.unfinished.remove()
        except OSError as error:
            raise os_error("write a report", error) from error
        return [self.folder / name for name in files]

    def _say(self, text: str) -> None:
        self.lines.append(text)
        self.setting.say(text)


def _set_lines(minimal: str) -> list[str]:
    """What a minimal configuration sets, without the prefix."""
    return [line.removeprefix("CONFIG_") for line in minimal.splitlines() if line.startswith("CONFIG_")]


def spread(values: Sequence[float], *, factor: float = 1.0, digits: int = 2) -> str:
    """Mean, and the standard deviation over seeds where there are several; nan where one is missing."""
    mean, count = factor * statistics.fmean(values), len(values)
    if count < 2 or math.isnan(mean):
        return f"{mean:.{digits}f} ({'one seed' if count < 2 else f'{count} seeds'})"
    return f"{mean:.{digits}f} +- {factor * statistics.stdev(values):.{digits}f} ({count} seeds)"


def _width(name: str) -> int:
    return max(10, min(len(name), 16))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if not 0.99 < abs(value) < 1 else f"{value:.7f}"
    return str(value)
