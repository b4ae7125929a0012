"""Live tensor memory while code runs, by storage, and the composition of its peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from lib.memory.simulation import kernels_for

CUDA_GRANULARITY = 512  # bytes, of torch's caching allocator
STEPS = 2  # the first creates the optimizer's state, which is then there at the peak of the second

# Torch counts the FLOP of attention only for GPU kernels.
FLOP_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    **flop_registry,
}

_SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data.default
_DEVICE_OF = torch.ops.prim.device.default  # of a fake tensor: two of three calls in a traced step

_FLOP: dict[tuple[Any, ...], int] = {}  # of operators, by the shapes that they were given
# Operators without a kernel, beside views, and namespaces of such operators.
_WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_HOST_ONLY = ("prim", "profiler")

# parameters, gradients, optimizer, averages (of weights), frozen models, data, activations (what outlives a
# forward pass), update (temporaries of the optimizer, reported among all) and temporaries, which is all else.
Category: TypeAlias = str


# Unique number of a storage, and the bytes that it allocates (> 0) or releases (< 0). A plain tuple, because
# there are ten thousands of them: garbage collection does not look into tuples of numbers.
Event: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Trace:
    """Allocations and releases in order, and the category of each storage."""

    events: tuple[Event, ...]
    categories: Mapping[int, Category]  # of storages; "temporaries" for those not listed
    sizes: Mapping[int, int] = field(default_factory=dict)  # bytes of storages before rounding
    granularity: int = 1  # that they were rounded up to a multiple of

    def affine(self, other: Trace, steps: int, of: int) -> Trace | None:
        """Return the trace at `steps` / `of` of the way to `other`, None if events differ."""
        if len(self.events) != len(other.events) or self.categories != other.categories:
            return None
        order = [storage for storage, _ in self.events]
        if order != [storage for storage, _ in other.events] or self.sizes.keys() != other.sizes.keys():
            return None
        sizes = {
            number: size + (other.sizes[number] - size) * steps // of for number, size in self.sizes.items()
        }
        rounded = {number: _round_up(size, self.granularity) for number, size in sizes.items()}
        born = {number: place for place, number in reversed([*enumerate(order)])}
        signed = ((n, rounded[n] if born[n] == at else -rounded[n]) for at, n in enumerate(order))
        return Trace(tuple(signed), self.categories, sizes, self.granularity)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated at the peak."""
        return sum(self.at_peak().values())

    def at_peak(self, shares: Mapping[Category, float] = MappingProxyType({})) -> dict[Category, int]:
        """Return bytes by category at the moment when their sum is largest.

        shares: factor for each category's bytes; 1 for those not listed.
        """
        if not self.events:
            return {}
        factors = self._factors(shares)
        totals = list(accumulate(byte_count * factors.get(number, 1) for number, byte_count in self.events))
        sums: Counter[Category] = Counter()
        for number, byte_count in self.events[: totals.index(max(totals)) + 1]:
            sums[self.categories.get(number, "temporaries")] += byte_count
        counted = {name: round(byte_count * shares.get(name, 1)) for name, byte_count in sums.items()}
        if of_update := counted.pop("update", 0):
            counted["temporaries"] = counted.get("temporaries", 0) + of_update
        return {name: byte_count for name, byte_count in counted.items() if byte_count}

    def history(
        self, shares: Mapping[Category, float] = MappingProxyType({})
    ) -> list[tuple[int, int | None]]:
        """Return the events for `lib.memory.allocator`: bytes when allocated, None when freed."""
        factors = self._factors(shares)
        return [
            (number, round(byte_count * factors.get(number, 1)) if byte_count > 0 else None)
            for number, byte_count in self.events
        ]

    def _factors(self, shares: Mapping[Category, float]) -> dict[int, float]:
        return {number: shares[name] for number, name in self.categories.items() if name in shares}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Dispatch mode that counts every storage made by an operation until it is freed.

    granularity: sizes are rounded up to a multiple of it, as an allocator does (512 on CUDA).
    """

    def __init__(self, *, granularity: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # FLOP so far, by device, of matrix products, convolutions and attention; nothing else counts.
        self.flop_on: Counter[torch.device] = Counter()
        self.launches = 0  # operators so far that launch a kernel, on any device
        self._granularity = granularity
        self._events: list[Event] = []
        self._categories: dict[int, Category] = {}
        self._devices: dict[int, torch.device] = {}
        self._sizes: dict[int, int] = {}  # before rounding
        # By the address of the storage, which may be reused once the weak reference dies.
        self._alive: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._marks: list[int] = []
        self._adopted: int | None = None  # number of the next storage, whose allocation is counted already

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what it wraps each call in takes longer than the call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: what a compiler tries is not counted, what it makes of a model is."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF:
            return args[0].device
        kwargs = kwargs or {}
        # A simulation knows most results, and can be asked without torch's dispatcher between.
        recall = getattr(_get_current_dispatch_mode(), "recall", None)
        result = recall(func, args, kwargs) if recall else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            tensors = [result]
        else:
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        counter, launches = _work_of(func)
        if counter is not None:
            self.flop_on[tensors[0].device] += _flop(func, counter, args, kwargs, result)
        self.launches += launches
        self.add(tensors)
        if func is _SOFTMAX_BACKWARD and kernels_for(tensors[0]) == "cuda":
            self.add([args[0] * args[1]])  # a product that lives as long (ATen/native/cuda/SoftMax.cu)
        return result

    @property
    def flop(self) -> int:
        """FLOP so far on all devices."""
        return self.flop_on.total()

    def add(self, tensors: Iterable[Tensor], category: Category | None = None) -> None:
        """Count the storages of `tensors`, unless counted already, and assign them to `category`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self._alive:
                self._born(storage, address, tensor.device)
            if category is not None:
                self._categories[self._alive[address][0]] = category

    def name_the_rest(self, category: Category) -> None:
        """Assign live storages that have no category yet to `category`."""
        for number, _ in self._alive.values():
            self._categories.setdefault(number, category)

    def name_since(self, start: int, category: Category) -> None:
        """Assign storages allocated since position `start`, live or not, to `category` if they have none."""
        for number, byte_count in self._events[start:]:
            if byte_count > 0:
                self._categories.setdefault(number, category)

    def mark(self) -> int:
        """Return the number of events so far; what a trace has before and after it stays apart."""
        self._marks.append(len(self._events))
        return len(self._events)

    @property
    def position(self) -> int:
        """Number of events so far: the storages allocated from now on have at least this number."""
        return len(self._events)

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of the storage of `tensor`, which must be counted."""
        return self._alive[tensor.untyped_storage()._cdata][0]

    def kept_since(self, start: int) -> set[int] | None:
        """Return the live storages allocated since position `start`; None if an older one was released."""
        if any(number < start for number, _ in self._events[start:]):
            return None
        return {number for number, _ in self._alive.values() if number >= start}

    def repeat(
        self,
        start: int,
        stop: int,
        *,
        without: Collection[int] = (),
        released: Mapping[int, int] = MappingProxyType({}),
        replaced: Mapping[int, int] = MappingProxyType({}),
    ) -> dict[int, int]:
        """Append the events between two positions again, of new storages; return their numbers by the old.

        No storage from before `start` may be released between them. Those alive at `stop` get their tensors
        from `stand_in`.
        without: storages that are not allocated again. released: positions at which new storages are
        released, by their old numbers. replaced: positions at which old storages are released, whose live
        tensors stand for the new ones from then on.
        """
        numbers, more = dict[int, int](), dict[int, list[tuple[int, bool]]]()
        for places, is_new in ((released, True), (replaced, False)):
            for number, place in places.items():
                more.setdefault(place, []).append((number, is_new))
        for place in range(start, stop + 1):
            for number, is_new in more.get(place, ()):
                byte_count = _round_up(self._sizes[number], self._granularity)
                self._events.append((numbers[number] if is_new else number, -byte_count))
            if place == stop or (event := self._events[place])[0] in without:
                continue
            number, byte_count = event
            if number not in numbers:
                numbers[number] = new = len(self._events)
                self._devices[new], self._sizes[new] = self._devices[number], self._sizes[number]
                if (category := self._categories.get(number)) is not None and number not in released:
                    self._categories[new] = category
            self._events.append((numbers[number], byte_count))
        for address, (number, reference) in self._alive.items():
            if number in replaced:
                self._alive[address] = numbers[number], reference
        return numbers

    def stand_in(self, number: int, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that `make` makes in one operation, as the storage `number` of a repetition."""
        self._adopted = number
        try:
            return make()
        finally:
            self._adopted = None

    def trace(self, device: torch.device | None = None, *, without: int = 0) -> Trace:
        """Return what was recorded so far on `device` (None: on all).

        without: storages that were released before this position are left out.
        """
        on, gone = self._devices, {number for number, byte_count in self._events[:without] if byte_count < 0}
        events = tuple(
            event
            for event in self._ordered()
            if (device is None or on[event[0]] == device) and event[0] not in gone
        )
        sizes = {number: self._sizes[number] for number, _ in events}
        return Trace(events, dict(self._categories), sizes, self._granularity)

    def _ordered(self) -> Iterator[Event]:
        """Yield the events with releases that follow each other sorted: autocast's cache has no order."""
        run, marks = list[Event](), set(self._marks)
        for place, event in enumerate(self._events):
            if run and (event[1] >= 0 or place in marks):
                yield from sorted(run)
                run.clear()
            if event[1] < 0:
                run.append(event)
            else:
                yield event
        yield from sorted(run)

    def _born(self, storage: torch.UntypedStorage, address: int, device: torch.device) -> None:
        number = len(self._events) if self._adopted is None else self._adopted
        self._devices[number] = device
        byte_count = _round_up(storage.nbytes(), self._granularity)

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            own, _ = self._alive.pop(address)  # another since `repeat`, maybe
            self._events.append((own, -byte_count))

        self._alive[address] = number, weakref.ref(storage, died)
        if self._adopted is None:
            self._sizes[number] = storage.nbytes()
            self._events.append((number, byte_count))


def watch_gradients(model: nn.Module, live: LiveBytes) -> None:
    """Count what the parameters of `model` accumulate as gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            hook = parameter.register_post_accumulate_grad_hook
            hook(lambda p: live.add([p.grad], "gradients"))  # type: ignore[no-untyped-call]


def add_state(optimizer: torch.optim.Optimizer, live: LiveBytes) -> None:
    """Count the state of `optimizer`."""
    values = [value for of_one in optimizer.state.values() for value in of_one.values()]
    live.add([value for value in values if isinstance(value, Tensor)], "optimizer")


@cache
def _work_of(func: Any) -> tuple[Callable[..., int] | None, bool]:
    """Return the formula of the FLOP of an operator, if it has one, and True if it launches a kernel."""
    host = func.is_view or func.namespace in _HOST_ONLY or func._overloadpacket.__name__ in _WITHOUT_KERNEL
    return FLOP_FORMULAS.get(func._overloadpacket), not host


def _flop(func: Any, formula: Callable[..., int], args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOP of a call, which are remembered by shapes unless the formula reads more."""
    given = (each.shape if isinstance(each, Tensor) else str(each) for each in (*args, *kwargs.values()))
    key = (func, *kwargs, *given) if hasattr(formula, "__wrapped__") else ()
    if not key or key not in _FLOP:
        _FLOP[key] = formula(*args, **kwargs, out_val=result)
    return _FLOP[key]


def _round_up(byte_count: int, granularity: int) -> int:
    return -(-byte_count // granularity) * granularity
