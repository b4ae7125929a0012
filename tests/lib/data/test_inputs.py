"""Inputs to predict that hold no sample, whatever the run was trained on."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from lib.data.inputs import read_inputs
from lib.data.tokenizers import ByteTokenizer
from lib.data.types import ArrayPart, Column, Dataset, ImageSpec, Spec, TableClassSpec, TextClassSpec
from lib.errors import ConfigError

SPECS: tuple[Spec, ...] = (
    ImageSpec(name="i", channels=1, height=8, width=8, classes=2, mean=(0.5,), std=(0.5,), synthetic=True),
    TableClassSpec(name="t", columns=(Column(name="x"),), classes=2),
    TextClassSpec(name="s", classes=2, vocab_size=257, block_size=8, pad=256),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("given", ["-", "new.txt"])
def test_empty_inputs_are_refused(
    spec: Spec, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Given:
        buffer = io.BytesIO()

    monkeypatch.setattr("sys.stdin", Given)
    (tmp_path / "new.txt").touch()
    none = ArrayPart(np.zeros((1, 8), np.int64), np.zeros(1, np.int64))
    path = given if given == "-" else tmp_path / given
    with pytest.raises(ConfigError, match=r"is empty|has no rows|is no file for this run"):
        read_inputs(path, Dataset(spec, none, none, "", ByteTokenizer()), rows=8, log=print)
