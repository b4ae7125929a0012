"""Trainings of an experiment that has not come to its end: started again, it goes on with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from lib import atomic
from lib.errors import DataError, os_error


class Trained(NamedTuple):
    """accuracy: on the evaluation part. last: what was seen at the end. looks: what was seen on the way."""

    accuracy: float
    last: dict[str, float]
    looks: list[dict[str, float]]


class Unfinished:
    """A file with what each key, which says all that a training depends on, came to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str) -> Trained | None:
        """What an earlier start has for `key`. Raises ToolkitError where the file cannot be read."""
        found = self._content().get(key)
        return None if found is None else Trained(*found)

    def put(self, key: str, trained: Trained) -> None:
        """Raises ToolkitError where the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self.path, json.dumps(self._content() | {key: trained}))
        except OSError as error:
            raise os_error("keep a training", error, todo="OUT= names another folder") from error

    def remove(self) -> None:
        """The experiment has come to its end: the next one trains anew."""
        self.path.unlink(missing_ok=True)

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
