"""What every model under models/ keeps to. A new model is covered by being there."""

from __future__ import annotations

import dataclasses
import functools
import typing
from pathlib import Path
from typing import Any

import kconfiglib
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import models
from lib import plugin_folders, plugins
from lib.data.types import TextSpec
from lib.devices.backend import check_channels_last
from lib.errors import ConfigError
from lib.memory.facts import model_facts
from lib.nn.batch_norm import commit_statistics, configure_norm
from lib.nn.model_code import build_model, load_model
from lib.optim.muon import HasHiddenMatrices
from lib.plan.types import ModelFacts
from lib.plugins import MODELS
from models.lenet5.model import LeNet5
from tests.contract.cases import (
    NAMES,
    ROOT,
    golden,
    inputs_of,
    logits_of,
    loss_of,
    output_shape,
    spec_of,
    targets_of,
    tiny,
)

SCALES = {"resnet18": 2.0, "resnet50": 1.5, "lenet5": 4.0, "gpt2": 1.0}  # of the free-memory table
TARGETS = {"resnet18": 512, "resnet50": 256, "lenet5": 512, "gpt2": 1024}


@pytest.fixture(scope="module")
def kconfig() -> kconfiglib.Kconfig:
    return kconfiglib.Kconfig(str(ROOT / "Kconfig"))


def chosen(kconfig: kconfiglib.Kconfig, name: str) -> dict[str, kconfiglib.Symbol]:
    """All symbols, with model `name` chosen."""
    kconfig.syms[f"MODEL_{name.upper()}"].set_value(2)
    assert kconfig.syms["MODEL"].str_value == name
    return dict(kconfig.syms)


@functools.cache
def facts_of(name: str) -> ModelFacts:
    """Of the first of its golden cases."""
    case = golden(name)[0]
    build = functools.partial(build_model, name, case["options"], spec_of(case), seed=0)
    return model_facts(build, spec_of(case), name=name, train_size=1)


CASES = [pytest.param(name, case, id=f"{name}-{i}") for name in NAMES for i, case in enumerate(golden(name))]


def test_the_models_are_found() -> None:
    assert {"gpt2", "lenet5", "resnet18", "resnet50"} <= set(NAMES)


def test_a_directory_with_a_model_is_all_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train").symlink_to(plugin_folders.ROOT / "train")
    monkeypatch.setattr(plugin_folders, "ROOT", tmp_path)
    tmp_path /= "models"
    tmp_path.mkdir()
    monkeypatch.setattr(models, "__path__", [str(tmp_path)])
    whole = (
        "import dataclasses\nTASK = \"lm\"\nbuild = 1\nOptions = dataclasses.make_dataclass('Options', [])"
    )
    for name, source in (("whole", whole), ("half", "TASK = 'lm'"), ("empty", None)):
        (tmp_path / name).mkdir()
        if source:
            (tmp_path / name / "model.py").write_text(source)
    assert MODELS.names() == ("half", "whole")
    assert load_model("whole").TASK
    with pytest.raises(ConfigError, match=r"models/half/model\.py does not define Options, build"):
        load_model("half")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES)
def test_parameter_count_is_golden_and_it_builds_on_the_meta_device(name: str, case: dict[str, Any]) -> None:
    spec = spec_of(case)
    with torch.device("meta"):
        model = build_model(name, case["options"], spec, seed=0)
        logits = logits_of(model(inputs_of(spec, 2).to("meta")))
    assert sum(parameter.numel() for parameter in model.parameters()) == case["parameters"]
    assert logits.shape == output_shape(spec, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_facts_have_the_golden_number_of_parameters(name: str) -> None:
    assert facts_of(name).parameters == golden(name)[0]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", NAMES)
def test_loss_is_finite_and_gradient_reaches_every_parameter(name: str, layout: torch.memory_format) -> None:
    model, spec = tiny(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # behind a weight that starts at zero there is no gradient yet
                parameter.fill_(0.1)
    model.to(memory_format=layout)
    inputs = inputs_of(spec, 4)
    if inputs.dim() == 4:
        inputs = inputs.to(memory_format=layout)
    if layout == torch.channels_last:
        try:
            check_channels_last(model)
        except ConfigError as error:
            pytest.skip(str(error))
    loss = loss_of(model(inputs), targets_of(spec, 4))
    loss.backward()
    assert loss.isfinite()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all() and parameter.grad.any(), parameter_name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_step_of_sgd_lowers_the_loss(name: str) -> None:
    model, spec = tiny(name)
    inputs, targets = inputs_of(spec, 8), targets_of(spec, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        losses.append(loss_of(model(inputs), targets))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_does_not_depend_on_the_micro_batch(name: str) -> None:
    def trained(micro_batch: int) -> dict[str, torch.Tensor]:
        model, spec = tiny(name)
        model.double()
        configure_norm(model, norm_batch=2, momentum=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
        inputs, targets = inputs_of(spec, 8), targets_of(spec, 8)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        for _ in range(3):
            for x, y in zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True):
                (loss_of(model(x), y, reduction="sum") / targets.numel()).backward()
            commit_statistics(model)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    whole = trained(8)
    for micro_batch in (2, 4):
        parts = trained(micro_batch)
        assert max((whole[key] - parts[key]).abs().max().item() for key in whole) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = tiny(name, seed=3)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator was moved"
    torch.manual_seed(6)
    second, other = tiny(name, seed=3)[0].state_dict(), tiny(name, seed=4)[0].state_dict()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.state_dict().items())
    assert any(not torch.equal(tensor, other[key]) for key, tensor in first.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name: str) -> None:
    (model, spec), (other, _) = tiny(name, seed=1), tiny(name, seed=2)
    model(inputs_of(spec, 4))  # moves the running statistics, where there are any
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        one, two = (logits_of(each.eval()(inputs_of(spec, 3))) for each in (model, other))
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", NAMES)
def test_task_can_be_read_without_importing_the_model(name: str) -> None:
    assert plugins.task_of(name) == load_model(name).TASK


@pytest.mark.parametrize("name", NAMES)
def test_options_are_the_models_symbols(name: str, kconfig: kconfiglib.Kconfig) -> None:
    known = chosen(kconfig, name)
    owned = plugin_folders.symbols_of(MODELS.home(name))
    symbols = {field: known[symbol] for symbol, field in owned.items() if known[symbol].choice is None}
    hints = typing.get_type_hints(load_model(name).Options)
    assert set(hints) == set(symbols)
    of_type = {kconfiglib.INT: int, kconfiglib.BOOL: bool}
    for option, symbol in symbols.items():
        value_line = "float" if "Value: float" in (symbol.nodes[0].help or "") else "text"
        assert hints[option] is of_type.get(symbol.orig_type, {"float": float, "text": str}[value_line])
    options = load_model(name).Options
    assert dataclasses.is_dataclass(options) and options.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_kconfig_says_what_the_model_is(name: str, kconfig: kconfiglib.Kconfig) -> None:
    symbols = chosen(kconfig, name)
    case = golden(name)[0]
    facts = facts_of(name)
    assert float(symbols["TABLE_SCALE"].str_value) > 0
    assert int(symbols["RECOMMENDED_TARGET"].str_value) > 0
    assert (symbols["MODEL_HAS_BATCHNORM"].str_value == "y") == facts.has_batchnorm
    assert (symbols["MODEL_DATA_TEXT"].str_value == "y") == isinstance(spec_of(case), TextSpec)
    names_matrices = isinstance(tiny(name)[0], HasHiddenMatrices)
    assert (symbols["MODEL_HAS_HIDDEN_MATRICES"].str_value == "y") == names_matrices
    if symbols["MODEL_PREDICTS_ROWS"].str_value == "y":
        assert load_model(name).TASK == "classify", "another TASK would overrule the choice"
    convolutional = any(isinstance(module, nn.Conv2d) for module in tiny(name)[0].modules())
    assert (symbols["MODEL_HAS_CONV"].str_value == "y") == convolutional


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(tiny(name)[0], HasHiddenMatrices)])
def test_hidden_matrices_are_neither_embeddings_nor_the_head(name: str) -> None:
    model, spec = tiny(name)
    assert isinstance(model, HasHiddenMatrices)
    hidden = {id(matrix) for matrix in model.hidden_matrices()}
    assert hidden <= {id(parameter) for parameter in model.parameters() if parameter.dim() >= 2}
    classes = output_shape(spec, 1)[-1]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert (id(module.weight) in hidden) == (module.out_features != classes)
        elif isinstance(module, nn.Embedding):
            assert id(module.weight) not in hidden


@pytest.mark.parametrize("name", SCALES)
def test_scale_and_target_are_those_of_the_table(name: str, kconfig: kconfiglib.Kconfig) -> None:
    symbols = chosen(kconfig, name)
    assert float(symbols["TABLE_SCALE"].str_value) == SCALES[name]
    assert int(symbols["RECOMMENDED_TARGET"].str_value) == TARGETS[name]


@pytest.mark.slow
def test_models_of_any_image_size_take_small_and_oblong_images(kconfig: kconfiglib.Kconfig) -> None:
    any_size = [name for name in NAMES if chosen(kconfig, name)["MODEL_ANY_IMAGE_SIZE"].str_value == "y"]
    assert any_size, "no model takes images of any size"
    for name in any_size:
        for case in (case for case in golden(name) if "height" in case):
            case |= {"height": 8, "width": 13}
            with torch.device("meta"):
                model = build_model(name, case["options"], spec_of(case), seed=0)
                assert model(torch.empty(2, case["channels"], 8, 13)).shape == (2, case["classes"])


@pytest.mark.parametrize(("height", "width"), [(224, 224), (28, 32), (27, 27)])
def test_lenet5_names_the_sizes_that_it_takes(height: int, width: int) -> None:
    case = {**golden("lenet5")[0], "height": height, "width": width}
    with pytest.raises(ConfigError, match=f"28x28 or 32x32, and those of noise are {height}x{width}"):
        build_model("lenet5", {}, spec_of(case), seed=0)


def test_lenet5_on_28x28_is_lenet5_on_the_same_images_with_a_border() -> None:
    small, large = (spec_of(case) for case in golden("lenet5")[:2])
    torch.manual_seed(0)
    on_28, on_32 = LeNet5(small), LeNet5(large)
    on_32.load_state_dict(on_28.state_dict())
    images = inputs_of(small, 2)
    torch.testing.assert_close(on_28(images), on_32(F.pad(images, (2, 2, 2, 2))))


def test_filters_start_with_the_variance_of_kaiming() -> None:
    model = build_model("resnet18", {"stem": "cifar", "width": 32}, spec_of(golden("resnet18")[1]), seed=0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            expected = (2 / (module.out_channels * module.kernel_size[0] ** 2)) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.1)


def test_bottlenecks_have_their_stride_in_the_3x3_convolution() -> None:
    strided = [
        module.kernel_size
        for key, module in tiny("resnet50")[0].named_modules()
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2) and "shortcut" not in key
    ]
    assert strided == [(3, 3)] * 3


def test_unknown_models_stems_and_options_are_told() -> None:
    spec = spec_of(golden("resnet18")[1])
    with pytest.raises(ConfigError, match=r"no model 'resnet81'.*did you mean resnet18"):
        load_model("resnet81")
    with pytest.raises(ConfigError, match=r"there are .*gpt2, .*lenet5, .*resnet18, resnet50"):
        load_model("..")
    with pytest.raises(ConfigError, match="CONFIG_RESNET18_WIDTH is not set"):
        build_model("resnet18", {"stem": "cifar"}, spec, seed=0)
    with pytest.raises(ConfigError, match="CONFIG_RESNET18_DEPTH is not known"):
        build_model("resnet18", {"stem": "cifar", "width": 4, "depth": 3}, spec, seed=0)
    with pytest.raises(ConfigError, match=r"models/resnet.py:\d+: ValueError: no stem is named 'vit'"):
        build_model("resnet18", {"stem": "vit", "width": 4}, spec, seed=0)
