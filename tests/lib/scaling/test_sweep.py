"""A sweep after its runs: which results are its own, what is read off a run, and what is told of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from lib import atomic
from lib.data.types import TextSpec
from lib.errors import ConfigError, ToolkitError
from lib.reports.page import as_text
from lib.scaling.costs import builder, training_flops
from lib.scaling.experiments import ROOT, ScalingExperiments
from lib.scaling.isoflop import NO_SEEDS, Growth, isoflops
from lib.scaling.judge import FittedLaw, judge
from lib.scaling.laws import Point, fit
from lib.scaling.pictures import _isoflop
from lib.scaling.results import ScalingConfig, ScalingResults, code_hash, points_of
from lib.scaling.sweep import Sweep
from lib.scaling.sweep_report import sections

SPEC = TextSpec(
    name="x", vocab_size=32, block_size=16, unit="char", validation_tokens=10, validation_bytes=10
)
CONFIG = ScalingConfig(16, 1, n_seq=16, batch_size=2, tokens=64)


def result(width: int = 64, *, nats: float = 2.0, config_hash: str = "") -> ScalingResults:
    requested = {"corpus": "synthetic", "data_sha256": "x"}
    plain = ScalingResults(width, 4, width**2, 7.0, 7.0, 1.0, 10, 1.0, [7.0], config=requested)
    return dataclasses.replace(
        plain, num_params_nonembedding=width**2, val_nats=nats, tokens=1000, config_hash=config_hash
    )


def sweep_of(out: Path, *results: ScalingResults) -> ScalingExperiments:
    """A sweep that has ended, of which nothing was trained."""
    names = {f"d{each.d_model}_l4": each for each in results}
    atomic.save(out / "sweep.json", json.dumps({name: each.config_hash for name, each in names.items()}))
    for name, each in names.items():
        atomic.save(out / f"{name}_results.json", each.to_json())
    return ScalingExperiments(out)


def test_what_an_earlier_sweep_left_is_no_result_of_the_last(tmp_path: Path) -> None:
    """Of the same name, but of other data or another batch: the last sweep was killed before its turn."""
    mine, stale = result(32, config_hash="a"), result(64, config_hash="b")
    experiments = sweep_of(tmp_path, mine, stale)
    assert experiments.results() == [mine, stale]
    atomic.save(tmp_path / "sweep.json", '{"d32_l4": "a", "d64_l4": "c"}')
    with pytest.raises(
        ToolkitError, match=r"1 of 2 runs are missing: d64_l4 \.\.\.; make scaling resumes the sweep"
    ):
        experiments.results()


@pytest.mark.parametrize("content", ["5", "null", "[]", "{}", '["d64_l4"]', "{"])
def test_a_damaged_list_of_a_sweep_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(ConfigError, match="there is no sweep in"):
        ScalingExperiments(tmp_path).results()


def test_a_text_that_has_changed_since_the_sweep_is_not_what_its_losses_are_judged_by(tmp_path: Path) -> None:
    experiments = sweep_of(tmp_path, result(64, config_hash="a"))
    experiments.corpus = SimpleNamespace(sha256="x")  # type: ignore[assignment]
    assert list(experiments.verdicts()) == ["resnet_bk"]
    experiments.corpus = SimpleNamespace(sha256="y")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="CORPUS=synthetic has changed since the sweep in"):
        experiments.verdicts()


def test_a_run_is_known_by_the_text_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the caller does not say which: another text in the same folder is another run."""
    given: list[ScalingConfig] = []
    monkeypatch.setattr(Sweep, "run", lambda _, configs, __: given.extend(configs) or [])
    for text in "xy":
        experiments = ScalingExperiments(tmp_path)
        experiments.corpus = SimpleNamespace(spec=SPEC, lowest=0.0, sha256=text)  # type: ignore[assignment]
        experiments.run([ScalingConfig(16, 2)])
    assert [config.data_sha256 for config in given] == ["x", "y"]
    assert json.loads((tmp_path / "sweep.json").read_text()) == {"d16_l2": given[1].identity(code_hash(ROOT))}


def sweep_in(out: Path) -> Sweep:
    return Sweep(root=ROOT, out=out, spec=SPEC, floor=0.0, code="", workers=1, log=lambda _: None)


def read_off(out: Path, *evaluated: float | None) -> ScalingResults:
    """A run of two steps, with these losses on the validation part."""
    rows = [{"kind": "train", "loss": 3.0}, *({"kind": "eval", "loss": loss} for loss in evaluated)]
    (out / "metrics").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = SimpleNamespace(step=2, facts={"seconds": 1.5})
    run = SimpleNamespace(status=lambda: status, metrics=out / "metrics")
    return sweep_in(out)._read(result(), run, CONFIG)  # type: ignore[arg-type]


def test_what_failed_is_trained_again_and_what_did_not_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = result(16, nats=1.5, config_hash=CONFIG.identity(""))
    monkeypatch.setattr(Sweep, "_train", lambda *_: trained)
    nothing: Any = None
    for status, expected in (("failed", 1.5), ("done", 2.0)):
        kept = result(16, config_hash=CONFIG.identity(""))
        atomic.save(tmp_path / "d16_results.json", dataclasses.replace(kept, status=status).to_json())
        found = sweep_in(tmp_path).result(CONFIG, "d16", nothing)
        assert found is not None and found.val_nats == expected


def test_a_loss_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    found = read_off(tmp_path, 2.0, None)
    assert (found.status, found.reason) == ("failed", "the validation loss is not finite")


def test_parameters_are_those_of_the_length_that_is_trained_on(tmp_path: Path) -> None:
    lengths = [ScalingConfig(16, 1, n_seq=length, arch="gpt") for length in (16, 32)]
    short, long = (sweep_in(tmp_path)._empty(config, "").num_params for config in lengths)
    assert long - short == 16 * 16, "a learned position each"


def test_what_is_read_off_a_run(tmp_path: Path) -> None:
    found = read_off(tmp_path, 2.5, 2.0, 2.25)
    assert (found.status, found.val_nats, found.final_loss) == ("done", 2.25, 3.0)
    assert [math.log(each) for each in found.epoch_perplexities] == pytest.approx([2.5, 2.0, 2.25])
    assert math.log(found.best_perplexity or 1) == pytest.approx(2.0)
    assert found.tokens == 2 * 2 * 16 and found.training_time == 1.5
    assert found.total_training_flops == found.tokens * training_flops(builder(CONFIG, SPEC), block_size=16)


def test_an_exponent_is_told_with_its_interval_or_with_what_it_lacks() -> None:
    sound = judge(points_of([result()]), starts=4, samples=4)
    for growth, told in (
        (Growth(exponent=0.5, interval=(0.4, 0.6)), "optimal N grows as C^0.50 [0.40, 0.60] (95 %"),
        (Growth(reason=NO_SEEDS), f"insufficient: {NO_SEEDS}"),
    ):
        verdict = dataclasses.replace(sound, growth=growth)
        assert f"  isoFLOP: {told}" in as_text(sections([result()], {"resnet_bk": verdict}, "a text", {}))


@pytest.mark.parametrize("exponent", [0.5, None])
def test_an_optimum_that_is_refused_is_not_drawn(exponent: float | None) -> None:
    sizes, amounts = (100, 200, 300, 400), (1000, 2000, 8000)
    results = [
        dataclasses.replace(result(width, nats=2 + abs(math.log(width**2 / amount / 20))), tokens=amount)
        for width, amount in itertools.product(sizes, amounts)
    ]
    assert any(budget.optimum for budget in isoflops(points_of(results)))
    sound = judge(points_of([result()]), starts=4, samples=4)
    axes = Figure().add_subplot()
    verdict = dataclasses.replace(sound, growth=Growth(exponent=exponent))
    _isoflop(axes, {"resnet_bk": results}, {"resnet_bk": verdict})
    assert any(line.get_linestyle() == ":" for line in axes.lines) == (exponent is not None)


def test_counting_that_does_better_is_told_and_the_known_floor_is_no_rival() -> None:
    results = [result(), result(32, nats=2.5)]
    verdicts = {"resnet_bk": judge(points_of(results), starts=4, samples=4)}
    lines = {"counting 2-grams": 2.1, "counting 3-grams": 1.9, "entropy rate (known)": 1.5}
    text = as_text(sections(results, verdicts, "a text", lines))
    assert "Its best loss, 2.0000, is beaten by counting 3-grams.\n" in text


@pytest.mark.parametrize(("known", "place"), [(1.5, "inside"), (1.7, "outside")])
def test_a_known_floor_is_told_beside_that_of_the_fit(known: float, place: str) -> None:
    law = fit(
        [Point(parameters=n, tokens=1.0, loss=1.5 + 80 * n**-0.4) for n in (1e4, 1e5, 1e6)], name="floor"
    )
    near = [dataclasses.replace(law, floor=1.5 + by) for by in (-0.1, 0.1)]
    sound = judge(points_of([result()]), starts=4, samples=4)
    verdict = dataclasses.replace(sound, fits={"floor": FittedLaw(law=law, samples=tuple(near))})
    text = as_text(sections([result()], {"resnet_bk": verdict}, "a text", {"entropy rate (known)": known}))
    assert f"the known floor {known:.4f} is {place} the interval of E" in text
