"""Parts of a training step that torch.compile compiles, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from lib.plan.types import ITERATED, CompilePart, ConfigView, Decision, Kind, ModelFacts
from lib.units import counted, some_of

# Rules of an update, by CONFIG_OPTIMIZER, that are compiled; others have a fused kernel in torch.
_RULES = {"muon": "Muon's update of matrices", "adam_atan2": "Adam-atan2's update"}

BLOCKS_IGNORED = "NOTE: CONFIG_COMPILE_BLOCKS=y has no effect"
ACCUMULATES = "gradients are accumulated over micro-batches"  # each replay would overwrite them


def choose_parts(config: ConfigView, facts: ModelFacts) -> Decision[tuple[CompilePart, ...]]:
    """Choose what of a compiled step is compiled, beside the model."""
    by_block, why_blocks = _blocks(config, facts)
    with_loss, why_loss = (False, "") if by_block else _loss(facts)
    with_update, why_update = _update(config)
    chosen: dict[CompilePart, bool] = {
        "blocks": by_block,
        "model": not by_block,
        "loss": with_loss,
        "update": with_update,
    }
    reason = "; ".join(filter(None, (why_blocks, why_loss, why_update)))
    return Decision(tuple(part for part, yes in chosen.items() if yes), reason)


def choose_graphs(
    config: ConfigView,
    facts: ModelFacts,
    parts: Sequence[CompilePart],
    *,
    device: Kind,
    world: int,
    accumulation: int,
) -> Decision[bool]:
    """Choose whether the model and its loss run as CUDA graphs, which replay kernels on the same addresses.

    A replay overwrites what the one before returned, such as gradients that are still accumulated.
    """
    if not config.compilation.cuda_graphs:
        return Decision(False, "CONFIG_CUDA_GRAPHS=n")
    obstacles = {
        "they are for NVIDIA GPUs only": device != "cuda",
        "nothing is compiled": not parts,
        "gradients are averaged over devices": world > 1,
        ACCUMULATES: accumulation > 1,
        "the loss is not compiled with the model": "loss" not in parts,
        f"random numbers may be drawn by {some_of(facts.inexact)}": bool(facts.inexact),
        "activations are offloaded": config.activation_offload,
    }
    why = next((name for name, is_there in obstacles.items() if is_there), "")
    if why:
        return Decision(False, f"NOTE: CONFIG_CUDA_GRAPHS=y has no effect: {why}")
    unknown = "not run on a GPU; memory and times are planned without them"
    return Decision(True, f"set by hand; EXPERIMENTAL: {unknown}")


def _blocks(config: ConfigView, facts: ModelFacts) -> tuple[bool, str]:
    """Return whether blocks are compiled instead of the whole model. Kinds are by the shapes of weights."""
    if not config.compilation.compile_blocks:
        return False, ""
    blocks = (facts.units or ())[1:]
    count, kinds = len(blocks), len(set(blocks))
    if facts.loss_apart == ITERATED or count == kinds:
        why = ITERATED if facts.loss_apart == ITERATED else "the model has no equal blocks"
        return False, f"{BLOCKS_IGNORED}: {why}"
    which = f"{count} blocks of {counted(kinds, 'kind')}, equal ones once"
    return True, f"CONFIG_COMPILE_BLOCKS=y: {which}; not the loss and what is between"


def _loss(facts: ModelFacts) -> tuple[bool, str]:
    if facts.loss_apart == "":
        return True, "model and loss are one graph: the task's loss depends on model and batch alone"
    return False, f"without the loss: {facts.loss_apart or 'nothing is known of the task'}"


def _update(config: ConfigView) -> tuple[bool, str]:
    rule = "the update of Adam in 8 bits" if config.adam_8bit else _RULES.get(config.optimizer)
    if rule is not None:
        return True, f"{rule} is compiled: torch has no fused kernel for it"
    known = "torch has a fused kernel for it" if config.optimizer else "nothing is known of the optimizer"
    return False, f"without the update: {known}"
