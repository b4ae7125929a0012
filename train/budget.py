"""Training budget in epochs, steps or seconds."""

from __future__ import annotations

from dataclasses import dataclass

from lib.config import Config
from lib.errors import ConfigError
from lib.optim.lr_schedule import warmup_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Budget of a run; exactly one of the two limits is set."""

    total_steps: int | None
    total_seconds: float | None

    def fraction(self, *, step: float, seconds: float) -> float:
        """Return the share of the budget spent after `step` steps (may be fractional), in [0, 1]."""
        if self.total_steps is not None:
            return min(1.0, step / self.total_steps)
        assert self.total_seconds is not None
        return min(1.0, seconds / self.total_seconds)

    def spent(self, *, step: int, seconds: float) -> bool:
        """Return True if a run that has made `step` steps in `seconds` of training is over."""
        if self.total_steps is not None:
            return step >= self.total_steps
        assert self.total_seconds is not None
        return step > 0 and seconds >= self.total_seconds


def budget_of(config: Config, *, train_size: int, effective_batch: int) -> Budget:
    """Return the budget; epochs become the nearest whole number of optimizer steps, at least one."""
    if config.budget == "seconds":
        assert config.max_seconds is not None
        return Budget(total_steps=None, total_seconds=float(config.max_seconds))
    if config.budget == "steps":
        return Budget(total_steps=config.max_steps, total_seconds=None)
    assert config.num_epochs is not None
    steps = round(config.num_epochs * train_size / effective_batch)
    return Budget(total_steps=max(1, steps), total_seconds=None)


def warm_up_of(config: Config, budget: Budget, *, effective_batch: int) -> float:
    """Return the share of `budget` that is warmup; 1 or more if the run ends before."""
    return warmup_fraction(
        config.lr_schedule.warmup_unit,
        _amount(config),
        total_steps=budget.total_steps,
        effective_batch=effective_batch,
    )


def warm_up_text(config: Config, *, train_size: int, effective_batch: int) -> str:
    """Format the length of warmup, in steps unless the budget is in seconds; "" for none.

    Raises ConfigError if the run ends before the learning rate reaches its peak.
    """
    budget = budget_of(config, train_size=train_size, effective_batch=effective_batch)
    share, amount = warm_up_of(config, budget, effective_batch=effective_batch), _amount(config)
    total, unit = (budget.total_steps, "steps") if budget.total_steps else (budget.total_seconds, "seconds")
    assert total is not None
    risen = f"{share * total:,.1f}".removesuffix(".0")
    given = {
        "percent": f", {amount} % of the budget",
        "steps": "",
        "samples": f", {amount:,} samples in batches of {effective_batch:,}",
    }
    length = f"{risen} of {total:,.0f} {unit}{given[config.lr_schedule.warmup_unit]}"
    if share >= 1:
        raise ConfigError(
            f"CONFIG_WARMUP_{config.lr_schedule.warmup_unit.upper()}={amount} is a warm-up of {length}",
            why="the run ends before the learning rate reaches its peak",
            todo="lower it, or make the run longer",
        )
    if amount and config.budget == "seconds" and config.lr_schedule.warmup_start_ratio == 0:
        raise ConfigError(
            "CONFIG_WARMUP_START_RATIO=0 cannot be used with a budget of seconds",
            why="the first step would have a learning rate of 0",
            todo="set it above 0, or give the budget in steps or epochs",
        )
    return f"Warm-up: {length}" if amount else ""


def _amount(config: Config) -> int:
    """The length of warmup, in its unit."""
    amounts = {
        "percent": config.lr_schedule.warmup_pct,
        "steps": config.lr_schedule.warmup_steps,
        "samples": config.lr_schedule.warmup_samples,
    }
    amount = amounts[config.lr_schedule.warmup_unit]
    assert amount is not None, f"no warmup in {config.lr_schedule.warmup_unit}"
    return amount
