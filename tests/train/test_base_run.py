"""CONFIG_INITIAL_WEIGHTS="defconfig:NAME": a shipped configuration is trained once, and its run is kept."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lib.config import config_from_values
from lib.data.datasets import key_values
from lib.errors import ConfigError, ToolkitError
from lib.kconf import Resolved, load_written
from lib.runs import weight_files
from lib.runs.weight_files import find_weights, kept_run, shipped
from tests.support.configs import ROOT
from train import base_run
from train.base_run import Base, check_base, train_base
from train.training_data import describe_training_data, open_to_train

TINY = {
    "MODEL_GPT2": "y",
    "GPT2_SIZE_CUSTOM": "y",
    "GPT2_LAYERS": "1",
    "GPT2_HEADS": "1",
    "GPT2_WIDTH": "8",
    "DATASET_CHAT": "y",
    "CHAT_SOURCE_KEY_VALUES": "y",
    "BLOCK_SIZE": "36",
    "DATA_LIMIT": "64",
    "TARGET_EFFECTIVE_BATCH": "8",
    "BUDGET_STEPS": "y",
    "MAX_STEPS": "2",
}


def resolved(**values: str) -> Resolved:
    chosen = {f"CONFIG_{name}": value for name, value in (TINY | values).items()}
    return load_written("", root=ROOT, overrides=chosen)


@pytest.mark.long
@pytest.mark.slow
def test_it_is_trained_once_and_again_where_its_run_is_damaged(tmp_path: Path) -> None:
    base = Base("defconfig:tiny", resolved(), tmp_path / "run-tiny")
    told = list[str]()
    for _ in range(2):
        train_base(base, ROOT, log=told.append)
    assert len(told) == 2 and "trained first" in told[0] and "s of CPU time" in told[1]
    found = find_weights(str(base.folder), root=ROOT)
    assert found.checkpoint is not None and found.checkpoint[1] == 2
    file = next(base.folder.rglob("step-*/*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    train_base(base, ROOT, log=told.append)
    assert "has another size than was written; making it again" in told[2] and len(told) == 5


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_kept_of_one_that_cannot_be_trained(tmp_path: Path) -> None:
    base = Base("defconfig:tiny", resolved(BLOCK_SIZE="20"), tmp_path / "run-tiny")
    with pytest.raises(ToolkitError, match=r"defconfig:tiny cannot be trained: .*takes"):
        train_base(base, ROOT, log=lambda _: None)
    assert not base.folder.exists()


def test_names_that_are_no_configuration_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped("weights.safetensors", root=ROOT) is None
    with pytest.raises(ConfigError, match="there is no such configuration; did you mean chat-tiny-base"):
        kept_run("defconfig:chat-tiny-bse", root=ROOT)
    with pytest.raises(ConfigError, match="starts from defconfig:chat-tiny-base itself; name a run of it"):
        kept_run("defconfig:chat-tiny", root=ROOT)
    monkeypatch.setattr(weight_files, "kept_run", lambda *_, **__: ROOT / "nowhere")
    with pytest.raises(ConfigError, match="is not trained yet; make train trains it first"):
        find_weights("defconfig:chat-tiny-base", root=ROOT)


def test_another_configuration_has_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept_run("defconfig:chat-tiny-base", root=ROOT)

    def longer(*_: object) -> Resolved:
        return resolved()

    monkeypatch.setattr(weight_files, "_loaded", longer)
    assert kept_run("defconfig:chat-tiny-base", root=ROOT) != first


def test_weights_that_will_not_fit_are_refused_before_they_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_values, "TRAIN_SIZE", 512)  # each check makes them
    base = Base("defconfig:tiny", resolved(), tmp_path / "run-tiny")
    describe = partial(describe_training_data, root=ROOT)

    def check(**changes: Any) -> None:
        config = config_from_values(resolved(**changes).values)
        check_base(base, config, describe(config, log=print).dataset.spec, describe=describe)

    check()
    check(ADAPT_LORA="y")
    fault = "CONFIG_INITIAL_WEIGHTS=defconfig:tiny does not fit the model"
    for changes, told in (
        (
            {"GPT2_WIDTH": "16"},
            r"weight is .256, 8., .*GPT2_WIDTH is 8 there and 16 here",
        ),
        ({"GPT2_LAYERS": "2"}, r"missing.*GPT2_LAYERS is 1 there and 2 here"),
    ):
        with pytest.raises(ConfigError, match=f"^{fault}: .*{told}"):
            check(**changes)
    assert not base.folder.exists()

    def trained(*_: Any, **__: Any) -> None:
        raise AssertionError("it was trained")

    monkeypatch.setattr(base_run, "base_of", lambda *_: base)
    monkeypatch.setattr(base_run, "train_base", trained)
    wide = config_from_values(resolved(GPT2_WIDTH="16").values)
    wide = wide.replace(initial_weights=base.name)
    with pytest.raises(ConfigError, match=fault):
        open_to_train(wide, root=ROOT, log=print)
    base.folder.mkdir()
    check(GPT2_WIDTH="16")  # now its own weights are compared
