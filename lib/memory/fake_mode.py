"""Fake tensors at a third of their cost: what an operator makes is remembered by the shapes it was given.

torch remembers that too, under keys of seventeen objects for each tensor, which take most of a trace's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, _BypassDispatchCache
from torch.utils._pytree import tree_leaves

_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_CPU = torch.device("cpu")
# Views and products, whose rule is no more than their kernel for the meta device: a twentieth of its time.
_META = "view _unsafe_view slice.Tensor split.Tensor t transpose.int expand mm addmm bmm gelu gelu_backward"
_BY_META = {
    getattr(getattr(torch.ops.aten, name), overload or "default")
    for name, _, overload in (each.partition(".") for each in _META.split())
}
_ALSO_GROUPED = (torch.float32, torch.float16)  # by torch's kernels, group by group


# How to make an output again, in a mode from the arguments of an operator; and outputs with their container.
_Again: TypeAlias = Callable[[Any, Any], Any]
_Known: TypeAlias = tuple[type | None, list[_Again]]


class QuickFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """FakeTensorMode on the CPU, in which outputs are not derived again for arguments of known shapes."""

    _known: ClassVar[dict[tuple[Any, ...], _Known | None]] = {}  # of all modes; None: to be derived each time

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # of NumPy, which become fake in their first operation
        self.cache_enabled = False  # torch's own
        self.state = dict(vars(FakeTensor(self, torch.empty(0, device="meta"), _CPU)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in LiveBytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = self._facts(func, args, kwargs)
        if known := self._known.get(facts):
            return self._again(known, args, kwargs)
        if facts and func in _BY_META and (known := self._by_meta(func, args, kwargs)):
            self._known[facts] = known
            return self._again(known, args, kwargs)
        result = self.dispatch(func, types, args, kwargs)
        if facts and facts not in self._known:
            resized = self._facts(func, args, kwargs) != facts  # such as an out= that was too small
            self._known[facts] = None if resized else self._outputs(func, args, kwargs, result)
        return result

    def recall(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `func` makes if that is known, for a mode on top of this; else NotImplemented."""
        known = self._known.get(self._facts(func, args, kwargs))
        return self._again(known, args, kwargs) if known else NotImplemented

    def _again(self, known: _Known, args: Any, kwargs: Any) -> Any:
        container, outputs = known
        given = (*args, *kwargs.values())
        made = [again(self, given) for again in outputs]
        return container(made) if container is not None else made[0]

    def _facts(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Return all that the results of `func` depend on, () where that is not known."""
        key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        where = _depends_on_place(func)
        known = self._describe(key, args, where) and self._describe(key, tuple(kwargs.items()), where)
        return tuple(key) if known else ()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Derive the outputs of an operator, of grouped products also where torch's rule takes bf16 only."""
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype in _ALSO_GROUPED:
            from torch._meta_registrations import _create_grouped_mm_output_tensor  # slow import

            left, right, offsets = (*args, None)[:3]
            contracts = left.shape[-1] == right.shape[-2] or left.dim() == right.dim() == 2
            if left.dtype != right.dtype or not contracts:
                raise RuntimeError(f"{func} of {left.dtype} {left.shape} and {right.dtype} {right.shape}")
            with self:
                return _create_grouped_mm_output_tensor(left, right, offsets, left.dtype)  # type: ignore[no-untyped-call]
        if func is torch.ops.aten.index.Tensor:  # masks of NumPy say how much they take
            indices = list[Tensor | None]()
            for each in args[1]:
                is_mask = type(each) is Tensor and each.dtype is torch.bool
                indices += each.nonzero().unbind(1) if is_mask else [each]
            args = args[0], indices
        return super().dispatch(func, types, args, kwargs)

    def _describe(self, key: list[Any], values: Sequence[Any], where: bool) -> bool:
        """Append what results depend on of `values` to `key`; return False where that is not known."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor and value.fake_mode is self and _is_ordinary(value):
                key += (value.shape, value.stride(), value.dtype, value.requires_grad)
                key += (value.is_inference(), value.fake_device)
                if where:
                    key += (value.storage_offset(), value.untyped_storage().nbytes())
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                if not self._describe(key, value, where):
                    return False
            else:
                return False
        return True

    def _by_meta(self, func: Any, args: Any, kwargs: Any) -> _Known | None:
        """Return how to make the results of `func` from those of its kernel for the meta device."""
        given = (*args, *kwargs.values())
        if any(type(each) is FakeTensor and each.fake_device != _CPU for each in given):
            return None
        with torch._C._DisableTorchDispatch():
            bare = [_bare(each) if type(each) is FakeTensor else each for each in given]
            try:
                result = func(*bare[: len(args)], **dict(zip(kwargs, bare[len(args) :], strict=True)))
            except RuntimeError:
                return None  # torch's rule raises it again, in its words
        storages = [isinstance(each, Tensor) and each.untyped_storage()._cdata for each in given]
        container = next((kind for kind in (list, tuple) if isinstance(result, kind)), None)
        outputs = list[_Again]()
        for each in result if container else [result]:
            storage = each.untyped_storage()._cdata
            viewed = storages.index(storage) if storage in storages else None
            options, shape = {"dtype": each.dtype, "device": "meta", "requires_grad": False}, each.shape
            outputs.append(partial(_fake, (shape, each.stride()), each.storage_offset(), viewed, options))
        return container, outputs

    def _outputs(self, func: Any, args: Any, kwargs: Any, result: Any) -> _Known | None:
        """Return how to make `result` again; None where its shapes do not say all of it, by torch's rules."""
        try:
            self._validate_cache_key(func, args, kwargs)
        except _BypassDispatchCache:
            return None
        container = next((kind for kind in (list, tuple) if isinstance(result, kind)), None)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        taken, everything = {each.untyped_storage()._cdata for each in given}, (*args, *kwargs.values())
        where = _depends_on_place(func)
        made = result if container else [result]
        outputs = [self._output(everything, each, taken, where) for each in made]
        return None if None in outputs else (container, outputs)  # type: ignore[return-value]

    def _output(self, args: Any, made: Any, taken: set[int], where: bool) -> _Again | None:
        """Return how to make `made` again, and add a new storage to those that are `taken`."""
        if made is None or type(made) is int:
            return lambda *_: made
        if type(made) is not FakeTensor or made.fake_device != _CPU or not _is_ordinary(made):
            return None
        storage = made.untyped_storage()
        fakes = [(place, each) for place, each in enumerate(args) if type(each) is FakeTensor]
        if same := [place for place, each in fakes if each is made]:
            return lambda _, args: args[same[0]]
        viewed = next((n for n, each in fakes if each.untyped_storage()._cdata == storage._cdata), None)
        if storage._cdata in taken and (viewed is None or not where):
            return None
        taken.add(storage._cdata)
        options = {"dtype": made.dtype, "device": "meta", "requires_grad": made.requires_grad}
        again = partial(_fake, (made.shape, made.stride()), made.storage_offset(), viewed, options)
        example = again(self, args)
        alike = torch._C._dispatch_key_set(example) == torch._C._dispatch_key_set(made)
        return again if alike and example.untyped_storage().nbytes() == storage.nbytes() else None


def _bare(tensor: Tensor) -> Tensor:
    bare, place = torch.empty(0, dtype=tensor.dtype, device="meta"), tensor.storage_offset()
    return bare.set_(tensor.untyped_storage(), place, tensor.shape, tensor.stride())


def _fake(shape: Any, offset: Any, viewed: int | None, options: Any, mode: QuickFakeMode, args: Any) -> Any:
    with torch._C._DisableTorchDispatch():
        bare = torch.empty_strided(*shape, **options)
        if viewed is not None:
            bare.set_(args[viewed].untyped_storage(), offset, *shape)
    # As FakeTensor.__new__ does, which sets each attribute by itself.
    own: Any = {"dispatch_device": True, "device_for_backend_keys": _CPU}
    fake = Tensor._make_subclass(FakeTensor, bare, bare.requires_grad, **own)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(mode.state)
    return fake


@cache
def _depends_on_place(func: Any) -> bool:
    """Return True if results of `func` may lie in the storage of an argument, whose place then counts."""
    return func.is_view or func is torch.ops.aten._unsafe_view.default


def _is_ordinary(tensor: FakeTensor) -> bool:
    strided = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return strided and tensor.constant is None
