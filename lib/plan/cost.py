"""Estimated cost of a whole training: hours, arithmetic rate, energy and money. Pure."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lib.errors import ConfigError
from lib.plan.gpus import Gpu
from lib.plan.roofline import StepTime, peak_flop_per_second
from lib.plan.types import Plan
from lib.units import range_text, seconds_text

Range: TypeAlias = tuple[float, float]  # ends of an estimate, the lower first

LIST = "list"  # value of PRICE= for the price list
NOT_COUNTED = "without evaluation, checkpoints, compilation and start-up"
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?", re.ASCII)


class Price(NamedTuple):
    """Price of one device and hour, its source in words, and its currency as it follows a number."""

    per_hour: float
    source: str
    currency: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Estimated cost of a training on `devices` devices of a name; None for what is not known."""

    device: str
    devices: int
    steps: Range | None  # optimizer steps
    epochs: Range | None
    seconds: Range | None
    flop_per_second: Range | None  # of one device
    peak_flop_per_second: float | None
    watts: float | None  # board power of one device
    kwh: Range | None  # at that power, without the host
    price: Price | None
    money: Range | None


def cost_of(
    plan: Plan,
    step: StepTime | None,
    *,
    total_steps: int | None,
    total_seconds: float | None,
    step_flop: float,
    train_size: int,
    device: str,
    gpu: Gpu | None,
    price: str = "",
) -> Cost:
    """Return the cost of a training by `plan` with a budget of steps or of seconds (exactly one is given).

    step: None without an estimate. step_flop: of one device. train_size: samples of an epoch. device, gpu:
    its name, and its row of the catalogue, if it has one. price: value of PRICE=. Raises ConfigError for a
    wrong one.
    """
    each = None if step is None else (step.fastest_seconds, step.slowest_seconds)
    rate = None if each is None else (1 / each[1], 1 / each[0])
    seconds = _times((1, 1), total_seconds) or _times(each, total_steps)
    found, hours = price_of(price, gpu), _times(seconds, plan.layout.devices / 3600)
    steps = _times((1, 1), total_steps) or _times(rate, total_seconds)
    watts = None if gpu is None else gpu.watts
    return Cost(
        device=device,
        devices=plan.layout.devices,
        steps=steps,
        epochs=_times(steps, plan.effective_batch / train_size),
        seconds=seconds,
        flop_per_second=_times(rate, step_flop),
        peak_flop_per_second=None if gpu is None else peak_flop_per_second(gpu, precision=plan.precision),
        watts=watts,
        kwh=None if watts is None else _times(hours, watts / 1000),
        price=found,
        money=None if found is None else _times(hours, found.per_hour),
    )


def price_of(text: str, gpu: Gpu | None) -> Price | None:
    """Return the price for the value `text` of PRICE=; None for "" and for a GPU without a list price.

    Raises ConfigError for what is neither a positive number nor "list".
    """
    if text in ("", LIST):
        return LIST_PRICES.get(gpu.key) if text and gpu is not None else None
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < number < math.inf:
        why = "it is the price of one device and hour, a positive number in any currency"
        todo = "write it as in PRICE=2.5, or PRICE=list for the list prices"
        raise ConfigError(f"PRICE={text!r:.20} is no price", why=why, todo=todo)
    return Price(number, f"PRICE={text}")


def _times(pair: Range | None, factor: float | None) -> Range | None:
    return None if pair is None or factor is None else (pair[0] * factor, pair[1] * factor)


def format_training(cost: Cost) -> str:
    """Format the time of the training and its steps, those that are known."""
    time = "" if cost.seconds is None else seconds_text(*cost.seconds)
    steps = "" if cost.steps is None else f"{range_text(*cost.steps, whole=True)} steps"
    return ", ".join(filter(None, (time, steps)))


def format_cost(cost: Cost, price: str) -> Iterator[str]:
    """Yield the lines about time, arithmetic rate, energy, and money for the value `price` of PRICE=."""
    rate, peak, known = cost.flop_per_second, cost.peak_flop_per_second, format_training(cost)
    if cost.epochs is not None:
        count = range_text(*cost.epochs)
        known += f", {count} {'epoch' if count == '1' else 'epochs'}"
    if rate is None or peak is None:
        unknown = "time" if cost.seconds is None else "number of steps"
        why = f"{cost.device} is not in the catalogue of GPUs"
        yield f"Training: {known}; {unknown} and energy not estimated: {why}"
    else:
        yield f"Training: {known} (estimate, {NOT_COUNTED})"
        percent, of = range_text(100 * rate[0] / peak, 100 * rate[1] / peak), f"{peak / 1e12:.4g} TFLOP/s"
        rates = range_text(rate[0] / 1e12, rate[1] / 1e12)
        yield f"That is {rates} TFLOP/s on each device, {percent} % of its peak of {of}"
        power = f"if each device draws its {cost.watts} W of board power all the time; without the host"
        unknown = f"not estimated, the board power of {cost.device} is not known"
        yield f"Energy: {f'{range_text(*cost.kwh)} kWh, {power}' if cost.kwh else unknown}"
    if cost.money is not None and cost.price is not None:
        each = f"{cost.devices} x {cost.price.per_hour:g} an hour, {cost.price.source}"
        yield f"Money: {money_text(cost)} ({each})"
    elif price:
        why = f"no list price for {cost.device}" if cost.price is None else "the time is not known"
        add = "" if cost.peak_flop_per_second else "; add GPU= to plan for a GPU, as in GPU=h100-80g"
        yield f"Money: not estimated, {why}{add}"


def money_text(cost: Cost) -> str:
    """Format the known price of a training, with its currency."""
    assert cost.money is not None and cost.price is not None
    return f"{range_text(*cost.money, least=0.01)} {cost.price.currency}".rstrip()


_DATA = tomllib.loads(Path(__file__).with_name("prices.toml").read_text(encoding="utf-8"))
LIST_PRICES = {
    key: Price(dollars, f"list price of {offer['date']}, {offer['source']}", "US dollars")
    for offer in _DATA["offers"].values()
    for key, dollars in offer["dollars"].items()
}
