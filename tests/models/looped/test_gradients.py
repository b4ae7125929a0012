"""The gradients of the looped transformer: which are exact, to which power of the force, which are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.looped.blocks import EnergyForm
from models.looped.equilibrium import Equilibrium, contrast, root_mean_square
from models.looped.model import LoopedTransformer
from tests.models.looped.small import (
    IMAGES,
    TEXT,
    TEXTS,
    TIGHT,
    batch,
    cosine,
    estimated,
    exact,
    gradient,
    looped,
    potential,
    relative_error,
    slope,
)

FORMS: list[dict[str, Any]] = [
    {"block": "energy_cross"},
    {"block": "energy_self", "step_size": 0.9},
    {"block": "energy_cross", "activation": "tanh", "mlp": "tanh"},
    {"block": "energy_self", "activation": "identity", "mlp": "relu", "spectral_cap": 0.4},
    {"block": "energy_cross", "layers": 2},
]
IDS = ["cross", "self", "tanh", "identity", "two blocks"]


def name_of(form: dict[str, Any]) -> str:
    return IDS[FORMS.index(form)]


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, {"block": "plain"}], ids=[*IDS, "plain"])
def test_the_reference_is_the_slope_of_the_loss(form: dict[str, Any]) -> None:
    model = looped(**form, **TIGHT, gradient="implicit").double()
    inputs, targets = batch()
    found = gradient(model, inputs, targets)
    directions = torch.randn(3, len(found), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    for direction in directions:
        losses = []
        for sign in (1, -1):
            torch.nn.utils.vector_to_parameters(start + sign * 1e-5 * direction, model.parameters())
            with torch.no_grad():
                losses.append(F.cross_entropy(model(inputs), targets, reduction="sum"))
        assert float((losses[0] - losses[1]) / 2e-5) == pytest.approx(float(found @ direction), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_equilibrium_propagation_is_exact(form: dict[str, Any]) -> None:
    found = estimated(**form, **TIGHT, beta=1e-4)
    assert relative_error(found, exact(**form)) <= 1e-5 and cosine(found, exact(**form)) >= 0.999999


@pytest.mark.parametrize("form", FORMS[:2], ids=IDS[:2])
def test_a_force_of_a_tenth_of_the_gradient_is_small_enough(form: dict[str, Any]) -> None:
    """As papers have it, where beta is the share of a sample's loss."""
    model = looped(**form, **TIGHT, beta=0.1).double()
    expected = looped(**form, **TIGHT, gradient="implicit").double()
    inputs, targets = batch()
    gradient(expected, inputs, targets)
    exactly = torch.cat([weight.grad.flatten() for weight in expected.blocks[0].block.weights])  # type: ignore[union-attr]
    share = torch.ones(len(inputs), 1, 1, dtype=torch.float64)
    assert relative_error(contrasted(model, inputs, targets, share=share), exactly) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("nudge", "order"), [("one_sided", 1), ("symmetric", 2), ("four_point", 4)])
@pytest.mark.parametrize("form", FORMS[:2], ids=IDS[:2])
def test_its_error_falls_with_a_power_of_the_force(form: dict[str, Any], nudge: str, order: int) -> None:
    sizes = [0.08, 0.04] if order < 4 else [0.16, 0.08]
    errors = [
        relative_error(estimated(**form, **TIGHT, nudge=nudge, beta=beta), exact(**form)) for beta in sizes
    ]
    assert slope(errors, sizes) == pytest.approx(order, abs=0.1 * order)


@pytest.mark.parametrize("count", [2, 3, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_on_a_circle_it_falls_with_the_number_of_points(count: int) -> None:
    form = {"mlp": "tanh"}
    sizes = [0.4, 0.2] if count > 3 else [0.2, 0.1]
    ways = [{"nudge": "holomorphic", "nudge_points": count, "beta": beta} for beta in sizes]
    errors = [relative_error(estimated(**form, **TIGHT, **way), exact(**form)) for way in ways]
    assert slope(errors, sizes) == pytest.approx(count, abs=0.15 * count)


def test_two_points_of_the_circle_are_the_symmetric_ones() -> None:
    form = {"mlp": "tanh", "beta": 0.05, **TIGHT}
    circle = estimated(**form, nudge="holomorphic", nudge_points=2)
    assert relative_error(circle, estimated(**form, nudge="symmetric")) <= 1e-12


@pytest.mark.parametrize("block", ["energy_cross", "energy_self"])
def test_single_precision_at_the_defaults(block: str) -> None:
    found = estimated(block=block, dtype=torch.float32)
    assert cosine(found, exact(block=block)) >= 0.9999 and relative_error(found, exact(block=block)) <= 1e-3


def test_the_gradient_of_a_language_model_is_exact_too() -> None:
    found = estimated(spec=TEXT, **TEXTS, **TIGHT, beta=1e-4)
    assert relative_error(found, exact(spec=TEXT, **TEXTS)) <= 1e-5


@pytest.mark.parametrize("form", FORMS[:4], ids=IDS[:4])
def test_the_written_out_derivative_is_that_of_the_energy(form: dict[str, Any]) -> None:
    """Also of weights outside their bounds, and with a share of its own for each sample."""
    torch.manual_seed(0)
    block = looped(**form).double().blocks[0].block
    weights = type(block.weights)(*(torch.randn_like(w).requires_grad_() for w in block.weights))
    x, state = (torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    allowed = torch.ones(4, 4, dtype=torch.bool).tril()
    share = torch.rand(3, 1, 1, dtype=torch.float64)
    source = block.form.source(weights, x, allowed)
    # Where a state does not rest dE/dg is not zero: what goes through g is left out by hand.
    activity = block.form.activate(weights, state).detach()
    phi = potential(block.form, weights, activity, source)
    lagrangian = (weights.gain * block.form._base_lagrangian(state) + state @ weights.shift_D).sum(dim=1)
    total = -(share[:, 0, 0] * (phi + lagrangian)).sum()
    expected = torch.autograd.grad(total, [*weights, x])
    with torch.no_grad():
        found, x_gradient = block.form.gradient(weights, state, source, share)
    for one, other in zip([*found, x_gradient], expected, strict=True):
        assert (one - other).abs().max() <= 1e-10 * other.abs().max()


def contrasted(
    model: LoopedTransformer,
    inputs: Tensor,
    targets: Tensor,
    *,
    forced: bool = True,
    share: Tensor | None = None,
) -> Tensor:
    """The estimate for the weights of the block, with forces of `share` or as in training, or without."""
    rest = model.blocks[0]
    assert isinstance(rest, Equilibrium)
    x = (2.0 * model.embedding(inputs)).detach()
    with torch.no_grad():
        activity = rest(x, None)
    activity.requires_grad_()
    F.cross_entropy(model.head(activity.mean(dim=1)), targets, reduction="sum").backward()
    assert activity.grad is not None and rest.solution is not None
    if share is None:
        share = root_mean_square(activity.grad, "sample")
    with torch.no_grad():
        parts, _ = contrast(
            rest, rest.block.weights, rest.solution.state, x, None,
            gradient_BTD=activity.grad * forced, share=share,
        )  # fmt: skip
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("nudge", ["one_sided", "symmetric", "four_point"])
def test_without_a_force_there_is_nothing(nudge: str) -> None:
    """What has not settled, divided by a small beta, would look like a gradient."""
    found = {}
    for forced in (True, False):
        model = looped(block="energy_self", nudge=nudge, step_size=0.9)
        found[forced] = float(contrasted(model, *batch(dtype=torch.float32), forced=forced).norm())
    assert found[False] <= 1e-3 * found[True]
    assert nudge != "symmetric" or found[False] == 0


def test_the_estimate_knows_no_scale() -> None:
    """Of the loss, as accumulation and loss scaling change it, and of the samples around one."""
    model = looped().double()
    inputs, targets = batch()
    found = {}
    for scale in (1.0, 1e-4, 65536.0):
        model.zero_grad()
        (F.cross_entropy(model(inputs), targets, reduction="sum") * scale).backward()
        found[scale] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) / scale
    assert all(relative_error(one, found[1.0]) <= 1e-12 for one in found.values())
    alone: Tensor = sum(  # type: ignore[assignment]
        gradient(model, inputs[row : row + 1], targets[row : row + 1]) for row in range(len(inputs))
    )
    assert relative_error(alone, found[1.0]) <= 1e-12


def test_a_sample_without_a_say_changes_nothing() -> None:
    model = looped()
    inputs, targets = batch(dtype=torch.float32)
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    (losses * torch.tensor([1.0, 1.0, 0.0])).sum().backward()
    some = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert some.isfinite().all()
    assert relative_error(some.double(), gradient(model, inputs[:2], targets[:2])) <= 1e-5


@pytest.mark.parametrize("form", [{"block": "plain"}, {"block": "energy_self"}], ids=["plain", "energy"])
def test_backpropagation_through_enough_iterations_is_the_implicit_gradient(form: dict[str, Any]) -> None:
    found = estimated(**form, **TIGHT | {"max_iterations": 150}, step_size=0.9, gradient="bptt")
    assert relative_error(found, exact(**form)) <= 1e-9


def test_the_vector_field_is_biased_however_small_the_force() -> None:
    expected = exact(block="plain")
    errors = [
        relative_error(estimated(block="plain", gradient="ep_vf", beta=beta, **TIGHT), expected)
        for beta in (0.01, 0.001)
    ]
    assert min(errors) > 0.05 and errors[0] == pytest.approx(errors[1], rel=0.01)


@pytest.mark.slow
def test_its_adjoint_correction_is_exact() -> None:
    way: dict[str, Any] = {"block": "plain", "gradient": "ep_adjoint", "step_size": 0.9, **TIGHT}
    expected, sizes = exact(block="plain"), [0.02, 0.01]
    errors = [relative_error(estimated(**way, beta=beta), expected) for beta in sizes]
    assert errors[-1] <= 1e-4 and slope(errors, sizes) == pytest.approx(2, abs=0.2)


def test_the_last_iteration_alone_is_biased() -> None:
    for block in ("plain", "energy_self"):
        assert relative_error(estimated(block=block, gradient="one_step"), exact(block=block)) > 0.01


def test_half_precision_settles_first_and_single_goes_on() -> None:
    model, (inputs, targets) = looped(), batch(IMAGES, dtype=torch.float32)
    alone = gradient(model, inputs, targets)
    model.zero_grad()
    rest = model.blocks[0]
    assert isinstance(rest, Equilibrium)
    x = (2.0 * model.embedding(inputs)).detach()
    whole = rest(x, None)
    in_half = list[bool]()

    def seen(*arguments: Any) -> Tensor:
        in_half.append(torch.is_autocast_enabled("cpu"))
        return EnergyForm.step(*arguments)

    model.compile_steps(lambda _: seen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hybrid = rest(x, None)
    assert in_half[0] and not in_half[-1] and in_half == sorted(in_half, reverse=True)
    assert hybrid.dtype == torch.float32 and relative_error(hybrid.detach(), whole.detach()) <= 1e-5
    weight = torch.randn_like(whole)
    (whole * weight).sum().backward(inputs=[*rest.parameters()])
    expected = torch.cat([p.grad.double().flatten() for p in rest.parameters() if p.grad is not None])
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hybrid = rest(x, None)
    (hybrid * weight).sum().backward(inputs=[*rest.parameters()])
    found = torch.cat([p.grad.double().flatten() for p in rest.parameters() if p.grad is not None])
    assert relative_error(found, expected) <= 1e-3 and alone.isfinite().all()


@pytest.mark.parametrize("nudge", ["one_sided", "four_point", "holomorphic"])
def test_forces_that_settle_side_by_side_say_the_same(nudge: str) -> None:
    form: dict[str, Any] = {"nudge": nudge, "mlp": "tanh", **TIGHT}
    assert relative_error(estimated(**form, together=True), estimated(**form)) <= 1e-11


@pytest.mark.parametrize(
    ("form", "calls"),
    [({}, "many"), ({"block": "plain"}, "many"), ({"gradient": "bptt"}, "none")],
    ids=["energy", "plain", "through all iterations"],
)
def test_a_step_is_what_is_compiled(form: dict[str, Any], calls: str) -> None:
    """Where nothing is differentiated automatically: free, and under a force."""
    seen = {"free": 0, "forced": 0}

    def compiler(step: Any) -> Any:
        def counting(*arguments: Any) -> Tensor:
            seen["forced" if settled else "free"] += 1
            return step(*arguments)  # type: ignore[no-any-return]

        return counting

    settled, (inputs, targets) = False, batch()
    model = looped(**form).double()
    expected = gradient(model, inputs, targets)
    model.zero_grad()
    model.compile_steps(compiler)
    loss = F.cross_entropy(model(inputs), targets, reduction="sum")
    settled = True
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(found, expected)
    assert (seen["free"] > 3) == (calls == "many") and (seen["forced"] > 3) == (form == {})
