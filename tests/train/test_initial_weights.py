"""Initial weights that cannot be used are refused before there is a run directory."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lib import kconf
from lib.config import Config, config_from_values
from lib.data.tokenizers import ByteTokenizer, CharTokenizer
from lib.devices.base import Backend
from lib.errors import ConfigError, ToolkitError
from lib.runs.weight_files import WeightFiles, find_weights
from models.gpt2 import huggingface
from tests.support.stored_weights import (
    a_run,
    as_file,
    header,
    other_classes,
    safetensors,
    saved,
    shards,
    state,
)
from tests.support.tokens import small_lm_config, text_data, text_spec
from tests.support.training import largest_difference, random_data, small_config
from train import commands, initial_weights
from train.initial_weights import check_weights, load_weights
from train.planning.run_plan import RunRequest
from train.training_data import built

ROOT = Path(__file__).resolve().parents[2]


# What is refused


def contents(data: bytes) -> Callable[[Path], Path]:
    return as_file(lambda path: path.write_bytes(data))


def a_folder(*files: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "w").mkdir()
        for name in files:
            (folder / "w" / name).write_bytes(safetensors({}))
        return folder / "w"

    return make


class Code:
    """Pickled, it is a call."""

    def __reduce__(self) -> Any:
        return print, ("run",)


def incomplete(folder: Path) -> Path:
    (shards(folder) / "b.safetensors").unlink()
    return folder / "hf"


def cut(data: bytes, count: int) -> bytes:
    return data[:-count]


def run_without_checkpoint(folder: Path) -> Path:
    run = a_run(folder, steps=0)
    run.checkpoints.mkdir()
    return run.path


def two_runs(folder: Path) -> Path:
    for number in (1, 2):
        a_run(folder, steps=1, name=f"0000000{number}")
    return folder / "lenet5"


def damaged_run(folder: Path) -> Path:
    run = a_run(folder, steps=1)
    (run.checkpoints / "step-00000001/state.pt").write_bytes(b"PK")
    return run.path


def torch_bytes() -> bytes:
    file = io.BytesIO()
    torch.save(state(), file)
    return file.getvalue()


NO = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda folder: folder / "w", "cannot be read: No such file"),
    "empty": (contents(b""), "is empty, or of no known format; give a file of"),
    "text": (contents(b"weights, perhaps\n"), "of no known format; give a file of safetensors or of torch"),
    "LFS pointer": (contents(b"version https://git-lfs.github.com/spec/v1\n"), "LFS pointer.*git lfs pull"),
    "GGUF": (contents(b"GGUF\x03" + bytes(40)), "is a GGUF file.*give a file of safetensors"),
    "HDF5": (contents(b"\x89HDF\r\n\x1a\n" + bytes(40)), "is an HDF5 file"),
    "half a header": (
        contents(header({"a": NO})[:-3]),
        r"damaged safetensors file: its header would have 61 bytes, and",
    ),
    "large header": (contents(header({"a": NO}, length=2**40)), "header would have 1,099,511,627,776 bytes"),
    "no JSON": (contents((9).to_bytes(8, "little") + b"{'a': 1} "), "is damaged: .*; copy it again"),
    "truncated torch file": (
        contents(torch_bytes()[:100]),
        "is damaged: PytorchStreamReader failed reading zip archive: failed finding central directory; copy",
    ),
    "truncated": (contents(cut(safetensors(state()), 100)), "is damaged: linear3.* is not within its"),
    "wrong size": (
        contents(header({"a": {**NO, "shape": [3]}}, data=bytes(8))),
        "is damaged: a is not within",
    ),
    "no shape": (contents(header({"a": {"dtype": "F32"}}, data=bytes(8))), "is damaged: a is without type"),
    "a list": (contents(header({"a": [1]}, data=bytes(8))), "is damaged: a is without type, shape or place"),
    "no place": (contents(header({"a": {**NO, "data_offsets": [0]}})), "damaged: a is without type, shape"),
    "no length": (contents(header({"a": {**NO, "shape": [-1, 0]}})), r"damaged: a has the shape \[-1, 0\]"),
    "unknown type": (
        contents(header({"a": {**NO, "dtype": "F4"}})),
        "a has the unknown type F4; .* write it in float32",
    ),
    "code": (as_file(lambda path: torch.save({"a": Code()}, path)), "more than tensors.*state_dict"),
    "old code": (contents(pickle.dumps(Code(), protocol=2)), "more than tensors.*not run; save the weights"),
    "name of another format": (
        as_file(lambda path: torch.save(state(), path), "net.safetensors"),
        r"net.safetensors is no safetensors file but a zip archive, as torch.save writes it; name it net.pt$",
    ),
    "other archive": (contents(b"PK\x03\x04" + bytes(60)), "is damaged: .*; copy it again"),
    "no weights": (
        as_file(lambda path: torch.save({"epoch": 3}, path)),
        "holds no weights: no tensor has a name",
    ),
    "one tensor": (as_file(lambda path: torch.save(torch.ones(3), path)), "holds no weights"),
    "folder": (a_folder(), "is a folder: it has no weights; give"),
    "folder of text": (a_folder("readme"), "is a folder: it has no weights"),
    "two files": (a_folder("a.pt", "b.pt"), r"2 files of weights and no index.*name one of them, such as"),
    "missing shard": (incomplete, r"hf is not complete: b.safetensors is missing, of 2 shards; copy"),
    "run without checkpoint": (run_without_checkpoint, "no checkpoint of the run: it has none; name another"),
    "several runs": (two_runs, "is a folder of runs: 2 of its 2 runs are done; name one, such as"),
    "unfinished runs": (
        lambda folder: a_run(folder, done=False).path.parent,
        "0 of its 1 runs are done; train one",
    ),
    "no such step": (
        lambda folder: a_run(folder).checkpoints / "step-00000009",
        "no checkpoint of the run: its steps are 1, 2; name",
    ),
    "damaged run": (damaged_run, "no valid checkpoint in .*; name another checkpoint of it"),
    "not finite": (
        saved(lambda own: {**own, "conv1.bias": torch.full((6,), torch.nan)}),
        "conv1.bias has values",
    ),
    "other shapes": (lambda folder: other_classes(folder / "w"), r"linear3.weight is \(1000, 84\), and the "
     r"model has \(10, 84\), and 1 more; 8 weights match; CONFIG_RESET_HEAD=y starts with a new head"),
    "other model": (saved(lambda own: {f"net.{name}": each for name, each in own.items()}), "conv1.weight is "
     "missing, and 19 more; 0 weights match; use weights of this model"),
}  # fmt: skip

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "allow nothing": (
        {"initial_weights_allow": "conv9"},
        "WEIGHTS_ALLOW: no weight matches conv9: close to it: .*conv1",
    ),
    "freeze nothing": (
        {"freeze": "convl"},
        "CONFIG_FREEZE: no weight matches convl: close to it: .*conv1.*; correct",
    ),
    "freeze a typing error": ({"freeze": "conv1 ,conv2"}, "CONFIG_FREEZE: no weight matches ,conv2: .*conv2"),
    "freeze everything": ({"freeze": "conv? linear?"}, "CONFIG_FREEZE leaves nothing to train"),
}


def an_order(config: Config, root: Path) -> RunRequest:
    resolved = kconf.Resolved(values={}, in_effect={}, origins={}, given={}, text="", minimal="")
    return RunRequest(resolved=resolved, config=config, root=root, runs=root / "runs", started=0.0)


def refuse_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "create_run", lambda _: pytest.fail("there is a run directory"))
    # Found only after there is one, it would be found here.
    monkeypatch.setattr(commands, "_train", lambda *_: pytest.fail("it is trained"))


def refusal(config: Config, root: Path, monkeypatch: pytest.MonkeyPatch) -> ToolkitError:
    refuse_directories(monkeypatch)
    with pytest.raises(ToolkitError) as caught:
        commands._plan_and_train(an_order(config, root))
    assert not (root / "data").exists(), "nor are data made"
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line_and_nothing_is_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make, message = REFUSED[kind]
    (tmp_path / "given").mkdir()
    path = make(tmp_path / "given")
    error = refusal(small_config(dataset="digits", initial_weights=str(path)), tmp_path, monkeypatch)
    assert error.exit_code == 2 and "\n" not in str(error), error
    assert str(error).startswith(f"CONFIG_INITIAL_WEIGHTS={path}")
    assert re.search(message, str(error)), error
    assert "run" not in capfd.readouterr().out.split(), "pickled code is not run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MODEL": "vit"}, "the model: the run trained vit, not resnet18; use weights of this model"),
        (
            {"RESNET18_WIDTH": 16, "RESNET18_STEM": "imagenet"},
            'configure the model of the run: RESNET18_STEM is "imagenet" there and "cifar" here, '
            "RESNET18_WIDTH is 16 there and 8 here; use weights",
        ),
    ],
)
def test_a_run_of_another_model_tells_how_it_differs(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = a_run(tmp_path)
    config = small_config("resnet18", initial_weights=str(run.path))
    spec = random_data(config, shape=(3, 32, 32), train_size=16).dataset.spec
    options = {f"RESNET18_{field}".upper(): value for field, value in config.model_options.items()}
    run.write("values", {"MODEL": "resnet18", **options, **changes})
    with pytest.raises(ConfigError) as caught:
        check_weights(config, spec, tmp_path, log=print)
    assert re.search(message, str(caught.value)), caught.value
    assert bool(caught.value.findings) == ("MODEL" not in changes)


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_without_effect_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, message = OPTIONS[kind]
    torch.save(state(), tmp_path / "w")
    config = small_config(dataset="digits", initial_weights="w", **options)
    error = refusal(config, tmp_path, monkeypatch)
    assert error.exit_code == 2 and re.search(message, str(error)), error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"LAYER_DECAY": "1.5"}, "LAYER_DECAY.*0 < x <= 1"),
        ({"LAYER_DECAY": "0"}, "LAYER_DECAY.*0 < x <= 1"),
        ({"RESET_HEAD": "y"}, "RESET_HEAD has no effect without .* set CONFIG_INITIAL_WEIGHTS"),
        ({"INITIAL_WEIGHTS_ALLOW": "head"}, "ALLOW has no effect without initial weights"),
        ({"WEIGHTS_DIR": "there"}, "WEIGHTS_DIR has no effect without initial weights"),
    ],
)
def test_options_out_of_range_or_of_no_use_are_refused(options: dict[str, str], message: str) -> None:
    given = {f"CONFIG_{name}": value for name, value in options.items()}
    with pytest.raises(ConfigError) as caught:
        config_from_values(kconf.load_written("", root=ROOT, overrides=given).values)
    assert re.search(message, f"{caught.value} {caught.value.findings}")


# The layout of Hugging Face transformers


def test_weights_for_other_tokens_of_the_same_number_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = WeightFiles(path=tmp_path, checkpoint=(tmp_path / "ckpt", 1))
    monkeypatch.setattr(initial_weights, "initial_weights", lambda *_: found)
    config = small_lm_config()
    own = dataclasses.replace(text_data(config).dataset, tokenizer=CharTokenizer("abc"))
    said = list[str]()
    check = partial(initial_weights.check_tokens, config, own, tmp_path, log=said.append)
    check()  # a run of an older version
    assert said == [f"note: {tmp_path} does not say which tokens its weights are for; they are not compared"]
    (tmp_path / "preprocess.json").write_text('{"tokenizer": {"na')
    with pytest.raises(ToolkitError, match=r"preprocess\.json is damaged"):
        check()
    (tmp_path / "preprocess.json").write_text(json.dumps({"tokenizer": CharTokenizer("abc").to_json()}))
    check()
    for tokenizer in (CharTokenizer("abd"), ByteTokenizer()):
        (tmp_path / "preprocess.json").write_text(json.dumps({"tokenizer": tokenizer.to_json()}))
        with pytest.raises(
            ConfigError, match=f"its run has a tokenizer {tokenizer.name}, the data char with"
        ):
            check()


def test_weights_of_another_gpt2_are_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(safetensors({"h.0.ln_1.weight": torch.ones(3)}))
    config = small_lm_config(initial_weights="w")
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/w cannot be used: these are not the weights"
    ) as caught:
        check_weights(config, text_spec(), tmp_path, log=print)
    findings = caught.value.findings
    assert "h.0.ln_2.bias is missing" in findings and re.fullmatch(
        r"\.\.\. and \d+ more faults", findings[-1]
    )
    check_weights(config.replace(initial_weights=""), text_spec(), tmp_path, log=print)


@pytest.mark.parametrize("layout", ["theirs", "ours"])
def test_gpt2_is_read_in_its_own_layout_and_in_that_of_transformers(layout: str, tmp_path: Path) -> None:
    config = small_lm_config(initial_weights="w")
    model, other = (built(config.replace(seed=seed), text_spec()) for seed in (1, 2))
    tensors = huggingface.to_huggingface(other) if layout == "theirs" else other.state_dict()  # type: ignore[arg-type]
    (tmp_path / "w").write_bytes(safetensors(tensors))
    load_weights(model, find_weights("w", root=tmp_path), config, log=print)
    assert largest_difference(model.state_dict(), other.state_dict()) == 0
    changed = config.replace(reset_head=True)
    message = (
        "RESET_HEAD and .* have no effect"
        if layout == "theirs"
        else "the model has no head of its own; set it"
    )
    with pytest.raises(ConfigError, match=message):
        check_weights(changed, text_spec(), tmp_path, log=print)


BESIDE = {
    "of transformers": (
        {"model_type": "bert"},
        r"set CONFIG_MODEL_HUGGINGFACE=y CONFIG_HUGGINGFACE_DIR=.*/w ",
    ),
    "of timm": ({"architecture": "resnet26"}, "set CONFIG_MODEL_TIMM=y CONFIG_TIMM_NAME=resnet26, which has"),
    "of others": ({"kind": "bert"}, "; use weights of this model, or name what may differ"),
    "no object": ([], "; use weights of this model, or name what may differ"),
}


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("model", ["lenet5", "gpt2"])
def test_weights_of_another_package_name_the_model_that_has_them(
    kind: str, model: str, tmp_path: Path
) -> None:
    content, message = BESIDE[kind]
    (folder := tmp_path / "w").mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(safetensors({"bert.embeddings.weight": torch.ones(3)}))
    text = model == "gpt2"
    config = small_lm_config(initial_weights="w") if text else small_config(initial_weights="w")
    spec = text_spec() if text else random_data(config, shape=(1, 28, 28), train_size=8).dataset.spec
    with pytest.raises(ConfigError) as caught:
        check_weights(config, spec, tmp_path, log=print)
    expected = "cannot be used: these are not the weights" if text and "or name" in message else message
    assert re.search(expected, str(caught.value)) and "\n" not in str(caught.value), caught.value


def test_weights_computed_from_samples_may_be_of_a_model_with_other_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError(state)

    config = small_config("lenet5")
    data, model = random_data(config, shape=(1, 28, 28), train_size=16).dataset, Counting(2, 1)
    computed = Mock(initialise_from_samples=lambda *_: {"bias": torch.full((1,), 7.0)})
    monkeypatch.setattr(initial_weights, "load_model", lambda _: computed)
    initial_weights.initialise_from_samples(model, config, data, Backend("cpu"), log=print)
    assert model.bias.item() == 7.0
