"""What preflight makes of an error: a failed check, or an error of the toolkit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.errors import ConfigError, DataError
from train.preflight import command as preflight

ROOT = Path(__file__).resolve().parents[3]


def test_what_is_raised_below_models_is_the_models(tmp_path: Path) -> None:
    error = raised_below(tmp_path / "models")
    assert preflight.failure(error, root=tmp_path) == "models/mine/model.py:2: KeyError: 'width'"
    assert preflight.failure(error, root=tmp_path / "other") == ""


def raised_below(folder: Path) -> KeyError:
    names: dict[str, Any] = {}
    code = "def forward(x):\n    return {}[x]\n"
    exec(compile(code, str(folder / "mine" / "model.py"), "exec"), names)
    with pytest.raises(KeyError) as error:
        names["forward"]("width")
    return error.value


def test_a_model_that_cannot_be_measured_is_the_only_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(error: Exception, cause: Exception | None = None) -> list[preflight.Check]:
        error.__cause__ = cause

        def candidate_of(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(preflight, "candidate_of", candidate_of)
        return list(preflight._checks(None, root=ROOT, runs=ROOT, log=print))  # type: ignore[arg-type]

    (check,) = checked(RuntimeError("mat1 and mat2"))
    assert (check.name, check.passed, check.finding) == ("model", False, "RuntimeError: mat1 and mat2")
    (check,) = checked(ConfigError("model.py:2: KeyError"), raised_below(ROOT / "models"))
    assert (check.name, check.passed, check.finding) == ("model", False, "model.py:2: KeyError")
    for error, cause in (
        (ConfigError("told as ever"), None),
        (ConfigError("told as ever"), KeyError("of the toolkit")),
        (DataError("told as ever"), raised_below(ROOT / "models")),
    ):
        with pytest.raises(ConfigError, match="told as ever"):
            checked(error, cause)
