"""What is refused before a run directory is made: files of initial weights, and what there is no room for."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lib import kconf
from lib.config import Config
from lib.errors import ConfigError
from models.gpt2 import huggingface
from tests.support.tokens import small_lm_config, text_data, text_spec
from train import commands
from train.initial_weights import check_file, check_weights
from train.planning.run_plan import RunRequest
from train.training_data import open_to_train

ROOT = Path(__file__).resolve().parents[2]


def header(names: dict[str, Any], *, data: bytes = b"") -> bytes:
    """A file of safetensors with that header."""
    text = json.dumps(names).encode()
    return len(text).to_bytes(8, "little") + text + data


def a_directory(*files: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name in files:
            (path / name).write_bytes(b"")

    return make


def contents(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "cannot be read: No such file"),
        (a_directory(), "is a directory; give one safetensors file .* as make export writes it"),
        (a_directory("model.safetensors"), "is a directory; name the file in it: .*/w/model.safetensors"),
        (
            a_directory("a.safetensors", "b.safetensors"),
            r"is a directory: its 2 shards \(a.safetensors, .*merged",
        ),
        (
            lambda path: torch.save({"a": torch.zeros(2)}, path),
            r"as torch.save writes it \(.pt.*; convert it",
        ),
        (
            contents(pickle.dumps({"a": 1}, protocol=2)),
            "a pickle as old versions of torch.save.*; convert it",
        ),
        (contents(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer.*git lfs pull"),
        (contents(b""), "is empty; give one safetensors file"),
        (contents(b"weights, perhaps"), "is not a safetensors file, or damaged; give one safetensors file"),
        (contents(header({"a": 1})[:-1]), "is not a safetensors file, or damaged"),
    ],
)
def test_a_file_of_another_kind_is_told_as_such(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "w")
    with pytest.raises(ConfigError, match=f"^CONFIG_INITIAL_WEIGHTS={tmp_path}/w .*{message}"):
        check_file(small_lm_config(initial_weights="w"), tmp_path)


def test_safetensors_and_none_at_all_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "require_package", lambda: None)
    # A header of 128 bytes begins with the byte that a pickle begins with.
    padded = header({"a": "." * 119})
    assert padded[:2] == b"\x80\x00"
    for data in (header({}), padded):
        (tmp_path / "w").write_bytes(data)
        check_file(small_lm_config(initial_weights="w"), tmp_path)
    check_file(small_lm_config(initial_weights=""), tmp_path)


def test_a_package_that_is_not_installed_is_missed_before_data_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "w").write_bytes(header({}))
    config = small_lm_config(initial_weights="w", dataset="pysource", data_dir=None)
    with pytest.raises(ConfigError, match="the package safetensors is not installed"):
        open_to_train(config, root=tmp_path, log=print)
    assert not (tmp_path / "data").exists()


def an_order(config: Config, root: Path) -> RunRequest:
    resolved = kconf.Resolved(values={}, in_effect={}, origins={}, given={}, text="", minimal="")
    return RunRequest(resolved=resolved, config=config, root=root, runs=root / "runs", started=0.0)


def refuse_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "create_run", lambda _: pytest.fail("there is a run directory"))
    # Found only after there is one, it would be found here.
    monkeypatch.setattr(commands, "_train", lambda *_: pytest.fail("it is trained"))


def test_weights_of_another_kind_are_refused_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_directories(monkeypatch)
    torch.save({}, tmp_path / "w.pt")
    config = small_lm_config(initial_weights="w.pt", dataset="pysource", data_dir=None)
    with pytest.raises(ConfigError, match=r"w\.pt is an archive as torch\.save writes it"):
        commands._plan_and_train(an_order(config, tmp_path), lambda: None)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "data").exists(), "nor are data made"


def test_weights_of_another_model_are_refused_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w").write_bytes(header({}))
    monkeypatch.setattr(
        huggingface,
        "load",
        lambda model, _: huggingface.from_huggingface(model, {"h.0.ln_1.weight": torch.ones(3)}),
    )
    config = small_lm_config(initial_weights="w")
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/w cannot be used: these are not the weights"
    ) as caught:
        check_weights(config, text_spec(), tmp_path)
    assert "wte.weight is missing" in caught.value.findings
    check_weights(config.replace(initial_weights=""), text_spec(), tmp_path)


def test_weights_are_matched_when_the_data_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").write_bytes(header({}))
    monkeypatch.setattr(huggingface, "require_package", lambda: None)
    config = small_lm_config(initial_weights="w", dataset="pysource", data_dir=None, target_effective_batch=4)
    monkeypatch.setattr("train.training_data.open_training_data", lambda *_, **__: text_data(config))
    monkeypatch.setattr(huggingface, "load", lambda model, _: huggingface.from_huggingface(model, {}))
    with pytest.raises(ConfigError, match="cannot be used: these are not the weights of this GPT-2"):
        open_to_train(config, root=tmp_path, log=print)
