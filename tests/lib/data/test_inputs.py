"""Inputs to predict that hold no sample, whatever the run was trained on."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lib.data.inputs import read_inputs, split_inputs
from lib.data.tokenizers import ByteTokenizer
from lib.data.types import ArrayPart, Column, Dataset, ImageSpec, Spec, TableClassSpec, TextClassSpec
from lib.errors import ConfigError

SPECS: tuple[Spec, ...] = (
    ImageSpec(name="i", channels=1, height=8, width=8, classes=2, mean=(0.5,), std=(0.5,), synthetic=True),
    TableClassSpec(name="t", columns=(Column(name="x"),), classes=2),
    TextClassSpec(name="s", classes=2, vocab_size=257, block_size=8, pad=256),
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize(
    ("given", "named"),
    [(torch.zeros(2, 3), "Tensor"), ({1, 2}, "set"), (["a.csv", 3], "int"), (None, "NoneTy")],
)
def test_other_types_than_names_and_arrays_are_refused(spec: Spec, given: Any, named: str) -> None:
    none = ArrayPart(np.zeros((1, 8), np.int64), np.zeros(1, np.int64))
    with pytest.raises(
        ConfigError, match=f"inputs of type {named}.* cannot be predicted; give a list of names"
    ):
        read_inputs(given, Dataset(spec, none, none, "", ByteTokenizer()), rows=8, log=print)


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


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_text_in_the_place_of_a_file_names_standard_input(spec: Spec) -> None:
    none = ArrayPart(np.zeros((1, 8), np.int64), np.zeros(1, np.int64))
    with pytest.raises(
        ConfigError, match=r"^INPUT=a is not there; name a file or a folder; INPUT=-"
    ) as error:
        read_inputs(
            split_inputs("a fine film"), Dataset(spec, none, none, "", ByteTokenizer()), rows=8, log=print
        )
    assert str(error.value).endswith('echo "a text" | make predict INPUT=-') == hasattr(spec, "pad")
