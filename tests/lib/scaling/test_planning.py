"""A plan of a sweep: on how much data, at what cost, what it cannot show, and what is refused before it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lib import atomic
from lib.data.datasets.texts import corpus
from lib.data.types import TextSpec
from lib.errors import ConfigError, run_main
from lib.memory.facts import model_facts
from lib.nn.model_code import build_model
from lib.scaling import costs, experiments
from lib.scaling.costs import Counts, count, training_flops
from lib.scaling.experiments import ROOT, ScalingExperiments
from lib.scaling.isoflop import exponent, isoflops
from lib.scaling.judge import TITLES, judge
from lib.scaling.laws import Point
from lib.scaling.planning import (
    FULL,
    QUICK,
    Grid,
    PlannedRun,
    configs_of,
    insufficient,
    names_of,
    parse_budget,
    plan_runs,
    plan_warnings,
    reductions,
    within_budget,
)
from lib.scaling.results import ARCHITECTURES, ScalingConfig, ScalingResults
from scripts.run_scaling_experiments import arguments_of
from scripts.scaling import grid_of, main, parse

ONE_PASS = 3_999_872  # tokens of the synthetic corpus
SPEC = TextSpec(
    name="x", vocab_size=32, block_size=16, unit="char", validation_tokens=10, validation_bytes=10
)


@cache
def counts(width: int, layers: int, arch: str) -> Counts:
    name, options = ScalingConfig(width, layers, arch=arch).model()
    return count(partial(build_model, name, options, SPEC, seed=0))


def plan_of(grid: Grid, *, arch: str = ARCHITECTURES[0]) -> list[PlannedRun]:
    """With invented times, in proportion to size and data."""
    configs = configs_of(
        grid, architectures=(arch,), base=ScalingConfig(16, 2, batch_size=grid.batch_size, epochs=3)
    )
    plan = []
    for name, config in zip(names_of(configs), configs, strict=True):
        own = counts(config.d_model, config.n_layers, arch)
        tokens = config.trained_tokens if config.tokens else config.epochs * ONE_PASS
        plan.append(
            PlannedRun(
                name=name,
                config=config,
                counts=own,
                tokens=tokens,
                flops=0,
                seconds=tokens * own.total * 1e-9,
                disk_bytes=0,
                ram_bytes=0,
            )
        )
    return plan


def missing(plan: Sequence[PlannedRun]) -> set[str]:
    (titles,) = insufficient(plan).values()
    return set(titles)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_whole_grid_can_carry_every_law_on_the_default_corpus(arch: str) -> None:
    grid = FULL.fitted(ONE_PASS)
    assert len(grid.tokens) == 3 and grid.tokens[2] / grid.tokens[0] == pytest.approx(4)
    assert missing(plan_of(grid, arch=arch)) == set()
    assert missing(plan_of(replace(FULL, tokens=(2_000_000,)), arch=arch)) == {
        TITLES["chinchilla"],
        "isoFLOP",
    }


@pytest.mark.slow
def test_amounts_of_data_shrink_together_and_no_run_is_longer_than_a_pass() -> None:
    assert QUICK.fitted(ONE_PASS) == QUICK
    assert FULL.fitted(8_001_536) == FULL
    for one_pass in (*range(8_192, 12_000, 128), 1_000_064, 8_000_000, 8_000_128):
        grid = FULL.fitted(one_pass)
        plan = plan_of(grid)
        amounts = sorted({each.tokens for each in plan})
        assert len(amounts) == 3 and amounts[-1] <= one_pass, one_pass
        assert missing(plan) == set(), one_pass
    with pytest.raises(ConfigError, match=r"BATCH=16 is too large .* takes 2048 tokens, .* is 1536"):
        FULL.fitted(4 * 2_048 - 1)
    epochs = replace(FULL, tokens=())
    assert epochs.fitted(2_048) == epochs
    with pytest.raises(ConfigError, match="BATCH=16 is too large"):
        epochs.fitted(2_047)


@pytest.mark.slow
def test_what_a_plan_cannot_show_is_what_the_fitter_will_refuse() -> None:
    """Losses that follow a law exactly: nothing but what the plan missing_requirements is left to refuse."""
    short = replace(FULL, tokens=(1_000_000, 2_000_000), repeated=(0, 0))
    few = replace(FULL.fitted(ONE_PASS), shapes=FULL.shapes[::6])
    for grid in (QUICK, FULL.fitted(ONE_PASS), short, few, replace(QUICK, tokens=())):
        plan = plan_of(grid)
        points = [
            Point(
                parameters=each.counts.nonembedding,
                tokens=each.tokens,
                loss=1.7
                + each.counts.nonembedding**-0.35 * 20
                + each.tokens**-0.35 * 40
                + each.config.seed * 1e-4,
                seed=each.config.seed,
            )
            for each in plan
        ]
        verdict = judge(points, starts=4, samples=4)
        (found,) = insufficient(plan).values()
        for name, title in TITLES.items():
            reasons = verdict.fits[name].reasons  # type: ignore[index]
            assert set(found.get(title, ())) <= set(reasons), (grid, name)
        if "isoFLOP" in found:
            assert exponent(isoflops(points)) is None
        assert ("telling whether the loss falls with size" in found) == (verdict.spread is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "given", "expected"),
    [
        (QUICK, "QUICK=1", {TITLES["chinchilla"], "isoFLOP"}),
        (replace(FULL, tokens=()), "EPOCHS=", {TITLES["chinchilla"], "isoFLOP"}),
    ],
)
def test_a_smaller_grid_says_what_it_cannot_show_and_what_it_leaves_out(
    grid: Grid, given: str, expected: set[str]
) -> None:
    plan = plan_of(grid)
    assert missing(plan) == expected
    lines = list(plan_warnings(plan, plan, workers=2, given=[given]))
    assert len(lines) == len(expected)
    assert all(line.startswith("resnet_bk: the plan is insufficient for ") for line in lines)
    assert all(line.endswith(f"leave out {given}") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("data_first", [False, True])
def test_a_budget_that_is_too_small_says_from_which_on_it_is_enough(data_first: bool) -> None:
    """data_first: where more data is dearer than any size, the first run of more data is one size alone."""
    whole = plan_of(FULL.fitted(ONE_PASS))
    if data_first:
        whole = [replace(each, seconds=each.tokens * 1e-3 + each.counts.total * 1e-6) for each in whole]
    all_cuts = list(reductions(whole))
    assert list(plan_warnings(whole, whole, workers=2, given=[])) == []
    poor = [cut for cut in all_cuts if missing(cut)]
    for plan in (poor[0], poor[-1]):
        told = dict.fromkeys(missing(plan), "")
        for line in plan_warnings(plan, whole, workers=2, given=["BUDGET="]):
            (title,) = re.findall(r"insufficient for (.*?): ", line)
            (told[title],) = re.findall(r"; about BUDGET=(\w+) is enough$", line)
        assert all(told.values())
        for title, budget in told.items():
            enough = within_budget(whole, seconds=parse_budget(budget), workers=2)
            larger = all_cuts[: all_cuts.index(enough) + 1]
            assert all(title not in missing(cut) for cut in larger)
            assert title in missing(all_cuts[len(larger)]), "a smaller one is not"


@pytest.mark.slow
def test_the_most_data_of_few_sizes_carries_no_law_of_size() -> None:
    """However many sizes there are at less data."""
    plan = plan_of(FULL.fitted(ONE_PASS))
    most = max(each.tokens for each in plan)
    cut = [each for each in plan if each.tokens < most or each.config.d_model == 64]
    assert missing(cut) == set()
    cut = [each for each in plan if each.tokens < most]
    cut += [each for each in plan if each.tokens == most][:2]
    assert missing(cut) == {TITLES["power"], TITLES["floor"]}


def test_names_of_amounts_that_are_no_thousands_differ() -> None:
    configs = [ScalingConfig(16, 2, tokens=tokens) for tokens in (600_000, 600_001, 600_999, 700_000)]
    assert names_of(configs) == ["d16_l2_600k", "d16_l2_600001", "d16_l2_600999", "d16_l2"]


@pytest.mark.slow
def test_two_shapes_of_a_width_are_timed_and_the_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations and memory of a deep model are exact on the line: its blocks are those of a shallow one."""
    timed: list[int] = []
    lengths: list[int] = []

    def seconds(build: Callable[[], nn.Module], spec: TextSpec, *, rows: int) -> float:
        assert (replace(spec, block_size=16), rows) == (SPEC, 2)
        lengths.append(spec.block_size)
        timed.append(len(build().backbone.blocks))  # type: ignore[union-attr, arg-type]
        return 1e-3 * timed[-1]

    monkeypatch.setattr(costs, "seconds_per_token", seconds)
    depths = (3, 1, 2, 5)
    configs = [
        ScalingConfig(16, layers, tokens=tokens, batch_size=2, n_seq=16, seed=seed)
        for layers in depths
        for tokens in (1000, 2000)
        for seed in (1, 2)
    ]
    plan = plan_runs(configs, SPEC, train_tokens=5000)
    assert timed == [1, 2]
    assert [each.tokens for each in plan] == [992, 992, 1984, 1984] * 4 and "992" in plan[0].line()
    for each in plan:
        own = each.config
        name, options = own.model()
        build = partial(build_model, name, options, SPEC, seed=1)
        assert each.flops == each.tokens * training_flops(build, block_size=16)
        kept = model_facts(build, SPEC, name=name, train_size=1).bytes_per_sample
        assert kept and each.ram_bytes == 400_000_000 + 16 * each.counts.total + 2 * kept
        assert each.seconds == pytest.approx(4 + 1e-3 * own.n_layers * (each.tokens + 10 / 3))
    (passes,) = plan_runs([ScalingConfig(16, 1, batch_size=2, epochs=3)], SPEC, train_tokens=5000)
    assert passes.tokens == 15_000 and "15,000" in passes.line()
    assert lengths == [16, 16, 128], "a run is timed at its own length"


def test_time_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on the machine changes no plan."""
    ticks = itertools.count(step=2.0)
    monkeypatch.setattr(time, "process_time", lambda: next(ticks))
    assert costs.seconds_per_token(lambda: nn.Embedding(32, 32), SPEC, rows=2) == 2.0 / (2 * 16)


REFUSED = [
    ("--epochs=-1", "EPOCHS=-1 is not a whole number from 1"),
    ("--epochs=0", "EPOCHS=0 is not a whole number from 1"),
    ("--epochs=x", "EPOCHS=x is not a whole number from 1"),
    ("--shapes=64,128", "SHAPES=64,128 is not possible; SHAPES=64,128x4,8: widths x layers"),
    ("--shapes=64x0", "SHAPES=64x0 is not possible"),
    ("--batch=0", "BATCH=0 is not a whole number from 1"),
    ("--batch=-3", "BATCH=-3 is not a whole number from 1"),
    ("--batch=1.5", "BATCH=1.5 is not a whole number from 1"),
    ("--device=foo", "DEVICE=foo is not known; one of cpu, cuda, mps"),
    ("--device=mps", "DEVICE=mps is not there: torch finds no Apple GPU"),
    ("--budget=abc", "BUDGET=abc is not a time; it takes seconds, minutes or hours"),
    ("--budget=0s", "BUDGET=0s is not a time"),
    ("--budget=-1m", "BUDGET=-1m is not a time"),
    ("--compare=gpt3", "COMPARE=gpt3 is not known; one of resnet_bk_features, gpt"),
    ("--corpus=foo", "CORPUS=foo is not a corpus; one of synthetic, pysource, wikitext2 or file:PATH"),
    ("--corpus=file:", "CORPUS=file: is not a corpus"),
    ("--corpus=file:/nope", "CORPUS=file:/nope is not there"),
]


@pytest.mark.parametrize(("argument", "message"), REFUSED)
def test_what_a_variable_does_not_take_is_refused_in_one_line_before_anything_is_opened(
    argument: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def opened(_: ScalingExperiments) -> None:
        raise AssertionError("the corpus was opened")

    monkeypatch.setattr(ScalingExperiments, "corpus", property(opened))
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["scaling", "plan", argument])
    assert run_main(main) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"error: {message}") and told.err.count("\n") == 1


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"DEVICE=cuda is not there: torch finds no CUDA or ROCm GPU"):
        parse(["plan", "--device=cuda"])


def test_what_is_given_is_taken() -> None:
    options = parse(["plan", "--epochs=2", "--batch=8", "--budget=10m", "--compare=gpt", "--device=cpu"])
    taken = options.epochs, options.batch, options.budget, options.compare, options.device
    assert taken == (2, 8, 600.0, "gpt", "cpu")


def test_shapes_are_every_width_with_every_number_of_layers() -> None:
    options = parse(["plan", "--shapes=64,128x4,8,4"])
    assert options.shapes == ((64, 4), (64, 8), (128, 4), (128, 8))


def test_other_shapes_are_trained_as_the_whole_grid_is() -> None:
    """One of them with every seed."""
    experiments: Any = SimpleNamespace(corpus=SimpleNamespace(train_tokens=ONE_PASS), log=print)
    grid = grid_of(parse(["plan", "--shapes=32,64x2", "--epochs=3"]), experiments)
    configs = configs_of(grid, architectures=ARCHITECTURES[:1], base=ScalingConfig(32, 2, epochs=3))
    assert names_of(configs) == ["d32_l2", "d32_l2_s2", "d32_l2_s3", "d64_l2"]


def test_the_command_of_the_document_is_the_same_sweep() -> None:
    """Its quick test, its defaults, and its spelling with and without an equals sign."""
    quick = parse(arguments_of(["--quick", "--epochs", "3"]))
    assert (quick.command, quick.shapes, quick.epochs) == ("all", ((64, 4), (64, 8), (128, 4), (128, 8)), 3)
    assert (quick.quick, quick.batch, quick.corpus) == (False, 32, "wikitext2")
    own = parse(arguments_of(["--batch-size=16", "--output-dir", "my_results", "--corpus", "synthetic"]))
    assert (own.shapes, own.epochs, own.batch, own.corpus) == (None, 5, 16, "synthetic")
    assert own.out == Path("my_results")


@pytest.mark.slow
def test_the_command_of_the_document_runs_as_a_file() -> None:
    command = [sys.executable, "scripts/run_scaling_experiments.py", "--epochs", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: EPOCHS=none is not a whole number from 1")


@pytest.mark.parametrize("command", ["fit", "plot", "report"])
def test_results_without_a_sweep_are_no_configuration(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", command, f"--out={tmp_path}"])
    assert run_main(main) == 2
    assert capsys.readouterr().err == f"error: there is no sweep in {tmp_path}; make scaling makes one\n"


def test_a_text_that_cannot_be_used_is_refused_by_the_name_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"CORPUS=file:\S+/empty cannot be used: there is too little text"):
        _ = ScalingExperiments(tmp_path, corpus=f"file:{tmp_path / 'empty'}", log=lambda _: None).corpus


def test_a_corpus_that_is_not_there_is_replaced_by_another_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "ROOT", tmp_path)  # where no data are
    with pytest.raises(ConfigError, match="or use CORPUS=pysource, which needs no files") as caught:
        _ = ScalingExperiments(tmp_path, corpus="wikitext2", log=lambda _: None).corpus
    assert "CONFIG_" not in str(caught.value)


def test_the_totals_on_the_default_corpus_are_as_documented() -> None:
    own = counts(64, 4, "resnet_bk").total
    text = (ROOT / "docs" / "scaling.md").read_text()
    assert own == 207_680 - 224 * 64 and f"224 x d_model lower: {own:,} at d64 l4" in text


@pytest.mark.parametrize("gone", ["listed", "read"])
def test_a_text_that_vanishes_while_it_is_opened_is_told_in_one_line(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.txt").write_text(f"{number} " * 3000)

    def content(file: Path) -> bytes:
        (text / "1.txt").unlink(missing_ok=True)
        return plainly(file)

    plainly = corpus._content
    if gone == "listed":
        (text / "3.txt").symlink_to(text / "none")
    else:
        monkeypatch.setattr(corpus, "_content", content)
    monkeypatch.setattr(sys, "argv", ["scaling", "plan", f"--corpus=file:{text}"])
    assert run_main(main) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: cannot read {text}/{'3' if gone == 'listed' else '1'}.txt: ")
    assert told.count("\n") == 1


def test_a_sweep_is_judged_by_the_corpus_that_it_was_made_with(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"d16_l2": ""}')
    config = {"corpus": "pysource", "data_sha256": ""}
    plain = ScalingResults(16, 2, 1, None, None, 1.0, 1, 1.0, [], status="failed", config=config)
    atomic.save(tmp_path / "d16_l2_results.json", plain.to_json())
    assert ScalingExperiments(tmp_path, corpus="pysource").results() == [plain]
    with pytest.raises(ConfigError, match=r"is of CORPUS=pysource, not of CORPUS=synthetic; give the same"):
        ScalingExperiments(tmp_path).results()
    with pytest.raises(ConfigError, match="a configuration is of CORPUS=synthetic, not of CORPUS=pysource"):
        ScalingExperiments(tmp_path, corpus="pysource").run([ScalingConfig(16, 2)])
