"""Parts of a training step that torch.compile compiles, each with its reason."""

from __future__ import annotations

from lib.plan.types import CompilePart, ConfigView, Decision, ModelFacts

# Rules of an update, by CONFIG_OPTIMIZER, that are compiled; others have a fused kernel in torch.
_RULES = {"muon": "Muon's update of matrices", "adam_atan2": "Adam-atan2's update"}


def choose_parts(config: ConfigView, facts: ModelFacts) -> Decision[tuple[CompilePart, ...]]:
    """Choose what of a compiled step is compiled, beside the model."""
    with_loss, why_loss = _loss(facts)
    with_update, why_update = _update(config)
    chosen: dict[CompilePart, bool] = {"model": True, "loss": with_loss, "update": with_update}
    return Decision(tuple(part for part, yes in chosen.items() if yes), f"{why_loss}; {why_update}")


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
