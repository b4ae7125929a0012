"""Computing activations again changes what is kept, and no bit of anything else, in every model."""

from __future__ import annotations

import functools

import kconfiglib
import pytest
import torch
from torch import Tensor, nn

from lib.memory.facts import saved_bytes
from lib.nn.activation_checkpointing import Chain, Recompute, configure_recomputation
from lib.nn.batch_norm import commit_statistics, configure_norm
from lib.nn.dropout import dropouts, key_samples
from lib.nn.model_code import build_model
from tests.contract.cases import NAMES, ROOT, golden, inputs_of, loss_of, spec_of, targets_of

ROWS = 4


def has_chain(name: str) -> bool:
    return any(isinstance(module, Chain) for module in built(name, "none").modules())


def built(name: str, recompute: Recompute, *, norm_batch: int = 0) -> nn.Module:
    """The smallest case of the model, with dropout where there is any."""
    case = min(golden(name), key=lambda case: case["parameters"])
    options = {option: 0.25 if option == "dropout" else value for option, value in case["options"].items()}
    model = build_model(name, options, spec_of(case), seed=0)
    configure_norm(model, norm_batch=norm_batch, momentum=0.1)
    configure_recomputation(model, recompute)
    return model


@functools.cache
def keyed_inputs(name: str) -> tuple[Tensor, Tensor]:
    spec = spec_of(min(golden(name), key=lambda case: case["parameters"]))
    return inputs_of(spec, 2 * ROWS), targets_of(spec, 2 * ROWS)


def after_two_micro_batches(model: nn.Module, name: str, *, norm_batch: int) -> dict[str, Tensor]:
    """Gradients, and all buffers."""
    torch.manual_seed(0)
    for number, (x, y) in enumerate(zip(*(part.split(ROWS) for part in keyed_inputs(name)), strict=True)):
        key_samples(dropouts(model), seed=1, first=number * ROWS, count=ROWS, device=torch.device("cpu"))
        loss_of(model(x), y).backward()
    found = {f"{key}.grad": parameter.grad for key, parameter in model.named_parameters()}
    if norm_batch:
        commit_statistics(model)
    return {
        key: value.clone() for key, value in [*found.items(), *model.named_buffers()] if value is not None
    }


WITH_BLOCKS = [name for name in NAMES if has_chain(name)]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["blocks", "all"])
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_gradients_and_statistics_are_the_same_to_the_bit(name: str, recompute: Recompute) -> None:
    for norm_batch in (0, 2) if "resnet1" in name or "resnet5" in name else (0,):
        plain, again = (
            after_two_micro_batches(built(name, choice, norm_batch=norm_batch), name, norm_batch=norm_batch)
            for choice in ("none", recompute)
        )
        assert plain.keys() == again.keys()
        for key, value in plain.items():
            assert torch.equal(value, again[key]), f"{key} at norm_batch {norm_batch}"


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_less_is_kept(name: str) -> None:
    inputs, _ = keyed_inputs(name)
    kept = {}
    for choice in ("none", "blocks", "all"):
        model = built(name, choice)  # type: ignore[arg-type]
        rows = len(inputs)
        key_samples(dropouts(model), seed=1, first=0, count=rows, device=torch.device("cpu"))
        kept[choice] = saved_bytes(model, inputs)
    assert kept["all"] <= kept["blocks"] < 0.8 * kept["none"]


def test_the_models_that_shipped_first_all_have_blocks() -> None:
    assert {"lenet5", "resnet18", "resnet50", "gpt2", "resnet_bk"} <= set(WITH_BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_kconfig_says_whether_there_are_blocks(name: str) -> None:
    kconfig = kconfiglib.Kconfig(str(ROOT / "Kconfig"), warn_to_stderr=False)
    kconfig.syms[f"MODEL_{name.upper()}"].set_value(2)
    assert (kconfig.syms["MODEL_HAS_BLOCKS"].str_value == "y") == has_chain(name)
