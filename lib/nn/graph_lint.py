"""Lint for whole-graph compilers on any device: record operations, find host syncs and changing graphs.

Compilers of whole graphs (torch.compile, CUDA graphs, lazy devices) need every step to be the same graph with
the same shapes and no host synchronization. A step that meets this on a CPU meets it elsewhere.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result the host waits for, or whose output shape depends on data.
HOST_ASKS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "allclose", "_linalg_check_errors"})
# Methods by which the host reads values; on the CPU they dispatch no operation. `numpy`, by which
# data are made on the host, is left out: on a device it is an error.
HOST_READS = frozenset({"tolist", "cpu", "__repr__"})
SHAPE_OF_NUMBERS = frozenset({"nonzero", "nonzero_numpy", "masked_select", "bincount", "repeat_interleave"})
UNIQUE = frozenset({"_unique", "_unique2", "unique_dim", "unique_consecutive"})  # their shapes, too
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


@runtime_checkable
class IteratesToConvergence(Protocol):
    """A model iterated to convergence: its steps read the test for convergence from the device."""

    settles: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LintReport:
    """steps: number of steps compared, without the skipped first ones.

    graphs: distinct graphs among them, by operations, shapes and types.
    constants: distinct graphs if Python numbers count too: a rate or a counter that is not a tensor. Some
        compilers recompile for each, others make them inputs.
    faults: host synchronizations and data-dependent shapes, with their counts.
    """

    steps: int
    operations: int
    graphs: int
    constants: int
    faults: Mapping[str, int]

    @property
    def is_static(self) -> bool:
        """True if all steps have one graph and there are no faults."""
        return self.graphs == 1 and not self.faults

    def lines(self) -> Iterator[str]:
        """Format the report, faults first."""
        yield from (f"{name}, {count} times" for name, count in sorted(self.faults.items()))
        graphs = "one graph" if self.graphs == 1 else f"{self.graphs} graphs"
        yield f"{graphs} of {self.operations} operations in {self.steps} steps"
        if self.constants > self.graphs:
            yield f"{self.constants} if numbers of Python count: keep what changes in tensors"


def lint(step: Callable[[int], object], *, steps: int = 4, skip: int = 1) -> LintReport:
    """Run step(0), step(1), ... and report on all but the first `skip`, which may initialize things."""
    seen: list[_Listener] = []
    faults: Counter[str] = Counter()
    for number in range(steps):
        listener = _Listener()
        with listener, _Reads(listener.faults):
            step(number)
        if number >= skip:
            seen.append(listener)
            faults += listener.faults
    return LintReport(
        steps=len(seen),
        operations=seen[-1].operations,
        graphs=len({one.structure.hexdigest() for one in seen}),
        constants=len({one.whole.hexdigest() for one in seen}),
        faults=dict(faults),
    )


class _Listener(TorchDispatchMode):
    """Digests of the operations of one step, with and without the constants that are part of the graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.structure, self.whole = hashlib.sha256(), hashlib.sha256()
        self.operations, self.faults = 0, Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        values = (*args, *(kwargs or {}).values())
        if name in HOST_ASKS:
            self.faults[f"{name} asks the host"] += 1
        elif name in SHAPE_OF_NUMBERS | UNIQUE or (name in INDEXED and any(map(_is_mask, values))):
            self.faults[f"{name} has a shape that numbers decide"] += 1
        constants = [value for value in tree_leaves(values) if isinstance(value, float)]
        self.operations += 1
        self.structure.update(f"{func}{_structure(values)}".encode())
        self.whole.update(f"{func}{_structure(values)}{constants}".encode())
        return func(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Function mode that counts host reads among `faults`."""

    def __init__(self, faults: Counter[str]) -> None:
        super().__init__()
        self._faults = faults

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (name := getattr(func, "__name__", "")) in HOST_READS:
            self._faults[f"{name} asks the host"] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(value: Any) -> bool:
    """Return True if `value`, the indices of an operation, contains a mask."""
    return isinstance(value, list | tuple) and any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in value
    )


def _structure(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}{value.dtype}{value.device.type}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_structure, value))}]"
    # Integers are mostly sizes or dimensions and change the graph; floats never do.
    return "number" if isinstance(value, float) else str(value)
