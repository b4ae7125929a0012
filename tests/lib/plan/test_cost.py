"""Cost of a whole training: arithmetic by hand, prices and their refusal, and what is not known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lib.errors import ConfigError
from lib.plan.cost import LIST_PRICES, Cost, cost_of, format_cost, price_of
from lib.plan.gpus import CATALOGUE, gpu_of
from lib.plan.roofline import StepTime
from lib.plan.types import fixed_plan

STEP = StepTime(fastest_seconds=1.0, slowest_seconds=2.0, bound="arithmetic", reason="")
H100 = gpu_of("h100-80g")


def cost(**changes: Any) -> Cost:
    """Two H100 for 3,600 steps of 1 to 2 seconds."""
    plan = fixed_plan("given", micro_batch=8, world=2, device="cuda", precision="bf16")
    given: dict[str, Any] = {
        "total_steps": 3600,
        "total_seconds": None,
        "step": STEP,
        "step_flop": 4e14,
        "train_size": 3200,
    }
    return cost_of(plan, **{**given, "gpu": H100, "device": H100.name, **changes})


def test_hours_energy_and_money_by_hand() -> None:
    found = cost(price="2.5")
    assert found.seconds == (3600, 7200) and found.steps == (3600, 3600)
    assert found.kwh == pytest.approx((1.4, 2.8)), "2 x 700 W"
    assert found.money == pytest.approx((5.0, 10.0))
    assert found.flop_per_second == (2e14, 4e14)
    lines = list(format_cost(found, "2.5"))
    assert lines[0].startswith("Training: 1 to 2 hours, 3,600 steps, 18 epochs (estimate, without evaluation")
    assert "200 to 400 TFLOP/s on each device, 20.2 to 40.4 % of its peak of 989.4" in lines[1]
    assert lines[2] == (
        "Energy: 1.4 to 2.8 kWh, if each device draws its 700 W of board power all the time; without the host"
    )
    assert lines[3] == "Money: 5 to 10 (2 x 2.5 an hour, PRICE=2.5)"
    short = list(format_cost(cost(total_steps=1, price="list"), "list"))
    assert short[2].startswith("Energy: less than 0.001 kWh, if each")
    assert short[3].startswith("Money: less than 0.01 US dollars (2 x 4.29 an hour, list price of 2026-")
    assert not any("Money" in line for line in format_cost(cost(), "")), "off by default"


def test_a_budget_in_seconds_gives_the_time_and_estimates_the_steps() -> None:
    found = cost(total_steps=None, total_seconds=1800.0, price="1")
    assert found.seconds == (1800, 1800) and found.steps == (900, 1800) and found.money == (1, 1)
    line = next(format_cost(found, "1"))
    assert line.startswith("Training: 30 minutes, 900 to 1,800 steps, 4.5 to 9 epochs (estimate")
    assert ", 200 steps, 1 epoch (" in next(format_cost(cost(total_steps=200), ""))


def test_what_is_not_known_is_said() -> None:
    on_cpu = {"step": None, "gpu": None, "device": "some CPU"}
    unknown = cost(**on_cpu, price="2")
    assert (unknown.seconds, unknown.kwh, unknown.money) == (None, None, None)
    time, money = format_cost(unknown, "2")
    assert time == (
        "Training: 3,600 steps, 18 epochs; time and energy not estimated: "
        "some CPU is not in the catalogue of GPUs"
    )
    add = "; add GPU= to plan for a GPU, as in GPU=h100-80g"
    assert money == f"Money: not estimated, the time is not known{add}"
    budget = cost(**on_cpu, total_steps=None, total_seconds=7200.0, price="2")
    assert budget.money == (8, 8) and "2 hours; number of steps and energy not estimated" in next(
        format_cost(budget, "2")
    )
    (missing,) = [line for line in format_cost(cost(**on_cpu, price="list"), "list") if "Money" in line]
    assert missing == f"Money: not estimated, no list price for some CPU{add}"
    unpriced = dataclasses.replace(cost(), money=None, price=None)
    assert [*format_cost(unpriced, "list")][
        -1
    ] == f"Money: not estimated, no list price for {unpriced.device}"
    nameless = cost(gpu=dataclasses.replace(H100, watts=None))
    assert any(
        line.startswith("Energy: not estimated, the board power") for line in format_cost(nameless, "")
    )


@pytest.mark.parametrize(
    "text", ["0", "-1", "nan", "inf", "free", "1_000", " 2", "2 EUR", "1e999", "٣", "$(2)"]
)
def test_another_price_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a positive number in any currency"):
        price_of(text, H100)


@pytest.mark.parametrize(("text", "number"), [("2.5", 2.5), ("3", 3), (".5", 0.5), ("1e-2", 0.01), ("2.", 2)])
def test_a_positive_number_is_a_price(text: str, number: float) -> None:
    found = price_of(text, None)
    assert found is not None and found.per_hour == number and found.source == f"PRICE={text}"


def test_list_prices_are_of_the_catalogue_and_name_date_and_source() -> None:
    assert set(LIST_PRICES) < set(CATALOGUE), "some have none"
    for price in LIST_PRICES.values():
        assert 0 < price.per_hour < 20
        assert price.source.startswith("list price of 2026-") and "https://" in price.source
        assert price.currency == "US dollars"
    assert price_of("list", H100) == LIST_PRICES["h100-80g"]
    assert price_of("list", gpu_of("mi300x")) is None is price_of("", H100)


def test_board_power_is_possible() -> None:
    watts = {gpu.key: gpu.watts for gpu in CATALOGUE.values()}
    assert all(50 < each < 1500 for each in watts.values() if each is not None)
    assert watts["gh200-96g"] is watts["h100-mig-1g.10gb"] is None
