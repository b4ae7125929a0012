"""Checks that a model fits its task and its data, made before anything is planned or trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lib.config import Config
from lib.data.types import Spec
from lib.errors import ConfigError
from lib.nn.model_code import load_model
from train.tasks.opening import check_options, load_task

_SIMD_CHANNELS = 8  # of single precision in a register of AVX2


def check_task(config: Config, spec: Spec) -> None:
    """Raise ConfigError where the model's TASK is not for such data, or lacks the options of its kind."""
    task = load_model(config.model).TASK
    expected, kinds = load_task(config.model).DATA
    if not isinstance(spec, kinds):
        raise ConfigError(
            f'models/{config.model}/model.py: TASK = "{task}" does not train on {spec.name}',
            why=f"it needs {expected}",
            todo=f"set another TASK, or select another MODEL_DATA_ symbol in models/{config.model}/Kconfig",
        )
    check_options(config)


def checked(model: nn.Module, name: str, spec: Spec) -> nn.Module:
    """Return `model`, called `name`, with a hook that checks what its forward pass returns.

    The forward pass raises ConfigError where the task cannot use that.
    """
    task = load_task(name)

    def check(_: nn.Module, inputs: tuple[Tensor, ...], returned: Any) -> None:
        wrong = task.fault(returned, spec, rows=len(inputs[0]))
        if wrong:
            raise ConfigError(f"models/{name}/model.py: forward returns {_shape(returned)}, {wrong}")
        if not any(leaf.requires_grad for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)):
            raise ConfigError(
                f"models/{name}/model.py: what forward returns depends on no weight",
                why="there is nothing to train",
            )

    model.register_forward_hook(check)
    return model


def check_channels_last(model: nn.Module) -> None:
    """Raise ConfigError where the CPU's kernels corrupt memory in the layout of CONFIG_CHANNELS_LAST.

    Without AVX-512, the backward pass of a 1x1 convolution of stride 2 with fewer than 8 input channels
    writes beyond its buffer (seen with torch 2.13.0: segmentation faults, bus errors and aborts).
    """
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return
    for name, module in model.named_modules():
        strided = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.stride != (1, 1)
        if strided and module.in_channels < _SIMD_CHANNELS:
            raise ConfigError(
                f"CONFIG_CHANNELS_LAST=y cannot be honoured on this CPU: {name} is a 1x1 convolution with a "
                f"stride and {module.in_channels} input channels",
                why="PyTorch's kernel for CPUs without AVX-512 corrupts memory there",
                todo=f"set CONFIG_CHANNELS_LAST=n, or give it {_SIMD_CHANNELS} channels",
            )


def _shape(returned: Any) -> str:
    return str(tuple(returned.shape)) if isinstance(returned, Tensor) else type(returned).__name__
