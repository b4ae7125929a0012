"""States at rest: where they are, what they cost, and that each is its own."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.errors import ConfigError
from lib.memory.live import LiveBytes
from lib.optim.factory import make_optimizer
from models.looped.blocks import MAX_GAIN, MIN_GAIN, EnergyBlock, EnergyForm, largest_singular_value
from models.looped.solver import AndersonMixer, SolverOptions, relative_residual, solve
from tests.models.looped.small import (
    IMAGES,
    TEXT,
    TEXTS,
    batch,
    energy,
    estimated,
    gradient,
    looped,
    relative_error,
)


def source_of(model: Any, inputs: Tensor) -> Tensor:
    return 2.0 * model.embedding(inputs).detach()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("mlp", ["relu", "tanh"])
@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("step_size", [1.0, 0.9])
def test_the_energy_never_rises_with_keys_from_the_input(mlp: str, scale: float, step_size: float) -> None:
    block: EnergyBlock = looped(mlp=mlp, spectral_cap=1000.0).double().blocks[0].block  # type: ignore[assignment, union-attr]
    torch.manual_seed(3)
    with torch.no_grad():
        for matrix in (block.query, block.key, block.units):
            matrix.normal_(std=scale / matrix.shape[1] ** 0.5)
    x, state = torch.randn(4, 5, 8, dtype=torch.float64), torch.randn(4, 5, 8, dtype=torch.float64)
    source = block.source(x, None)
    energies = []
    with torch.no_grad():
        for _ in range(40):
            energies.append(energy(block.form, block.weights, state, source))
            state = torch.lerp(state, block.step(state, source), step_size)
    falls = torch.stack(energies).diff(dim=0)
    assert falls.max() <= 1e-11 and falls[0].max() < -1e-3


def test_rest_is_where_the_energy_is_level() -> None:
    for block in ("energy_cross", "energy_self"):
        model = looped(block=block, step_size=0.9, tolerance=1e-14, max_iterations=400).double()
        rest = model.blocks[0]
        x = source_of(model, batch()[0])
        with torch.no_grad():
            rest(x, None)
        state = rest.solution.state.requires_grad_()
        level_of = energy(rest.block.form, rest.block.weights, state, rest.block.source(x, None))
        (level,) = torch.autograd.grad(level_of.sum(), state)
        assert level.abs().max() <= 1e-11
        (uneven,) = torch.autograd.grad(
            energy(rest.block.form, rest.block.weights, state + 0.1, rest.block.source(x, None)).sum(), state
        )
        moved = state.detach() + 0.1 * torch.randn_like(state)
        moved.requires_grad_()
        level_of = energy(rest.block.form, rest.block.weights, moved, rest.block.source(x, None))
        (uneven,) = torch.autograd.grad(level_of.sum(), moved)
        assert uneven.abs().max() > 1e-3


@pytest.mark.parametrize("block", ["energy_self", "plain"])
def test_the_jacobian_of_an_energy_is_symmetric(block: str) -> None:
    """d2Phi/dg2, that is; with respect to the state it is not, and of the plain block neither is."""
    rest = looped(block=block).double().blocks[0]
    x = torch.randn(1, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    source = rest.block.source(x, None)

    def field(g: Tensor) -> Tensor:
        flat = g.view(1, 3, 8)
        if isinstance(rest.block, EnergyBlock):
            return rest.block.form.slope(rest.block.weights, flat, source).flatten()
        return rest.block.step(flat, source).flatten()

    jacobian: Tensor = torch.autograd.functional.jacobian(field, x.flatten())  # type: ignore[assignment]
    asymmetry = float((jacobian - jacobian.t()).norm() / (jacobian + jacobian.t()).norm())
    assert asymmetry <= 1e-14 if block == "energy_self" else asymmetry > 0.03


@pytest.mark.parametrize(
    "form",
    [{}, {"block": "energy_self"}, {"block": "plain"}, {"block": "energy_self", "solver": "anderson"}],
    ids=["cross", "self", "plain", "anderson"],
)
def test_a_state_does_not_depend_on_its_company(form: dict[str, Any]) -> None:
    model = looped(**form, step_size=0.9).double()
    inputs, _ = batch(rows=4)
    inputs[2] *= 30  # settles at another pace
    with torch.no_grad():
        together = model(inputs)
        paces = model.solutions()[0].iterations.amax(dim=1)
        alone = torch.cat([model(row[None]) for row in inputs])
    assert len(set(paces.tolist())) > 1
    assert relative_error(together, alone) <= 1e-13


@pytest.mark.parametrize("form", [{}, {"block": "plain", "gradient": "implicit", "step_size": 0.9},
                                  {"block": "plain", "gradient": "implicit", "solver": "anderson"}],
                         ids=["cross", "plain", "anderson"])  # fmt: skip
def test_no_token_sees_a_later_one(form: dict[str, Any]) -> None:
    model = looped(spec=TEXT, **TEXTS | form)
    tokens, _ = batch(TEXT)
    with torch.no_grad():
        before = model(tokens)
        for changed in range(1, TEXT.block_size):
            others = tokens.clone()
            others[:, changed] = (others[:, changed] + 1) % TEXT.vocab_size
            after = model(others)
            assert torch.equal(after[:, :changed], before[:, :changed])
            assert not torch.equal(after[:, changed], before[:, changed])


@pytest.mark.parametrize("block", ["energy_cross", "energy_self", "plain"])
def test_anderson_comes_to_the_same_rest_sooner(block: str) -> None:
    states, paces = [], []
    for solver in ("damped", "anderson"):
        model = looped(block=block, solver=solver, step_size=0.9, tolerance=1e-10, max_iterations=300)
        model.double()
        with torch.no_grad():
            model(batch()[0])
        [solution] = model.solutions()
        assert solution.residual.max() <= 1e-10
        states.append(solution.state)
        paces.append(float(solution.iterations.double().mean()))
    assert relative_error(*states) <= 1e-8 and paces[1] < paces[0]


def test_anderson_begins_anew_where_it_diverges() -> None:
    """A sample whose residual has more than doubled takes a damped step; the others are mixed as before."""
    random = torch.Generator().manual_seed(0)
    mixer = AndersonMixer(0.5, torch.zeros(2, 3, 4, dtype=torch.float64), "sample")
    for residual in ([1.0, 1.0], [0.4, 0.9], [1.5, 1.5]):
        state, image = torch.randn(2, 2, 3, 4, dtype=torch.float64, generator=random)
        mixed = mixer(state, image, torch.tensor(residual, dtype=torch.float64)[:, None])
    damped = torch.lerp(state, image, 0.5)
    assert (mixed[0] - damped[0]).abs().max() <= 1e-9 and (mixed[1] - damped[1]).abs().max() > 0.01


def test_anderson_mixes_states_of_half_precision_in_single() -> None:
    """Nothing solves equations in bf16, and products of it would be those of rounded moves."""
    torch.manual_seed(1)
    steps = [torch.randn(2, 3, 8) for _ in range(4)]
    mixed = {}
    for dtype in (torch.float32, torch.bfloat16):
        mixer = AndersonMixer(0.9, steps[0], "sample")
        with torch.autocast("cpu", enabled=dtype != torch.float32):
            for state, image in itertools.pairwise(steps):
                rounded = state.bfloat16().to(dtype), image.bfloat16().to(dtype)
                mixed[dtype] = mixer(*rounded, relative_residual(*rounded, "sample"))
    assert mixed[torch.bfloat16].dtype == torch.bfloat16
    assert relative_error(mixed[torch.bfloat16].float(), mixed[torch.float32]) < 0.01


def test_least_and_most_iterations_are_kept() -> None:
    options = SolverOptions(method="damped", step_size=0.5, tolerance=0.5, max_iterations=7, unit="token")
    start = torch.ones(2, 3, 4)
    assert solve(lambda h: h, start, options).iterations.unique().tolist() == [1]
    assert solve(lambda h: h, start, options, min_iterations=5).iterations.unique().tolist() == [5]
    assert solve(lambda h: -h, start, options).iterations.shape == (2, 3)
    never = SolverOptions(method="damped", step_size=1.0, tolerance=0.5, max_iterations=7, unit="sample")
    stopped = solve(lambda h: -h, start, never)
    assert stopped.iterations.tolist() == [[7], [7]] and stopped.residual.tolist() == [[2.0], [2.0]]


def test_a_residual_is_of_what_settles_as_one() -> None:
    image, state = torch.ones(1, 3, 1), torch.tensor([[[1.0], [0.5], [1.0]]])
    assert relative_residual(image, state, "token").tolist() == [[0.0, 0.5, 0.0]]
    assert relative_residual(image, state, "prefix").tolist() == [[0.0, 0.5, 0.5]]
    assert relative_residual(image, state, "sample").tolist() == [[pytest.approx(0.5 / 3**0.5)]]


def peak_bytes(**changes: Any) -> int:
    """Above the model, of a step of training, or of inference where `gradient` is None."""
    train = changes.get("gradient", "ep") is not None
    if not train:
        del changes["gradient"]
    rows, spec = changes.pop("rows", 16), changes.pop("spec", IMAGES)
    model = looped(**changes, spec=spec, tolerance=1e-30)
    inputs, targets = batch(spec, rows=rows, dtype=torch.float32)
    live = LiveBytes()
    with live, torch.set_grad_enabled(train):
        logits = model(inputs)
        if train:
            torch.nn.functional.cross_entropy(logits, targets).backward()
        del logits
    return live.trace().peak_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_iterations_but_by_backpropagation() -> None:
    sizes = {"width": 16, "hidden": 64, "block": "energy_self", "nudged_iterations": 2}
    few, many = (peak_bytes(**sizes, max_iterations=count) for count in (5, 200))
    assert few == many
    assert many <= 1.25 * peak_bytes(**sizes, max_iterations=5, gradient=None)
    through = [peak_bytes(**sizes, max_iterations=count, gradient="bptt") for count in (5, 10, 20)]
    assert through[2] - through[1] == pytest.approx(2 * (through[1] - through[0]), rel=0.01)
    assert through[2] > 5 * many


@pytest.mark.slow
@pytest.mark.parametrize("block", ["energy_cross", "energy_self"])
@pytest.mark.parametrize(("width", "heads"), [(32, 2), (128, 4), (256, 8)])
def test_a_gradient_takes_little_more_memory_than_inference(width: int, heads: int, block: str) -> None:
    """At the sizes that the figure was asked for: 64 samples of 16 tokens."""
    sizes = {"width": width, "heads": heads, "hidden": 4 * width, "block": block, "rows": 64}
    sizes |= {"patch": 0, "readout": "mean", "max_iterations": 3, "nudged_iterations": 2}
    sizes["spec"] = dataclasses.replace(IMAGES, height=16, width=8)
    assert peak_bytes(**sizes) <= 1.25 * peak_bytes(**sizes, gradient=None)


@pytest.mark.parametrize(
    ("tolerance", "most", "fewest", "expected"),
    [(0.1, 50, 10, 10), (0.1, 50, 3, 3), (1e-30, 50, 10, 25), (1e-30, 10, 10, 10)],
)
def test_least_and_most_iterations_under_a_force_are_kept(
    tolerance: float, most: int, fewest: int, expected: int
) -> None:
    """A state at rest is next to where a force leads: a loose tolerance would stop it before it has moved."""
    model = looped(tolerance=tolerance, max_iterations=most, nudged_iterations=fewest)
    count: list[int] = []

    def counting(*arguments: Any) -> Tensor:
        count.append(1)
        return EnergyForm.step(*arguments)

    inputs, targets = batch(dtype=torch.float32)
    model.compile_steps(lambda _: counting)
    loss = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
    count.clear()
    loss.backward()
    assert len(count) == 2 * expected, "of two forces"


def test_what_has_not_settled_is_told() -> None:
    inputs, _ = batch()
    inputs[2] *= 30  # settles at another pace
    told = {}
    for most in (50, 1):
        model = looped(block="energy_self", step_size=0.9, max_iterations=most, tolerance=1e-3).double()
        with torch.no_grad():
            model(inputs)
        told[most] = model.run_note()
    assert told[50] is None
    assert told[1] is not None and told[1].startswith("Unsettled: 100.00% of the states in the last batch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "most"),
    [({"together": True}, 300), ({"block": "plain", "gradient": "ep_vf"}, 400)],
    ids=["energy", "plain"],
)
def test_what_does_not_settle_under_a_force_is_told(form: dict[str, Any], most: int) -> None:
    """Half of what rest may take is too few here; and it is told after an evaluation, too."""
    sizes = {"tolerance": 1e-9, "max_iterations": most, "nudged_iterations": 2, **form}
    inputs, targets = batch()
    told = {}
    for step_size in (0.3, 0.1):
        model = looped(**sizes, step_size=step_size).double()
        for _ in range(2):
            gradient(model, inputs, targets)
        assert len(model.forced()) == (1 if "together" in form else 2), "of the last gradient alone"
        with torch.no_grad():
            model(inputs)
        told[step_size] = model.run_note()
    assert told[0.3] is None
    assert re.match(r"Unsettled: [0-9.]+% of the states under a force in the last", told[0.1] or "")


def test_weights_stay_within_their_bounds() -> None:
    model = looped()
    optimizer = make_optimizer(
        model, name="sgd", learning_rate=10.0, weight_decay=0.0, momentum=0.0, nesterov=False,
        adam_beta1=None, adam_beta2=None, adam_eps=None,
    )  # fmt: skip
    block = model.blocks[0].block
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    block.gain.grad = torch.ones(())  # type: ignore[union-attr]
    optimizer.step()
    for matrix in (block.query, block.key, block.units):
        assert float(torch.linalg.matrix_norm(matrix.detach(), 2)) == pytest.approx(0.8, rel=1e-4)
    assert float(block.gain.detach()) == pytest.approx(MIN_GAIN)
    assert float(torch.linalg.matrix_norm(model.head.weight.detach(), 2)) > 1
    block.gain.grad = -torch.ones(())  # type: ignore[union-attr]
    optimizer.step()
    assert float(block.gain.detach()) == pytest.approx(MAX_GAIN)
    tall = torch.randn(7, 3)
    expected = float(torch.linalg.matrix_norm(tall, 2))
    assert float(largest_singular_value(tall)) == pytest.approx(expected, rel=1e-5)
    assert float(largest_singular_value(tall.t())) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"heads": 3}, "CONFIG_LOOPED_WIDTH=8 is not a multiple of CONFIG_LOOPED_HEADS=3"),
        ({"block": "plain", "gradient": "ep"}, "needs an energy"),
        ({"gradient": "ep_vf"}, "are for the plain block"),
        ({"nudge": "holomorphic"}, "analytic"),
        ({"causal": True}, "by the past alone"),
        ({"patch": 8}, "one token"),
        ({"spec": TEXT, **TEXTS, "readout": "tokens"}, "side by side"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        looped(**changes)


def test_a_symmetric_energy_models_no_language() -> None:
    with pytest.raises(ConfigError, match="symmetric"):
        looped(spec=TEXT, **TEXTS, block="energy_self")


def test_patches_are_cut_where_they_are() -> None:
    model = looped(patch=4)
    with torch.no_grad():
        model.embedding.position.zero_()  # type: ignore[union-attr, operator]
        model.embedding.linear.weight.fill_(1.0)  # type: ignore[union-attr, operator]
        image = torch.arange(42.0).view(1, *IMAGES.input_shape)
        tokens = model.embedding(image)
    expected = [image[0, 0, top : top + 4, left : left + 4].sum() for top in (0, 4) for left in (0, 4)]
    assert tokens[0, :, 0].tolist() == pytest.approx([float(value) for value in expected])


def test_every_way_of_reading_the_source_of_a_gradient_trains() -> None:
    for way in ("ep", "implicit", "bptt", "one_step"):
        assert estimated(gradient=way, solver="anderson", dtype=torch.float32).isfinite().all()
