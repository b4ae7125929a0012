"""What tests remember of models is what would be found again."""

from __future__ import annotations

import pytest

from tests.support.tokens import BLOCK, cycle, small_lm_config, text_data
from train import training_data

pytestmark = pytest.mark.slow

CONFIG = small_lm_config()


def test_what_is_known_is_what_would_be_found() -> None:
    text_data(CONFIG)
    again = text_data(CONFIG.replace(learning_rate=0.25), train=cycle(9 * BLOCK + 1))
    assert again.facts == training_data.make_training_data(CONFIG, again.dataset).facts
    wider = {**CONFIG.model_options, "width": 32}
    assert text_data(CONFIG.replace(model_options=wider)).facts.parameters > again.facts.parameters


@pytest.mark.parametrize("place", ["train.training_data.converted", "models.gpt2.model.build"])
def test_what_a_test_replaces_is_simulated_anew(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text_data(CONFIG)
    calls = []

    def replaced(*_: object, **__: object) -> None:
        calls.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(place, replaced)
    with pytest.raises(KeyboardInterrupt):
        text_data(CONFIG)
    assert calls == [place]
