"""Copies of modules without contents, and constants that keep theirs, for a simulation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lib.errors import ConfigError

LARGEST_CONSTANT = 1024  # elements; results of two of them broadcast have up to its square
_CONSTANTS = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.arange, torch.linspace, torch.logspace)


def without_contents(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with simulated tensors on the CPU; call it in a `simulation`.

    Tensors of one storage share one again, so tied weights stay tied. Scalars on the CPU keep their value.
    Tensors may be real, on the meta device or simulated. `module` is not changed. Raises ConfigError for a
    lazy module, whose shapes are open.
    """
    lazy = next((name for name, weight in module.named_parameters() if is_lazy(weight)), None)
    if lazy is not None:
        raise ConfigError(
            f"the shape of {lazy} is left open", todo="run a batch through the lazy module first"
        )
    with _WithoutContents():
        return copy.deepcopy(getattr(module, "_orig_mod", module))  # of a compiled module


class _WithoutContents(TorchFunctionMode):
    """Mode in which deepcopy makes simulated tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._kept: list[Tensor] = []  # so that no address is used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return _deepcopied(*args, make=self._twin)
        # Of a Parameter's __deepcopy__, which makes a Parameter of the result.
        if func is Tensor.clone:
            return self._twin(args[0])
        return func(*args, **(kwargs or {}))

    def _twin(self, tensor: Tensor) -> Tensor:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily  # slow

        real = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if real and tensor.numel() == 1:
                with unset_fake_temporarily():
                    value = tensor.tolist()
                return torch.tensor(value, dtype=tensor.dtype)
            storage = tensor.untyped_storage()
            key = storage._cdata, tensor.dtype
            if key not in self._storages:
                self._kept.append(tensor)
                count = storage.nbytes() // tensor.itemsize
                self._storages[key] = torch.empty(count, dtype=tensor.dtype, device="cpu")
            return self._storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _deepcopied(tensor: Tensor, memo: dict[int, Any], *, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Copy a tensor as deepcopy does. (torch's own makes no weight of a simulated weight.)"""
    if id(tensor) not in memo:
        twin = make(tensor)
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if is_weight else twin
    return cast(Tensor, memo[id(tensor)])


class RealConstants(TorchFunctionMode):
    """Mode of a simulation in which small tensors that depend on constants only are real.

    Code may read their values: the drop rates of blocks, say, which timm takes from a linspace. A single
    number of torch.rand is 1, so that no layer is skipped by chance (LayerDrop): most memory is needed then.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _deepcopied(*args, make=lambda tensor: tensor.detach().clone())
        run = functools.partial(func, *args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors:
            real = not any(isinstance(each, FakeTensor | nn.Parameter) for each in tensors)
            small = sum(each.numel() for each in tensors) <= LARGEST_CONSTANT
        else:
            real, small = func in _CONSTANTS, True
        if not (real and small):
            result = run()
            if func is not torch.rand or result.numel() > 1:
                return result
            with unset_fake_temporarily():
                return torch.ones(result.shape, dtype=result.dtype)
        with unset_fake_temporarily():
            return run()
