"""The identity of a run: 8 hexadecimal digits in its name that say what is trained.

An interrupted run is found again by it, and what a sweep has trained already. Until 0.1.0 it was a hash of
every symbol of the tree, those of other models too; runs with such a name are still known by the values that
they store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

from lib.errors import ToolkitError
from lib.kconf import Resolved, Value, values_from_json
from lib.runs.directory import RunDir

# Symbols that change no number of a training run: where, on how many devices and how often it is launched,
# how its data are fetched, what is logged and kept; and groups of such symbols.
_NOT_OF_TRAINING = {
    "NUM_DEVICES",
    "DIST_NNODES",
    "DIST_ENDPOINT",
    "DIST_MAX_RESTARTS",
    "TABLE_SCALE",
    "DATA_DOWNLOAD",
    "DATA_PLACEMENT",
    "NUM_WORKERS",
    "PREFETCH",
    "AUGMENT_AHEAD",
    "OOM_RETRY",
    "LOG_INTERVAL_STEPS",
    "CHECKPOINT_INTERVAL_STEPS",
    "CHECKPOINT_SECONDS",
    "CHECKPOINT_ASYNC",
    "CHECKPOINT_URL",
    "KEEP_LAST",
    "KEEP_BEST",
    "RESUME",
}
_GROUPS = ("SLURM_", "SINK_")
# What identities left out until 0.1.0, when they were made of every symbol of the tree, by beginnings.
_NOT_OF_TRAINING_FORMERLY = (
    "NUM_DEVICES",
    "DIST_NNODES",
    "DIST_ENDPOINT",
    "DIST_MAX_RESTARTS",
    "CHECKPOINT_URL",
    *_GROUPS,
)


def identity(in_effect: Mapping[str, Value]) -> str:
    """8 hexadecimal digits that are the same for the same training, however it was configured.

    in_effect: of a `lib.kconf.Resolved`; so neither another model or data set nor a new option at its neutral
    value changes the identity. What changes no number of a run is left out, for it may change on the way.
    """
    return _digest(_of_training(in_effect))


def is_identity(known: str, resolved: Resolved, *, stored: Callable[[], Mapping[str, Value] | None]) -> bool:
    """Whether a run of the identity `known` trains what `resolved` says.

    stored: the values of every symbol as the run stored them, None where it has none. They are asked for only
    where `known` may come from a tree that hashed all of them, and must have that hash.
    """
    if known == identity(resolved.in_effect):
        return True
    values = stored()
    if values is None or known != former_identity(values):
        return False
    wanted = _of_training(resolved.in_effect)
    removed = [value for name, value in values.items() if name not in resolved.values]
    return not any(removed) and all(name in values and values[name] == wanted[name] for name in wanted)


def former_identity(values: Mapping[str, Value]) -> str:
    """The identity of a run up to 0.1.0, of the values of every symbol that its tree had."""
    kept = {name: value for name, value in values.items() if not name.startswith(_NOT_OF_TRAINING_FORMERLY)}
    return _digest(kept)


def _of_training(values: Mapping[str, Value]) -> dict[str, Value]:
    return {
        name: value
        for name, value in values.items()
        if name not in _NOT_OF_TRAINING and not name.startswith(_GROUPS)
    }


def _digest(values: Mapping[str, Value]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def trains(run: RunDir, resolved: Resolved) -> bool:
    """Whether `run` is one of that configuration."""
    return bool(run.identity) and is_identity(run.identity, resolved, stored=lambda: _values(run))


def has_former_identity(run: RunDir) -> bool:
    """Whether an older tree named `run`, by the values of every symbol that it had."""
    values = _values(run)
    return values is not None and run.identity == former_identity(values)


def _values(run: RunDir) -> dict[str, Value] | None:
    try:
        return values_from_json(run.read_json("values"))
    except ToolkitError:
        return None  # without them it can only be known by a name of today
