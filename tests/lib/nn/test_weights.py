"""Stored weights: every kind of file and run is read, and matched with the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.nn.weights import head_of, load, match, named_by
from lib.runs import checkpoint
from lib.runs.weight_files import find_weights
from tests.support.stored_weights import (
    a_run,
    as_file,
    lenet,
    loaded,
    other_classes,
    safetensors,
    saved,
    shards,
    state,
)
from tests.support.training import largest_difference

ROOT = Path(__file__).resolve().parents[3]


def wrapped(inner: Mapping[str, Tensor], *, prefix: str = "", key: str = "", **others: Any) -> Any:
    named = {prefix + name: tensor for name, tensor in inner.items()}
    return {key: named, **others} if key else named


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", READ)
def test_every_kind_of_file_gives_the_same_weights(kind: str, tmp_path: Path) -> None:
    model, said = loaded(READ[kind](tmp_path))
    assert largest_difference(model.state_dict(), state()) == 0
    assert said.endswith(": 10 weights match")
    assert largest_difference(lenet(seed=1).state_dict(), state()) > 0, "or nothing was read"


def test_other_types_of_numbers_are_converted(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(safetensors({name: each.bfloat16() for name, each in state().items()}))
    model, _ = loaded(tmp_path / "w")
    assert 0 < largest_difference(model.state_dict(), state()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("ema", [False, True])
def test_a_run_gives_the_weights_that_it_evaluates(ema: bool, tmp_path: Path) -> None:
    run = a_run(tmp_path, ema=ema)
    step_of = {"": 2, "ckpt/latest": 2, "ckpt/best": 1, "ckpt/step-00000001": 1}
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
        assert not matched.faults and not model.head.weight.any()


def test_relative_paths_are_looked_for_in_three_places(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("root", "weights", "data")]
    for folder in folders:
        folder.mkdir()
    for folder in reversed(folders):
        (folder / "w").write_bytes(safetensors({}))
        places = {"root": folders[0], "folders": [str(folders[1]), "s3://bucket", "../data", None]}
        assert find_weights("w", **places).path == folder / "w"  # type: ignore[arg-type]


# The head, and what may differ


def test_a_head_of_other_classes_is_new_where_that_is_requested(tmp_path: Path) -> None:
    model, said = loaded(other_classes(tmp_path / "w"), reset_head=True)
    own, given = model.state_dict(), lenet(classes=1000).state_dict()
    fresh = lenet(seed=1).state_dict()
    for name in own:
        assert torch.equal(own[name], (fresh if name.startswith("linear3") else given)[name]), name
    assert said.endswith(": 8 weights match; new head, not read: linear3.weight, linear3.bias")
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
        ": 8 weights match; allowed: conv1.bias is missing; allowed: linear1.weight is (3,), and the model "
        "has (120, 400); allowed: more.x is not of the model"
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


def test_a_pattern_that_may_begin_within_a_path_is_told_close_names_of_that_form() -> None:
    names = {f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"}
    with pytest.raises(ConfigError, match="no weight matches q_prj: close to it: q_proj, "):
        named_by("q_prj", names, option="LORA_TARGETS", within=True)
    with pytest.raises(ConfigError, match=r"close to it: model\.layers\.0\.self_attn\.q_proj"):
        named_by("model.layers.0.self_attn.q_prj", names, option="FREEZE")


@pytest.mark.parametrize(
    ("pattern", "within", "form", "count"),
    [
        ("q_proj", False, "*.q_proj", 2),
        ("layers.0.q_proj", False, "*.layers.0.q_proj", 1),
        ("proj", True, "*proj*", 4),
    ],
)
def test_a_pattern_of_a_part_of_a_name_is_told_what_would_match(
    pattern: str, within: bool, form: str, count: int
) -> None:
    names = {f"model.layers.{layer}.{name}_proj.weight" for layer in range(2) for name in "qk"} | {"lm_head"}
    told = rf"no weight matches {pattern}: .* whole name, as of model\.layers\..*; "
    with pytest.raises(ConfigError, match=told) as caught:
        named_by(pattern, names, option="LORA_TRAIN", within=within)
    assert caught.value.todo == f"{form} would match {count}"
    assert len(named_by(form, names, option="LORA_TRAIN", within=within)) == count
