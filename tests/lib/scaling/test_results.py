"""Plans, configurations and results of a sweep, before and after anything is trained."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import typing
from pathlib import Path

import pytest
from torch import nn

from lib import atomic, kconf
from lib.config import config_from_values
from lib.data.types import TextSpec
from lib.errors import ConfigError, ToolkitError
from lib.nn.model_code import build_model
from lib.scaling.costs import training_flops
from lib.scaling.experiments import ROOT, ScalingExperiments, law_of
from lib.scaling.judge import judge
from lib.scaling.planning import (
    FULL,
    QUICK,
    PlannedRun,
    configs_of,
    learning_rate,
    names_of,
    parse_budget,
    plan_runs,
    within_budget,
)
from lib.scaling.results import (
    ARCHITECTURES,
    ScalingConfig,
    ScalingResults,
    by_architecture,
    code_hash,
    points_of,
    read,
)
from lib.scaling.sweep import failures

SPEC = TextSpec(
    name="x", vocab_size=32, block_size=16, unit="char", validation_tokens=10, validation_bytes=10
)


def result(width: int = 64, *, nats: float = 2.0, tokens: int = 1000, **changes: object) -> ScalingResults:
    plain = ScalingResults(
        d_model=width,
        n_layers=4,
        num_params=width**2,
        final_perplexity=math.exp(nats),
        best_perplexity=math.exp(nats),
        training_time=1.0,
        total_training_flops=10,
        peak_memory_mb=1.0,
        epoch_perplexities=[math.exp(nats)],
        num_params_nonembedding=width**2,
        val_nats=nats,
        tokens=tokens,
        config={"corpus": "synthetic", "data_sha256": "x"},
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_the_interface_is_that_of_the_document() -> None:
    config = inspect.signature(ScalingConfig).parameters
    assert list(config)[:6] == ["d_model", "n_layers", "n_seq", "batch_size", "epochs", "device"]
    assert [config[name].default for name in ("n_seq", "batch_size", "epochs")] == [128, 32, 5]
    hints = typing.get_type_hints(ScalingResults)
    named = {"d_model": int, "n_layers": int, "num_params": int, "training_time": float}
    named |= {"total_training_flops": int, "peak_memory_mb": float, "epoch_perplexities": list[float]}
    assert {name: hints[name] for name in named} == named
    assert {"final_perplexity", "best_perplexity"} <= set(hints)
    run = inspect.signature(ScalingExperiments.run_all_experiments).parameters
    assert run["d_model_values"].default == (64, 128, 256, 512)
    assert run["n_layers_values"].default == (4, 8, 12, 16) and run["epochs"].default == 5
    for name in ("analyze_scaling_laws", "plot_scaling_laws"):
        assert list(inspect.signature(getattr(ScalingExperiments, name)).parameters) == ["self"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_configuration_resolves_to_the_model_that_is_counted(arch: str, tmp_path: Path) -> None:
    requested = ScalingConfig(32, 2, tokens=50_000, batch_size=4, arch=arch, lr=0.016, seed=3, device="cpu")
    (tmp_path / "config").write_text(requested.assignments())
    config = config_from_values(kconf.load(root=ROOT, config_file=tmp_path / "config").values)
    name, options = requested.model()
    assert (config.model, dict(config.model_options)) == (name, options)
    assert (config.max_steps, config.target, config.optim.learning_rate, config.seed) == (98, 4, 0.016, 3)
    assert (config.dataset, config.block_size, config.precision) == ("markov", 128, "fp32")
    build_model(name, options, SPEC, seed=0)


def test_corpora_and_epochs(tmp_path: Path) -> None:
    odd = 'texts/a "b\\c'
    (tmp_path / "config").write_text(ScalingConfig(32, 2, epochs=3, corpus=f"file:{odd}").assignments())
    config = config_from_values(kconf.load(root=ROOT, config_file=tmp_path / "config").values)
    assert (config.dataset, config.num_epochs) == ("text_files", 3)
    assert config.data_dir == str(Path(odd).absolute()), "of the folder it was given in"
    with pytest.raises(ConfigError, match=r"CORPUS=wiki is not a corpus.*one of synthetic, pysource"):
        ScalingConfig(32, 2, corpus="wiki").assignments()
    with pytest.raises(ConfigError, match="no architecture 'gpt3'"):
        ScalingConfig(32, 2, arch="gpt3")


def test_the_hash_is_of_configuration_data_and_code() -> None:
    config = ScalingConfig(32, 2)
    others = [
        dataclasses.replace(config, **{name: value})
        for name, value in (("seed", 2), ("lr", 0.1), ("data_sha256", "x"), ("tokens", 1), ("arch", "gpt"))
    ]
    hashes = {other.identity("code") for other in [config, *others]} | {config.identity("other code")}
    assert len(hashes) == len(others) + 2 and config.identity("code") in hashes


def test_the_hash_is_of_what_a_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ScalingConfig(32, 2).identity("code")
    told = ScalingConfig(32, 2).assignments().replace("0.95", "0.99")
    monkeypatch.setattr(ScalingConfig, "assignments", lambda _: told)
    assert ScalingConfig(32, 2).identity("code") != before


@pytest.mark.parametrize(
    ("wrong", "least"),
    [({"d_model": 0}, 1), ({"n_layers": "4"}, 1), ({"batch_size": 0}, 1), ({"tokens": -5}, 0)],
)
def test_what_no_model_has_is_no_configuration(wrong: dict[str, object], least: int) -> None:
    with pytest.raises(ConfigError, match=f"is not possible; it takes a whole number from {least} on"):
        ScalingConfig(**({"d_model": 32, "n_layers": 2} | wrong))  # type: ignore[arg-type]


def test_what_would_be_kept_under_one_name_is_refused() -> None:
    alike = [ScalingConfig(32, 2, lr=rate) for rate in (0.01, 0.02)]
    with pytest.raises(ConfigError, match="2 configurations would be kept as d32_l2"):
        names_of(alike)
    with pytest.raises(ConfigError, match="there is nothing to train"):
        names_of([])


def test_the_code_is_what_training_follows_from(tmp_path: Path) -> None:
    for name in ("lib/scaling", "lib/data", "models", "train"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.py").write_text("a = 1\n")
        (tmp_path / name / "Kconfig").write_text("config A\n")
    (tmp_path / "Kconfig").write_text("config B\n")
    before = code_hash(tmp_path)
    (tmp_path / "lib/scaling/x.py").write_text("a = 2\n")
    assert code_hash(tmp_path) == before, "reading results differently repeats no run"
    (tmp_path / "models/my_net").mkdir()
    (tmp_path / "models/my_net/model.py").write_text("a = 2\n")
    assert code_hash(tmp_path) == before, "nor does a model that they do not train"
    (tmp_path / "models/gpt2").mkdir()
    for name in ("models/gpt2/model.py", "models/x.py", "train/x.py", "lib/data/Kconfig", "Kconfig"):
        (tmp_path / name).write_text("a = 3\n")
        assert code_hash(tmp_path) != before, name
        before = code_hash(tmp_path)


def test_points_are_paired_repeated_once_and_named_as_in_the_document() -> None:
    configs = configs_of(QUICK, architectures=("resnet_bk", "gpt"), base=ScalingConfig(16, 2))
    names = names_of(configs)
    assert len(configs) == 2 * (4 * 3 + 2) == len(set(names))
    cells = [
        {(c.d_model, c.n_layers, c.tokens, c.seed) for c in configs if c.arch == arch}
        for arch in ("resnet_bk", "gpt")
    ]
    assert cells[0] == cells[1]
    assert {"d64_l4", "d16_l2", "d64_l4_gpt", "d32_l2_600k_s2", "d16_l2_300k_gpt"} <= set(names)
    assert len(configs_of(FULL, architectures=("resnet_bk",), base=ScalingConfig(64, 4))) == 16 * 3 + 2
    assert learning_rate(64) == learning_rate(128) * 2 and learning_rate(8) == 0.02


@pytest.mark.slow
def test_a_plan_tells_exact_counts_and_the_budget_drops_the_dearest() -> None:
    configs = [ScalingConfig(width, 1, tokens=width * 100, batch_size=2, n_seq=16) for width in (16, 32)]
    plan = plan_runs(configs, SPEC, train_tokens=1000)
    for each in plan:
        name, options = each.config.model()
        model = build_model(name, options, SPEC, seed=0)
        assert each.counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert plan[1].flops > 2 * plan[0].flops > 0 and f"{plan[0].counts.total:,}" in plan[0].line()
    costs = [dataclasses.replace(each, seconds=cost) for each, cost in zip(plan, (60.0, 240.0), strict=True)]
    assert within_budget(costs, seconds=150.0, workers=2) == costs
    assert within_budget(costs, seconds=149.0, workers=2) == costs[:1]
    with pytest.raises(ConfigError, match="not one run"):
        within_budget(costs, seconds=10.0, workers=2)


def test_budgets() -> None:
    assert [parse_budget(text) for text in ("90s", "10m", "2h")] == [90, 600, 7200]
    with pytest.raises(ConfigError, match="BUDGET=10 is not a time"):
        parse_budget("10")


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "d64_l4_results.json"
    atomic.save(path, result().to_json())
    assert read(path) == result() and read(tmp_path / "none") is None
    path.write_text(path.read_text()[:-20])
    assert read(path) is None, "half a file is none"


@pytest.mark.parametrize(
    "change",
    [
        {"val_nats": math.nan},
        {"val_nats": None},
        {"val_nats": "2.0"},
        {"val_nats": -1.0},
        {"tokens": 0},
        {"num_params_nonembedding": 0},
        {"config": None},
        {"config": {}},
    ],
)
def test_a_damaged_result_is_none(change: dict[str, object], tmp_path: Path) -> None:
    atomic.save(tmp_path / "x.json", result(**change).to_json())  # type: ignore[arg-type]
    assert read(tmp_path / "x.json") is None
    failed = result(status="failed", val_nats=0.0)
    atomic.save(tmp_path / "x.json", failed.to_json())
    assert read(tmp_path / "x.json") == failed


def test_failures_and_leaks_are_listed_and_in_no_fit() -> None:
    results = [
        result(),
        result(128, status="failed", reason="exit status 1"),
        result(256, status="suspect_leak"),
    ]
    assert points_of([result(num_params=9999)])[0].parameters == 64**2, "without embeddings"
    assert len(failures(results)) == 2 and "d128 l4" in failures(results)[0]
    assert by_architecture(results) == {"resnet_bk": results[:1]}


def test_the_law_of_the_document_is_fitted_in_logarithms() -> None:
    results = [result(width, nats=5 - 0.2 * math.log(width**2)) for width in (64, 128, 256)]
    law = law_of(results, judge(points_of(results), starts=10, samples=10))
    assert law["b"] == pytest.approx(-0.2) and law["a"] == pytest.approx(math.exp(5))
    assert law["r_squared"] == pytest.approx(1.0) and law["num_data_points"] == 3
    assert law["fits"]["chinchilla"]["status"] == "insufficient"
    assert law["isoflop"]["exponent"] is None and "budgets of equal operations" in law["isoflop"]["reason"]
    json.dumps(law, allow_nan=False)


def test_a_folder_without_a_sweep_says_so(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="there is no sweep in"):
        ScalingExperiments(tmp_path).results()


def test_operations_are_six_a_weight_and_token() -> None:
    """Two of the forward pass and four of the backward pass; the look-up of an embedding is none."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))

    assert training_flops(build, block_size=16) == 6 * 4 * 8


def test_a_plan_line_is_one_line() -> None:
    fields = {field.name for field in dataclasses.fields(PlannedRun)}
    assert {"counts", "flops", "seconds", "disk_bytes", "ram_bytes"} <= fields
