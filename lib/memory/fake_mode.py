"""Fake tensors at a third of their cost: what an operator makes is remembered by the shapes it was given.

torch remembers that too, under keys of seventeen objects for each tensor, which take most of a trace's time.
Imported by `lib.memory.simulation` when it is needed, because the import is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache
from torch.utils._pytree import tree_leaves

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CPU = torch.device("cpu")


class _Output(NamedTuple):
    """What an operator returned: an argument, a view of one, a new tensor, or else `value`."""

    value: int | None = None
    same_as: int | None = None  # place of the argument
    view_of: int | None = None
    shape: tuple[Any, ...] | None = None  # size and stride
    offset: int = 0
    options: Any = None  # of torch.empty_strided


_Known: TypeAlias = tuple[type | None, list[_Output]]  # list or tuple of several outputs; None: of one


class QuickFakeMode(FakeTensorMode):
    """FakeTensorMode on the CPU in which results are made anew, not computed, where the shapes are known."""

    _known: dict[tuple[Any, ...], _Known | None] = {}  # of all modes; None: to be computed each time

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # of NumPy, which become fake in the first operation
        self.cache_enabled = False  # torch's own
        self._state = dict(vars(FakeTensor(self, torch.empty(0, device="meta"), _CPU)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see LiveBytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not (self._add(key, args) and self._add(key, tuple(kwargs.items()))):
            return self.dispatch(func, types, args, kwargs)
        found = tuple(key)
        if found not in self._known:
            made = self.dispatch(func, types, args, kwargs)
            self._known[found] = self._described(func, args, kwargs, made)
            return made
        known = self._known[found]
        if known is None:
            return self.dispatch(func, types, args, kwargs)
        container, outputs = known
        made = [self._again(each, args) for each in outputs]
        return container(made) if container is not None else made[0]

    def _add(self, key: list[Any], values: Sequence[Any]) -> bool:
        """Append what a result depends on of `values` to `key`; False where that is not known."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                strided = value.layout is torch.strided and not (value.is_conj() or value.is_neg())
                if not strided or value.constant is not None or value.fake_mode is not self:
                    return False
                key += (
                    value.shape, value.stride(), value.dtype, value.storage_offset(), value.requires_grad,
                    value.untyped_storage().nbytes(), value.is_inference(),
                )  # fmt: skip
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._add(key, value):
                    return False
            else:
                return False
        return True

    def _described(self, func: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> _Known | None:
        """Return how to make `made` again; None where that is not possible, mostly by the rules of torch."""
        several = isinstance(made, tuple | list)
        outputs = [self._output(args, each) for each in (made if several else [made])]
        known = [each for each in outputs if each is not None]
        new = [each for each, output in zip(made if several else [made], known) if output.shape and output.view_of is None]
        own = [each.untyped_storage()._cdata for each in new]
        others = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        try:
            self._validate_cache_key(func, args, kwargs)
        except _BypassDispatchCache:
            return None
        if len(known) < len(outputs) or len({*own}) < len(own) or others & {*own}:
            return None
        return (list if isinstance(made, list) else tuple) if several else None, known

    def _output(self, args: Any, made: Any) -> _Output | None:
        if made is None or type(made) is int:
            return _Output(made)
        if type(made) is not FakeTensor or made.constant is not None or made.layout is not torch.strided:
            return None
        for place, each in enumerate(args):
            if each is made:
                return _Output(same_as=place)
        storage = made.untyped_storage()
        places = (n for n, each in enumerate(args) if type(each) is FakeTensor and each.untyped_storage()._cdata == storage._cdata)
        options = {"dtype": made.dtype, "device": "meta", "requires_grad": made.requires_grad}
        shape = made.shape, made.stride()
        output = _Output(None, None, next(places, None), shape, made.storage_offset(), options)
        again = self._again(output, args)
        alike = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(made)
        same = again.untyped_storage().nbytes() == storage.nbytes() and made.fake_device == _CPU
        return output if alike and same else None

    def _again(self, output: _Output, args: Any) -> Any:
        if output.same_as is not None:
            return args[output.same_as]
        if output.shape is None:
            return output.value
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(*output.shape, **output.options)
            if output.view_of is not None:
                bare.set_(args[output.view_of].untyped_storage(), output.offset, *output.shape)
        # As FakeTensor.__new__ does, which sets each attribute by itself.
        fake = Tensor._make_subclass(
            FakeTensor, bare, bare.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._state)
        return fake
