"""What a stored run is made of again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lib.errors import DataError
from lib.plugins import Kind
from tests.support.configs import ROOT
from tests.support.training import small_config
from train import stored_run
from train.generate import Sampling


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


def test_a_prompt_that_is_no_utf_8_is_one_line(tmp_path: Path) -> None:
    sampling = Sampling(temperature=1, top_k=0, tokens=1, seed=1)
    with pytest.raises(DataError, match=r"^PROMPT= is not UTF-8: byte 1 is 0xff; convert it$"):
        prompt = os.fsdecode(b"a\xff")
        stored_run.sample("", root=ROOT, runs=tmp_path, best=False, prompt=prompt, sampling=sampling)
