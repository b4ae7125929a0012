"""What every language model keeps to: no token sees a later one, and what is learned is what comes next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.loader import Batch
from lib.data.types import TextSpec
from lib.nn.model_code import build_model
from models.gpt2 import model as gpt2
from tests.contract.cases import LANGUAGE_MODELS, golden, inputs_of, spec_of
from tests.support.tokens import BLOCK, VOCAB, small_lm_config, successor, text_data
from tests.support.training import Wrapped, small_job, small_plan, trained
from train.generate import Sampling, continue_tokens
from train.tasks.base import Forward, Sums, Task

LENGTH = 128  # CONFIG_BLOCK_SIZE by default: a mask may be sound at the few tokens of a small case alone


def language_model(name: str) -> tuple[nn.Module, TextSpec]:
    """The smallest case of `name` that predicts tokens, at the length of a run."""
    cases = [case for case in golden(name) if isinstance(spec_of(case), TextSpec)]
    case = min(cases, key=lambda case: case["parameters"])
    spec = spec_of({**case, "block_size": LENGTH})
    assert isinstance(spec, TextSpec)
    return build_model(name, case["options"], spec, seed=0), spec


def leaks(model: nn.Module, spec: TextSpec, *, dtype: torch.dtype = torch.float32) -> list[tuple[int, int]]:
    """(changed position, earlier position whose output is not the same to the bit)."""
    changes = torch.arange(1, spec.block_size)
    tokens_BT = inputs_of(spec, 1).expand(len(changes), -1)
    others_BT = tokens_BT.clone()
    others_BT[range(len(changes)), changes] += 1
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        differs_BT = (model(others_BT % spec.vocab_size) != model(tokens_BT)).any(dim=2)
    assert differs_BT[range(len(changes)), changes].all(), "a token has no effect at all"
    found = [(row + 1, position) for row, position in differs_BT.nonzero().tolist()]
    return [(changed, position) for changed, position in found if position < changed]


def gradient_leaks(model: nn.Module, spec: TextSpec) -> list[tuple[int, int]]:
    """(later position, earlier position whose output has a gradient with respect to it)."""
    embedded: list[Tensor] = []
    table = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    hook = table.register_forward_hook(lambda _, __, out: embedded.append(out) or out.retain_grad())
    logits_BTV = model(inputs_of(spec, 1))
    hook.remove()
    found = []
    for position in range(spec.block_size):
        (gradient,) = torch.autograd.grad(logits_BTV[0, position].sum(), embedded[0], retain_graph=True)
        later_T = gradient[0].any(dim=1)
        found += [(later, position) for later in range(position + 1, spec.block_size) if later_T[later]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_outputs_do_not_change_with_a_later_token(name: str, dtype: torch.dtype) -> None:
    assert leaks(*language_model(name), dtype=dtype) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_no_gradient_comes_from_a_later_token(name: str) -> None:
    assert gradient_leaks(*language_model(name)) == []


@pytest.mark.slow
def test_a_missing_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2, "causal_attention", F.scaled_dot_product_attention)
    model, spec = language_model("gpt2")
    everywhere = [(later, earlier) for later in range(1, spec.block_size) for earlier in range(later)]
    assert leaks(model, spec) == everywhere
    assert sorted(gradient_leaks(model, spec)) == everywhere


@pytest.mark.slow
def test_a_mask_that_lets_one_token_through_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(q: Tensor, k: Tensor, v: Tensor, _: Tensor | None) -> Tensor:
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    monkeypatch.setattr(gpt2, "causal_attention", lenient)
    model, spec = language_model("gpt2")
    assert (1, 0) in leaks(model, spec) and (1, 0) in gradient_leaks(model, spec)


class Misaligned(Wrapped):
    """A task whose targets are changed in training."""

    def __init__(self, task: Task, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(task)
        self.change = change

    def training(self, forward: Forward, batch: Batch) -> Sums:
        return self.task.training(forward, Batch(batch.inputs, self.change(batch.inputs, batch.targets)))


def continued(change: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """What a model that was trained on a cycle of tokens, with changed targets, says next."""
    config = small_lm_config(
        max_steps=60, optimizer="adamw", momentum=None, nesterov=False, adam_beta1=0.9, adam_beta2=0.95
    )
    config = config.replace(adam_eps=1e-8, learning_rate=0.01, weight_decay=0.0)
    job = small_job(
        config,
        small_plan(BLOCK),
        text_data(config),
        task=lambda task: Misaligned(task, change),
        dtype=torch.float32,
    )
    trained(job)
    job.model.eval()
    greedy = Sampling(temperature=0.0, top_k=0, tokens=VOCAB, seed=0)
    return continue_tokens(job.model, [0], sampling=greedy, block_size=BLOCK, device=torch.device("cpu"))


def the_cycle() -> list[int]:
    tokens = [successor(0)]
    while len(tokens) < VOCAB:
        tokens.append(successor(tokens[-1]))
    return tokens


@pytest.mark.slow
def test_what_is_learned_is_what_comes_next() -> None:
    assert continued(lambda _, targets: targets) == the_cycle()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda _, targets: targets.t().contiguous(), id="transposed"),
        pytest.param(lambda inputs, _: inputs, id="the input itself"),
        pytest.param(lambda _, targets: (5 * targets + 3) % VOCAB, id="one too far"),
    ],
)
def test_misaligned_targets_are_caught(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert continued(change) != the_cycle()
