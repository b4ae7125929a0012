"""How long a run is, in whichever unit was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from lib.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Exactly one of the two limits is set."""

    total_steps: int | None
    total_seconds: float | None

    def fraction(self, *, step: float, seconds: float) -> float:
        """Share of the budget that is spent after `step` steps, perhaps half a one, in [0, 1]."""
        if self.total_steps is not None:
            return min(1.0, step / self.total_steps)
        assert self.total_seconds is not None
        return min(1.0, seconds / self.total_seconds)

    def spent(self, *, step: int, seconds: float) -> bool:
        """Whether a run that has made `step` steps in `seconds` of training is over."""
        if self.total_steps is not None:
            return step >= self.total_steps
        assert self.total_seconds is not None
        return step > 0 and seconds >= self.total_seconds


def budget_of(config: Config, *, train_size: int, effective_batch: int) -> Budget:
    """Epochs become the nearest whole number of optimizer steps, at least one."""
    if config.budget == "seconds":
        assert config.max_seconds is not None
        return Budget(total_steps=None, total_seconds=float(config.max_seconds))
    if config.budget == "steps":
        return Budget(total_steps=config.max_steps, total_seconds=None)
    assert config.num_epochs is not None
    steps = round(config.num_epochs * train_size / effective_batch)
    return Budget(total_steps=max(1, steps), total_seconds=None)
