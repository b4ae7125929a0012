"""The Tiny Recursive Model against the same in plain loops, and against its published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.data.datasets.sudoku.spec import PuzzleSpec
from lib.data.loader import Batch
from lib.errors import ConfigError
from lib.nn.cross_entropy import stablemax_cross_entropy
from lib.nn.model_code import build_model
from models.trm.model import TinyRecursiveModel, rms_norm, truncated_normal_
from tests.models.trm import reference
from tests.models.trm.puzzles import SPEC
from train.tasks.recursive.task import Recursive

GOLDEN = json.loads((Path(__file__).resolve().parents[2] / "golden" / "trm_losses.json").read_text())
SUDOKU = PuzzleSpec(name="sudoku", side=9, synthetic=False)
PAPER = {
    "mixer": "mlp",
    "size": "paper",
    "width": 512,
    "heads": 8,
    "layers": 2,
    "h_cycles": 3,
    "l_cycles": 6,
    "expansion": 4.0,
    "multiple": 256,
    "puzzle_tokens": 16,
}
SMALL = PAPER | {
    "width": reference.WIDTH,
    "heads": reference.HEADS,
    "h_cycles": reference.H_CYCLES,
    "l_cycles": reference.L_CYCLES,
    "multiple": reference.MULTIPLE,
    "puzzle_tokens": reference.PUZZLE_TOKENS,
}
MIXERS = ("mlp", "attention")


def built(options: dict[str, Any], spec: PuzzleSpec = SPEC) -> TinyRecursiveModel:
    model = build_model("trm", options, spec, seed=0)
    assert isinstance(model, TinyRecursiveModel)
    return model


def of_reference(mixer: str) -> TinyRecursiveModel:
    """The toolkit's model with the reference's weights, in double precision."""
    model = built(SMALL | {"mixer": mixer}).double()
    shapes, weights = reference.shapes(mixer), reference.weights_of(mixer)
    state = {name: torch.tensor(weights[name], dtype=torch.float64).view(shapes[name]) for name in shapes}
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [({}, 5_028_866), ({"mixer": "attention"}, 6_828_034), ({"layers": 4}, 10_045_442)],
)
def test_sizes_are_the_published_ones_besides_the_puzzle_embedding(
    changes: dict[str, Any], parameters: int
) -> None:
    with torch.device("meta"):
        model = built(PAPER | changes, SUDOKU)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sizes.pop("puzzle") == 512
    assert sum(sizes.values()) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_reference_still_gives_the_golden_losses(mixer: str) -> None:
    weights = reference.weights_of(mixer)
    found = reference.losses(reference.Reference(mixer, weights, weights, reference.as_single), steps=4)
    assert found == pytest.approx(GOLDEN[mixer], rel=1e-14)


@pytest.mark.parametrize("mixer", MIXERS)
def test_losses_are_the_golden_ones(mixer: str) -> None:
    """Four supervision steps; at the fourth every row has a new sample."""
    assert supervised(of_reference(mixer), steps=4) == pytest.approx(GOLDEN[mixer], rel=1e-12)


def supervised(model: TinyRecursiveModel, *, steps: int) -> list[float]:
    task = Recursive(seed=0, max_steps=reference.MOST_STEPS, exploration=0.0, eval_steps=1)
    inputs, targets = (torch.tensor(part) for part in reference.puzzles())
    result = []
    for step in range(steps):
        rows = slice(4 * step, 4 * step + 4)
        task.carry.seek(step=step, first=0, offset=0, count=4, rows=4)
        result.append(float(task.training(model, Batch(inputs[rows], targets[rows])).loss.detach()))
        task.carry.commit()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_are_those_of_the_last_cycle(mixer: str) -> None:
    """By finite differences of the reference, all of whose earlier cycles keep the old weights."""
    model = of_reference(mixer)
    inputs, targets = (torch.tensor(part[:1]) for part in reference.puzzles())
    task = Recursive(seed=0, max_steps=4, exploration=0.0, eval_steps=1)
    task.carry.seek(step=0, first=0, offset=0, count=1, rows=1)
    task.training(model, Batch(inputs, targets)).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    first = {"mlp": "blocks.0.mixer.gate_up.weight", "attention": "blocks.0.mixer.qkv.weight"}[mixer]
    for name in (first, "puzzle", "token.weight", "head.weight", "halt.bias"):
        gradient = gradients[name]
        assert gradient is not None
        row, column = divmod(int(gradient.abs().argmax()), gradient.shape[-1])
        slopes = []
        for shift in (1e-5, -1e-5):
            weights = reference.weights_of(mixer)
            weights[name][row][column] += shift
            changed = reference.Reference(mixer, weights, reference.weights_of(mixer), reference.as_single)
            slopes.append(reference.losses(changed, steps=1, rows=1)[0])
        expected = gradient.view(-1, gradient.shape[-1])[row, column].item()
        assert (slopes[0] - slopes[1]) / 2e-5 == pytest.approx(expected, rel=1e-6)


def test_stablemax_in_single_and_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 11) * 5
    targets = torch.arange(50) % 11
    logits[0] = torch.tensor([1.0, 0.0, -1.0] + [1.0] * 8)  # where a careless formula divides by zero
    single, double = (logits.clone().requires_grad_() for _ in range(2))
    losses = [stablemax_cross_entropy(double, targets)]
    monkeypatch.setattr("lib.nn.cross_entropy.WITHOUT_DOUBLE", ("cpu",))
    losses.insert(0, stablemax_cross_entropy(single, targets))
    assert [part.dtype for part in losses] == [torch.float32, torch.float64]
    for part in losses:
        part.sum().backward()
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-6, atol=1e-6)
    assert single.grad is not None and double.grad is not None and single.grad.isfinite().all()
    torch.testing.assert_close(single.grad, double.grad, rtol=1e-5, atol=1e-7)
    ignored = stablemax_cross_entropy(logits, torch.full((50,), -100))
    assert not ignored.any()


def test_weights_start_with_the_deviation_of_lecun_and_are_cut_at_two_of_it() -> None:
    weights = truncated_normal_(torch.empty(200_000), std=0.5)
    assert weights.std().item() == pytest.approx(0.5, rel=0.01)
    assert weights.abs().max().item() <= 2 * 0.5 / 0.8796 + 1e-3
    model = built(PAPER | {"layers": 1}, SUDOKU)
    assert model.blocks[0].get_parameter("network.down.weight").std().item() == pytest.approx(
        1536**-0.5, rel=0.01
    )
    assert model.token.weight.std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert model.halt.bias.tolist() == [-5.0, -5.0] and not model.halt.weight.any()
    assert model.puzzle is not None and not model.puzzle.any()


def test_initial_loss_is_that_of_a_model_that_knows_nothing() -> None:
    model = built(SMALL | {"width": 64, "multiple": 32})
    loss = supervised(model, steps=1)[0] / 4
    assert loss == pytest.approx(torch.tensor(6.0).log().item() + 0.5 * 0.0067, rel=0.2)


def test_autocast_does_not_lose_gradients_to_the_cycles_without() -> None:
    model = built(SMALL)
    inputs, targets = (torch.tensor(part[:2]) for part in reference.puzzles())

    def gradients(half: bool) -> dict[str, Tensor]:
        model.zero_grad()
        task = Recursive(seed=0, max_steps=4, exploration=0.0, eval_steps=1)
        task.carry.seek(step=0, first=0, offset=0, count=2, rows=2)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            sums = task.training(model, Batch(inputs, targets))
        sums.loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    single, half = gradients(False), gradients(True)
    assert single.keys() == half.keys() == dict(model.named_parameters()).keys()
    for name, gradient in single.items():
        if gradient.norm() > 1e-3:
            assert (half[name] - gradient).norm() < 0.6 * gradient.norm(), name


def test_rms_norm_is_found_in_single_precision() -> None:
    x = torch.full((1, 512), 300.0, dtype=torch.float16)  # whose squares half precision cannot hold
    assert torch.equal(rms_norm(x), torch.ones_like(x))


def test_a_width_that_cannot_be_cut_into_heads_is_told() -> None:
    with pytest.raises(ConfigError, match="WIDTH=8 cannot be cut into 3 heads"):
        built(SMALL | {"mixer": "attention", "heads": 3})


def test_fresh_rows_start_again_and_the_others_go_on() -> None:
    model = built(SMALL)
    tokens = torch.tensor(reference.puzzles()[0][:2])
    first = model(tokens)
    second = model(tokens, first.y_BTD, first.z_BTD, torch.tensor([True, False]))
    on = model(tokens, first.y_BTD, first.z_BTD, torch.tensor([False, False]))
    torch.testing.assert_close(second.logits[0], first.logits[0])
    torch.testing.assert_close(second.logits[1], on.logits[1])
    assert not torch.allclose(on.logits[0], first.logits[0])
    assert not first.y_BTD.requires_grad and not first.z_BTD.requires_grad
