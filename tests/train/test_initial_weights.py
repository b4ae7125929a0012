"""Initial weights: what is read, what is matched, and what is refused before there is a run directory."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib import kconf
from lib.config import Config, config_from_values
from lib.errors import ConfigError, ToolkitError
from lib.nn.weights import head_of, load, match
from lib.runs import checkpoint
from lib.runs.directory import RunDir
from lib.runs.weight_files import find_weights
from models.gpt2 import huggingface
from tests.support.stored_weights import header, safetensors, write_shards
from tests.support.tokens import small_lm_config, text_spec
from tests.support.training import largest_difference, random_data, small_config, small_job, small_plan
from train import commands, loop
from train.initial_weights import check_weights, load_weights
from train.job import Progress
from train.planning.run_plan import RunRequest
from train.training_data import built

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (1, 28, 28)


def lenet(*, seed: int = 7, classes: int = 10) -> nn.Module:
    """Of digits, or with another number of classes."""
    config = small_config(seed=seed)
    model = built(config, random_data(config, shape=SHAPE, train_size=16).dataset.spec)
    if classes != 10:
        model.linear3 = nn.Linear(84, classes)
    return model


def state(**changes: Tensor | None) -> dict[str, Tensor]:
    found = {**lenet().state_dict(), **changes}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def loaded(path: Path, **options: Any) -> tuple[nn.Module, str]:
    """LeNet-5 of another seed, started from `path`, and what is said about it."""
    said: list[str] = []
    config = small_config(initial_weights=str(path), **options)
    found = find_weights(str(path), root=path.parent)
    load_weights(model := lenet(seed=1), found, config, log=said.append)
    (line,) = said
    return model, line


# What is read


def wrapped(inner: Mapping[str, Tensor], *, prefix: str = "", key: str = "", **others: Any) -> Any:
    named = {prefix + name: tensor for name, tensor in inner.items()}
    return {key: named, **others} if key else named


def a_run(
    folder: Path, *, ema: bool = False, steps: int = 2, done: bool = True, name: str = "00000001"
) -> RunDir:
    """A run of LeNet-5 that has made `steps` steps, and evaluates its averages if it has some."""
    config = small_config(seed=7, ema=ema, ema_decay=0.5 if ema else None)
    job = small_job(
        config, small_plan(8), random_data(config, shape=SHAPE, train_size=16), dtype=torch.float32
    )
    run, progress = RunDir.create(folder, model="lenet5", identity=name, files={"config": ""}), Progress()
    for _ in range(steps):
        loop.optimizer_step(job, progress)
        progress.step += 1
        kept = {"keep_last": 3, "best": progress.step == 1}
        checkpoint.save(run.checkpoints, step=progress.step, state=loop.state_dict(job, progress), **kept)
    run.set_status("done" if done else "running", step=steps)
    run.release()
    return run


def as_file(write: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(folder / "w")
        return folder / "w"

    return make


def saved(make: Callable[[Mapping[str, Tensor]], Any], **options: Any) -> Callable[[Path], Path]:
    return as_file(lambda path: torch.save(make(state()), path, **options))


def shards(folder: Path) -> Path:
    items = list(state().items())
    write_shards(folder / "hf", {"a.safetensors": dict(items[:4]), "b.safetensors": dict(items[4:])})
    return folder / "hf"


READ: dict[str, Callable[[Path], Path]] = {
    "safetensors": as_file(lambda path: path.write_bytes(safetensors(state()))),
    "unaligned": as_file(lambda path: path.write_bytes(safetensors(state(), pad=False))),
    "state dict": saved(dict),
    "before 2020": saved(dict, _use_new_zipfile_serialization=False),
    "lightning": saved(partial(wrapped, key="state_dict", epoch=3, hyper=[1.5])),
    "model": saved(partial(wrapped, key="model", optimizer={"state": {}})),
    "parallel": saved(partial(wrapped, prefix="module.")),
    "compiled": saved(partial(wrapped, prefix="_orig_mod.", key="model")),
    "both": saved(partial(wrapped, prefix="module._orig_mod.", key="state_dict")),
    "parameters": saved(lambda own: {name: nn.Parameter(each) for name, each in own.items()}),
    "shards": shards,
}


@pytest.mark.parametrize("kind", READ)
def test_every_kind_of_file_gives_the_same_weights(kind: str, tmp_path: Path) -> None:
    model, said = loaded(READ[kind](tmp_path))
    assert largest_difference(model.state_dict(), state()) == 0
    assert said.endswith(": 10 of 10 match")
    assert largest_difference(lenet(seed=1).state_dict(), state()) > 0, "or nothing was read"


def test_other_types_of_numbers_are_converted(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(safetensors({name: each.bfloat16() for name, each in state().items()}))
    model, _ = loaded(tmp_path / "w")
    assert 0 < largest_difference(model.state_dict(), state()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("ema", [False, True])
def test_a_run_gives_the_weights_that_it_evaluates(ema: bool, tmp_path: Path) -> None:
    run = a_run(tmp_path, ema=ema)
    step_of = {"": 2, "ckpt": 2, "ckpt/latest": 2, "ckpt/best": 1, "ckpt/step-00000001": 1}
    for name, step in step_of.items():
        kept = checkpoint.load(run.checkpoints, which=step, log=print)
        assert kept is not None
        model, _ = loaded(run.path / name)
        expected = kept[1]["ema"] if ema else kept[1]["model"]
        assert largest_difference(model.state_dict(), expected) == 0
        assert largest_difference(model.state_dict(), kept[1]["model"]) > 0 or not ema
    assert find_weights(str(tmp_path), root=ROOT).checkpoint == (run.checkpoints, 2)
    a_run(tmp_path, steps=1, done=False, name="00000002")
    assert find_weights(str(tmp_path / "lenet5"), root=ROOT).checkpoint == (run.checkpoints, 2)


def test_of_tied_weights_one_name_is_enough() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.token.weight

    for names in (("token.weight",), ("head.weight",), ("token.weight", "head.weight")):
        given = {name: torch.full((5, 3), float(place)) for place, name in enumerate(names)}
        matched = match(model := Tied(), given, head="", allow="")
        load(model, matched.weights)
        assert not matched.faults() and not model.head.weight.any()


def test_relative_paths_are_looked_for_in_three_places(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("root", "weights", "data")]
    for folder in folders:
        folder.mkdir()
    for folder in reversed(folders):
        (folder / "w").write_bytes(safetensors({}))
        places = {"root": folders[0], "folders": [str(folders[1]), "s3://bucket", "../data", None]}
        assert find_weights("w", **places).path == folder / "w"  # type: ignore[arg-type]


# The head, and what may differ


def other_classes(path: Path, **more: Tensor) -> Path:
    path.write_bytes(safetensors({**lenet(classes=1000).state_dict(), **more}))
    return path


def test_a_head_of_other_classes_is_new_where_that_is_requested(tmp_path: Path) -> None:
    model, said = loaded(other_classes(tmp_path / "w"), reset_head=True)
    own, given = model.state_dict(), lenet(classes=1000).state_dict()
    fresh = lenet(seed=1).state_dict()
    for name in own:
        assert torch.equal(own[name], (fresh if name.startswith("linear3") else given)[name]), name
    assert said.endswith(": 8 match; new head, not read: linear3.weight, linear3.bias")
    # A head that fits is new, too: other classes may be as many.
    torch.save(state(), tmp_path / "fits")
    model, _ = loaded(tmp_path / "fits", reset_head=True)
    assert torch.equal(model.state_dict()["linear3.weight"], fresh["linear3.weight"])


def test_what_may_differ_is_told(tmp_path: Path) -> None:
    torch.save(
        state(**{"conv1.bias": None, "more.x": torch.ones(2), "linear1.weight": torch.ones(3)}),
        tmp_path / "w",
    )
    allow = "conv1.bias more linear1.w*"
    model, said = loaded(tmp_path / "w", initial_weights_allow=allow)
    assert torch.equal(model.state_dict()["linear1.weight"], lenet(seed=1).state_dict()["linear1.weight"])
    assert torch.equal(model.state_dict()["linear1.bias"], state()["linear1.bias"])
    assert said.endswith(
        ": 8 of 10 match; allowed: linear1.weight is (3,), and the model has (120, 400), "
        "conv1.bias is missing, more.x is not of the model"
    )


def test_the_head_is_the_last_layer_or_what_the_model_names() -> None:
    assert head_of(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), None) == ""
    assert head_of(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2)), None) == "1"
    assert head_of(nn.Sequential(nn.Linear(2, 2)), "halt") == "halt"


def test_all_differences_are_listed(tmp_path: Path) -> None:
    torch.save(state(**{"conv1.bias": None, "extra": torch.ones(2)}), tmp_path / "w")
    with pytest.raises(
        ConfigError, match=r"w does not fit the model: conv1.bias is missing, and 1 more"
    ) as caught:
        loaded(tmp_path / "w")
    assert caught.value.findings == ("conv1.bias is missing", "extra is not of the model")


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


NO = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda folder: folder / "w", "cannot be read: No such file"),
    "empty": (contents(b""), "is empty; give a file of safetensors or"),
    "text": (contents(b"weights, perhaps\n"), "is of no known format, or damaged; give a file of"),
    "LFS pointer": (contents(b"version https://git-lfs.github.com/spec/v1\n"), "LFS pointer.*git lfs pull"),
    "GGUF": (contents(b"GGUF\x03" + bytes(40)), "is a GGUF file.*give a file of safetensors"),
    "HDF5": (contents(b"\x89HDF\r\n\x1a\n" + bytes(40)), "is an HDF5 file"),
    "half a header": (
        contents(header({"a": NO})[:-3]),
        r"damaged safetensors file: its header has 61 bytes, and",
    ),
    "large header": (contents(header({"a": NO}, length=2**40)), r"its header has 1,099,511,627,776 bytes"),
    "no JSON": (contents((9).to_bytes(8, "little") + b"{'a': 1} "), "is damaged: .*; copy it again"),
    "truncated": (contents(cut(safetensors(state()), 100)), "is damaged: linear3.* is not within its"),
    "wrong size": (
        contents(header({"a": {**NO, "shape": [3]}}, data=bytes(8))),
        "is damaged: a is not within",
    ),
    "no shape": (contents(header({"a": {"dtype": "F32"}}, data=bytes(8))), "is damaged: 'data_offsets'"),
    "unknown type": (
        contents(header({"a": {**NO, "dtype": "F4"}})),
        "a has the unknown type F4; store it in",
    ),
    "code": (as_file(lambda path: torch.save({"a": Code()}, path)), "more than tensors.*state_dict"),
    "old code": (contents(pickle.dumps(Code(), protocol=2)), "more than tensors.*not run; save the weights"),
    "other archive": (contents(b"PK\x03\x04" + bytes(60)), "is damaged: .*; copy it again"),
    "no weights": (
        as_file(lambda path: torch.save({"epoch": 3}, path)),
        "holds no weights: no tensor has a name",
    ),
    "one tensor": (as_file(lambda path: torch.save(torch.ones(3), path)), "holds no weights"),
    "folder": (a_folder(), "is a folder without weights: it has nothing; give"),
    "folder of text": (a_folder("readme"), "is a folder without weights: it has readme"),
    "two files": (a_folder("a.pt", "b.pt"), r"it has 2 files \*.pt and no index.*name one of them, such as"),
    "missing shard": (incomplete, r"hf is not complete: 1 of 2 shards are missing, such as \['b.saf"),
    "run without checkpoint": (run_without_checkpoint, "has no checkpoint; name another run, or"),
    "several runs": (two_runs, "is a folder of runs: of its 2 runs 2 are done; name one, such as"),
    "unfinished runs": (
        lambda folder: a_run(folder, done=False).path.parent,
        "1 runs none is done; train it",
    ),
    "no such step": (
        lambda folder: a_run(folder).checkpoints / "step-00000009",
        "no such one: .* steps 1, 2;",
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
        "WEIGHTS_ALLOW: no weight matches conv9: there .*conv1",
    ),
    "freeze nothing": (
        {"freeze": "convl"},
        "CONFIG_FREEZE: no weight matches convl: there .*conv1.*; correct",
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
        commands._plan_and_train(an_order(config, root), lambda: None)
    assert not (root / "data").exists(), "nor are data made"
    return caught.value


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
        ({"LAYER_DECAY": "1.5"}, "LAYER_DECAY.*0.01 <= x <= 1"),
        ({"LAYER_DECAY": "0"}, "LAYER_DECAY.*0.01 <= x <= 1"),
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


def test_weights_of_another_gpt2_are_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(safetensors({"h.0.ln_1.weight": torch.ones(3)}))
    config = small_lm_config(initial_weights="w")
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}/w cannot be used: these are not the weights"
    ) as caught:
        check_weights(config, text_spec(), tmp_path, log=print)
    assert "wte.weight is missing" in caught.value.findings
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
    message = "RESET_HEAD has no effect" if layout == "theirs" else "the model has no head of its own; set it"
    with pytest.raises(ConfigError, match=message):
        check_weights(changed, text_spec(), tmp_path, log=print)
