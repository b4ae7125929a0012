"""What a stored run is made of again."""

from __future__ import annotations

from typing import Any

import pytest

from lib.errors import DataError
from lib.plugins import Kind
from tests.support.configs import ROOT
from tests.support.training import small_config
from train import stored_run


def test_a_mistake_in_the_file_of_its_data_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        file = ROOT / "lib" / "data" / "datasets" / "friedman" / "data.py"
        raise SyntaxError("boom", (str(file), 3, 1, ""))

    monkeypatch.setattr(stored_run, "objects_of", lambda *_: [{"preprocess": {"kind": "any"}}])
    config, run = small_config(), Any
    monkeypatch.setattr(Kind, "load", load)
    monkeypatch.setattr(stored_run, "preparation_of", lambda _: None)
    with pytest.raises(
        DataError, match=r"^data set \w+: lib/data/datasets/friedman/data.py:3: SyntaxError: boom"
    ):
        stored_run._without_data(run, config)  # type: ignore[arg-type]
