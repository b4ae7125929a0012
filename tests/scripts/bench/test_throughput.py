"""Models that the bare loop of `make bench` cannot train."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.plugins import MODELS, task_of
from scripts.bench import throughput
from tests.support.configs import make_config

NOT_BY_HAND = [name for name in MODELS.names() if task_of(name) not in throughput.BY_HAND]


@pytest.mark.parametrize("name", NOT_BY_HAND)
def test_a_model_with_steps_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"make bench has no loop by hand for {name}"):
        throughput.plain_case(Path(), None, make_config(name))  # type: ignore[arg-type]
