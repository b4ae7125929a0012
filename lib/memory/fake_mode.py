"""Fake tensors at a third of their cost: what an operator makes is remembered by the shapes it was given.

torch remembers that too, under keys of seventeen objects for each tensor, which take most of a trace's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache
from torch.utils._pytree import tree_leaves

_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_CPU = torch.device("cpu")


class _Output(NamedTuple):
    """What an operator returned: a new tensor, a view of an argument, that argument, or else `value`."""

    value: int | None = None
    argument: int | None = None  # its place
    shape: tuple[Any, ...] | None = None  # size and stride; None: no new tensor object
    offset: Any = 0
    options: Any = None  # of torch.empty_strided


class QuickFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """FakeTensorMode on the CPU, in which outputs are not derived again for arguments of known shapes."""

    # Of all modes: outputs, and the type that holds several; None: to be derived each time.
    _known: ClassVar[dict[tuple[Any, ...], tuple[type | None, list[_Output]] | None]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # of NumPy, which become fake in their first operation
        self.cache_enabled = False  # torch's own
        self._state = dict(vars(FakeTensor(self, torch.empty(0, device="meta"), _CPU)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of LiveBytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        key, kwargs = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()], kwargs or {}
        if not (self._describe(key, args) and self._describe(key, tuple(kwargs.items()))):
            return self.dispatch(func, types, args, kwargs)
        facts = tuple(key)
        if known := self._known.get(facts):
            container, outputs = known
            made = [self._again(each, args) for each in outputs]
            return container(made) if container is not None else made[0]
        result = self.dispatch(func, types, args, kwargs)
        if facts not in self._known:
            self._known[facts] = self._outputs(func, args, kwargs, result)
        return result

    def _describe(self, key: list[Any], values: Sequence[Any]) -> bool:
        """Append what results depend on of `values` to `key`; return False where that is not known."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not _is_ordinary(value) or value.fake_mode is not self:
                    return False
                key += (value.shape, value.stride(), value.dtype, value.storage_offset(), value.requires_grad)
                key += (value.untyped_storage().nbytes(), value.is_inference(), value.fake_device)
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value):
                    return False
            else:
                return False
        return True

    def _outputs(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> tuple[type | None, list[_Output]] | None:
        """Return how to make `result` again; None where its shapes do not say all of it, by torch's rules."""
        several = isinstance(result, list | tuple)
        container = (list if isinstance(result, list) else tuple) if several else None
        parts = [*result] if several else [result]
        outputs = [found for each in parts if (found := self._output(args, each)) is not None]
        new = [each for each, of in zip(parts, outputs, strict=False) if of.shape and of.argument is None]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        own, others = ({each.untyped_storage()._cdata for each in tensors} for tensors in (new, given))
        try:
            self._validate_cache_key(func, args, kwargs)
        except _BypassDispatchCache:
            return None
        complete = len(outputs) == len(parts) and len(own) == len(new) and not own & others
        return (container, outputs) if complete else None

    def _output(self, args: Any, made: Any) -> _Output | None:
        if made is None or type(made) is int:
            return _Output(made)
        if type(made) is not FakeTensor or made.fake_device != _CPU or not _is_ordinary(made):
            return None
        fakes = [(place, each) for place, each in enumerate(args) if type(each) is FakeTensor]
        storage = made.untyped_storage()
        same = next((place for place, each in fakes if each is made), None)
        if same is not None:
            return _Output(argument=same)
        viewed = next((n for n, each in fakes if each.untyped_storage()._cdata == storage._cdata), None)
        options = {"dtype": made.dtype, "device": "meta", "requires_grad": made.requires_grad}
        output = _Output(None, viewed, (made.shape, made.stride()), made.storage_offset(), options)
        again = self._again(output, args)
        alike = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(made)
        return output if alike and again.untyped_storage().nbytes() == storage.nbytes() else None

    def _again(self, output: _Output, args: Any) -> Any:
        if output.shape is None:
            return output.value if output.argument is None else args[output.argument]
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(*output.shape, **output.options)
            if output.argument is not None:
                bare.set_(args[output.argument].untyped_storage(), output.offset, *output.shape)
        # As FakeTensor.__new__ does, which sets each attribute by itself.
        options: dict[str, Any] = {"dispatch_device": True, "device_for_backend_keys": _CPU}
        fake = Tensor._make_subclass(FakeTensor, bare, bare.requires_grad, **options)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._state)
        return fake


def _is_ordinary(tensor: FakeTensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return plain and tensor.constant is None
