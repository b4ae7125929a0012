"""A model that is too large to be tried is not said to depend on the split, nor to be independent of it."""

from __future__ import annotations

import dataclasses

from lib.plan.show import why_norm_batch
from tests.support.training import data_of, small_config
from train.stock_layers import MOST_PARAMETERS, with_trial


def test_a_model_that_is_not_tried_is_reported_so() -> None:
    config = small_config("gpt2")
    data = data_of(config)
    facts = dataclasses.replace(data.facts, parameters=int(MOST_PARAMETERS) + 1, flop_per_sample=3e12)
    untried = with_trial(config, data.dataset.spec, facts)
    why = why_norm_batch(config, untried)
    assert "independent of the micro-batch: all layers (a trial takes 4,000 GFLOP)" in why
    assert "NOTE" not in why_norm_batch(config, facts)
