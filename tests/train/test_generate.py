"""Sampling: what is drawn follows from the logits, the seed and the options, and from nothing else."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.optim.ema import Ema
from tests.support.tokens import BLOCK, VOCAB, oracle, small_lm_config, successor, text_data
from tests.support.training import small_job, small_plan
from train.generate import Sampling, continue_tokens, continued_text

CPU = torch.device("cpu")


def drawn(logits: list[float], *, tokens: int = 2000, **options: float) -> dict[int, float]:
    """Share of each token where all positions promise `logits`."""
    settings = {"temperature": 1.0, "top_k": 0, "seed": 0} | options
    sampling = Sampling(tokens=tokens, **settings)  # type: ignore[arg-type]

    def forward(tokens_1T: Tensor) -> Tensor:
        return torch.tensor(logits).expand(1, tokens_1T.shape[1], -1)

    added = continue_tokens(forward, [0], sampling=sampling, block_size=4, device=CPU)
    return {token: count / tokens for token, count in collections.Counter(added).items()}


def chances(logits: list[float], temperature: float = 1.0) -> list[float]:
    return (torch.tensor(logits) / temperature).softmax(0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_are_those_of_the_softmax(temperature: float) -> None:
    logits = [0.0, 1.0, -1.0, 2.0]
    shares = drawn(logits, temperature=temperature)
    for token, chance in enumerate(chances(logits, temperature)):
        assert shares.get(token, 0) == pytest.approx(chance, abs=0.05)


def test_no_temperature_takes_the_likeliest() -> None:
    assert drawn([0.0, 1.0, 1.1, -5.0], temperature=0.0) == {2: 1.0}


@pytest.mark.slow
def test_top_k_draws_among_the_likeliest() -> None:
    shares = drawn([0.0, 1.0, -1.0, 2.0], top_k=2)
    assert set(shares) == {1, 3} and shares[3] == pytest.approx(chances([1.0, 2.0])[1], abs=0.05)
    assert set(drawn([0.0, 0.0], top_k=50)) == {0, 1}


def test_the_seed_alone_decides() -> None:
    def text(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, top_k=0, tokens=30, seed=seed)
        uniform = torch.zeros(1, 1, VOCAB)
        return continue_tokens(lambda _: uniform, [1], sampling=sampling, block_size=4, device=CPU)

    torch.manual_seed(0)
    first = text(1)
    state = torch.get_rng_state()
    assert text(1) == first != text(2)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was moved"


def test_the_last_tokens_are_seen_and_no_more_than_the_model_takes() -> None:
    seen: list[list[int]] = []

    def forward(tokens_1T: Tensor) -> Tensor:
        seen.extend(tokens_1T.tolist())
        return oracle(tokens_1T)

    greedy = Sampling(temperature=0.0, top_k=0, tokens=3, seed=0)
    added = continue_tokens(forward, [7, 2, 0], sampling=greedy, block_size=3, device=CPU)
    one, two, three = successor(0), successor(successor(0)), successor(successor(successor(0)))
    assert added == [one, two, three]
    assert seen == [[7, 2, 0], [2, 0, one], [0, one, two]]


class Letters:
    """Token n is the n-th letter."""

    name, unit, vocab_size = "letters", "char", VOCAB

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def test_rows_without_a_token_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_lm_config()
    job = small_job(config, small_plan(2), text_data(config))
    greedy = Sampling(temperature=0.0, top_k=0, tokens=BLOCK, seed=0)
    expected = continued_text(job, Letters(), [3, 1], sampling=greedy)  # type: ignore[arg-type]
    own = job.model.forward
    wider = lambda tokens: F.pad(own(tokens), (0, 8), value=99.0)  # noqa: E731
    monkeypatch.setattr(job.model, "forward", wider)
    assert continued_text(job, Letters(), [3, 1], sampling=greedy) == expected  # type: ignore[arg-type]


def test_a_job_speaks_with_the_weights_that_it_evaluates() -> None:
    config = small_lm_config()
    job = small_job(config, small_plan(2), text_data(config))
    greedy = Sampling(temperature=0.0, top_k=0, tokens=BLOCK, seed=0)

    def text() -> str:
        return continued_text(job, Letters(), [3, 1], sampling=greedy)  # type: ignore[arg-type]

    plain = text()
    assert plain.startswith("db") and len(plain) == 2 + BLOCK
    job.ema = Ema(job.model, decay=0.5)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.copy_(torch.randn_like(parameter, generator=None))
    assert text() == plain
    job.ema = None
    assert text() != plain and job.model.training
