"""Every command of every page is one that make would begin, and every link leads to a page and a heading."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.data import types
from lib.kconf.cli import main as kconf_main
from lib.sweeps.experiment import read_experiment
from lib.sweeps.runner import resolved_runs
from tests.contract.test_readme import DOCUMENTS, ROOT, TUTORIALS, code_of, commands_of, unknown_symbols
from tests.e2e.forked import Forked

PAGES = [page for page in DOCUMENTS if page.name != "CHANGELOG.md"]
# Makes a command a form rather than a command: a word of the table of targets, or three dots.
FORM = re.compile(r"NAME|FRAGMENT|DIRECTORY|\.\.\.|<|\*")


def make_commands(text: str) -> Iterator[str]:
    """Every call of make in the code of a page, lines that end in a backslash joined."""
    lines, spans = code_of(text.replace("\\\n", " "))
    for line in [*lines, *spans]:
        for command in re.split(r"&&|;|\|", re.sub(r"\s#.*", "", line)):
            words = command.split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # of the environment
                words.pop(0)
            if words[:1] == ["make"]:
                yield " ".join(words)


@functools.cache
def fault_of(command: str) -> str:
    """What make would say of the goals and variables of a command before it begins; "" if nothing."""
    words = shlex.split(command)[1:]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    goals = [word for word in words if "=" not in word and not word.startswith("-")]
    names = {"KCONFIG_MAKE_GOALS": " ".join(goals or ["all"]), "KCONFIG_MAKE_VARIABLES": " ".join(given)}
    judged = subprocess.run(
        ["awk", "-v", "mode=check", "-f", "scripts/targets.awk", "scripts/targets"],
        cwd=ROOT,
        env={**os.environ, **given, **names},
        capture_output=True,
        text=True,
    )
    return "" if judged.returncode == 0 else judged.stdout.strip()


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ +(.*?) *$", text, flags=re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def broken_links(text: str, *, page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


def test_the_table_of_specs_has_every_class_and_field() -> None:
    section = (
        (ROOT / "docs/tutorials/model.md").read_text("utf-8").split("### What spec has")[1].split("## 3")[0]
    )
    rows = re.findall(r"^\|[^|]*\| `(\w+)` \| (.*) \|$", section, flags=re.M)
    listed = {name: set(re.findall(r"`(\w+)`", fields)) for name, fields in rows}
    kinds = [each for name, each in vars(types).items() if re.fullmatch("[A-Z].*Spec", name)]
    # Of the first sentence, or none that a model needs.
    others = {"name", "synthetic", "published", "validation_tokens", "validation_bytes"}
    actual = {
        each.__name__: {field.name for field in dataclasses.fields(each)} - others
        for each in kinds
        if each not in (types.TokensSpec,)
    }
    assert listed == actual
    first = re.findall(r"`spec\.(\w+)`", section.split("Further")[0])
    assert first and all(hasattr(each, name) for each in kinds for name in first)


PROGRAM = re.compile(r"python -m (scripts\.[\w.]+|train\b)|python (scripts/\w+\.py)")
PROGRAMS = {found[1] or found[2] for page in PAGES for found in PROGRAM.finditer(page.read_text("utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_that_a_page_names_says_what_it_does(name: str, tmp_path: Path) -> None:
    if len(PROGRAMS) < 10:
        pytest.fail("programs are not found")
    if "/" in name:
        command = [sys.executable, name, "--help"]
        shown = subprocess.check_output(command, cwd=ROOT, stderr=subprocess.STDOUT, text=True)
    else:
        program = Forked(name, ["--help"], environment=os.environ, output=tmp_path / "output")
        shown, _ = program.communicate()
        assert program.returncode == 0, shown
    usage, description, *_ = shown.split("\n\n")
    assert usage.startswith("usage: ") and len(description.split()) > 3


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_make_would_begin_every_command(page: Path) -> None:
    commands = set(make_commands(page.read_text(encoding="utf-8")))
    faults = {command: fault_of(command) for command in sorted(commands) if not FORM.search(command)}
    assert {command: fault for command, fault in faults.items() if fault} == {}


def test_a_command_that_make_would_refuse_is_found() -> None:
    text = "```sh\nmake trian\nOMP_NUM_THREADS=1 make runs GPU=h100-80g\n```\nor `make plan RUN=`\n"
    assert [*make_commands(text)] == ["make trian", "make runs GPU=h100-80g", "make plan RUN="]
    assert "trian is not a target" in fault_of("make trian")
    assert fault_of("make runs GPU=h100-80g").startswith("GPU is not used by make runs")
    assert fault_of("make plan GPU=").startswith("GPU= is empty")
    assert fault_of("make -n defconfig-lenet5+bf16 train CONFIG_SEED=7") == ""


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.name)
def test_the_settings_of_a_tutorial_are_possible(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its configurations and settings in their order, from one directory; what they lead to is configured.

    As make calls them (test_make.py), without a process for each.
    """
    monkeypatch.setenv("KCONFIG_OUTPUT", str(tmp_path))
    monkeypatch.setenv("KCONFIG_CONFIG", str(tmp_path / ".config"))
    commands = commands_of(page.read_text(encoding="utf-8"))
    configure = [each for each in commands if re.match(r"make (defconfig-\S+|setconfig .*)$", each)]
    for command in (each for each in configure if "my_" not in each):
        goal, *settings = shlex.split(command)[1:]
        words = ["defconfig", goal.removeprefix("defconfig-")]
        if goal == "setconfig":
            (setting,) = settings
            words = [goal, "--", setting.removeprefix("SET=")]
        assert kconf_main(words, root=ROOT) == 0, f"{command}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_heading(page: Path) -> None:
    assert broken_links(page.read_text(encoding="utf-8"), page=page) == []


def test_a_link_to_nowhere_is_found() -> None:
    page = ROOT / "docs" / "memory.md"
    text = "[a](memory.md#save-memory) [b](memory.md#no) [c](no.md) [d](#limits-of-the-prediction) [e](#no)"
    assert broken_links(text, page=page) == ["memory.md#no", "no.md", "#no"]


def test_every_page_is_linked_from_another() -> None:
    """So that a reader who starts at README finds it."""
    linked = {ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"}
    for page in DOCUMENTS:
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        linked |= {(page.parent / link).resolve() for link in links if "://" not in link} - {page}
    folders = {folder for folder in linked if folder.is_dir()}
    assert {page.name for page in DOCUMENTS if page not in linked and page.parent not in folders} == set()


# Options, classes, strategies and scripts of document 001, but for those that only LatentWire's model has.
NAMES = {
    "000": (
        "CPU_ONLY", "TIER_1_COMMODITY", "TIER_2_PROSUMER", "TIER_3_HIGH_END", "TIER_4_DATACENTER",
        "TIER_CONFIGS", "detect_compute_tier",
    ),
    "001": (
        "ElasticGPUConfig", "--elastic_gpu", "--elastic_base_batch", "--elastic_target_util",
        "--sequential_models", "--samples", "--epochs", "CUDA_VISIBLE_DEVICES", "TORCH_DTYPE", "single_gpu",
        "ddp", "ddp_4gpu", "model_split", "hybrid_3gpu", "hybrid_4gpu", "scripts/test_elastic_gpu.py",
        "scripts/run_elastic_gpu_demo.sh", "gradient accumulation",
    ),
    "002": (
        "CONFIG_BATCH_SIZE", "CONFIG_COMPILE_AUTO", "CONFIG_COMPILE_MANUAL", "CONFIG_COMPILE_MODEL",
        "CONFIG_HYPER_PARAM_AUTO", "CONFIG_HYPER_PARAM_MANUAL", "CONFIG_TARGET_EFFECTIVE_BATCH",
        "lib/hyperparams.py",
    ),
    "003": (
        "--config", "--env", "--logdir", "--max_steps", "--num-workers", "--run_name",
        "--single_worker_test", "--tpu", "CheckpointManager", "EXPERIMENT_CONFIG",
        "PuzzleDataset", "REDUCE_SUM", "RUN_NAME", "XLA_TENSOR_ALLOCATOR_MAXSIZE", "XLA_USE_BF16",
        "CompileTime", "ExecuteTime", "ReduceTime", "TransferToDeviceTime", "MXU", "compute_lr_with_warmup",
        "debug_tensor", "download_dataset_from_gcs", "drop_last", "torch.save",
        "kellen/configs/base_sudoku_tpu.yaml", "kellen/configs/experiments/e2_1_ema_ablation.yaml",
        "kellen/configs/experiments/e2_2_t2_n2.yaml", "kellen/data_loader_tpu.py",
        "kellen/scripts/launch_experiment.sh", "kellen/scripts/run_sweep.sh", "kellen/train_tpu.py",
        "load_config", "pretrain.py", "resume_from_checkpoint", "save_checkpoint_to_gcs",
        "test_data_sharding", "test_gradient_sync",
    ),
    "004": (
        "--batch-size", "--device", "--epochs", "--output-dir", "--quick", "ScalingConfig",
        "ScalingResults", "all_scaling_results.json", "d64_l4_results.json", "run_scaling_experiments.py",
        "scaling_law.json", "tests/test_scaling_experiments.py",
    ),
}  # fmt: skip


def rows_of(document: str) -> list[list[str]]:
    """The rows of the tables of names of a design document."""
    text = (ROOT / "docs" / "design-documents.md").read_text(encoding="utf-8")
    if f" of document {document}\n" not in text:
        pytest.skip(f"the plug-in of document {document} was removed")
    section = text.split(f"### Names and commands of document {document}\n")[1].split("\n### Figures")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("document", NAMES)
def test_every_name_of_a_document_is_mapped_to_one_that_exists(document: str) -> None:
    rows = rows_of(document)
    theirs = " ".join(row[0] for row in rows)
    assert [
        name for name in NAMES[document] if not re.search(rf"(?<![\w-]){re.escape(name)}\b", theirs)
    ] == []
    for row in rows:
        for path in re.findall(r"`((?:lib|models|train|scripts|tests)/[\w./-]+)`", row[1]):
            assert (ROOT / path).exists(), path
        for path, function in re.findall(r"`([\w/]+\.py)`, function `(\w+)`", row[1]):
            assert f"\ndef {function}(" in (ROOT / path).read_text(), function
        assert row[1] and not unknown_symbols(row[1]), row


EXPERIMENTS = [
    (page.name, text)
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    if re.search(r"^config:", text, flags=re.M)
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), EXPERIMENTS)
def test_an_experiment_file_of_a_page_can_be_run(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("about: what others start from\n", encoding="utf-8")
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    experiment = read_experiment(tmp_path / "my.yaml")
    points = experiment.points or ({},)  # a search proposes its own
    assert resolved_runs(dataclasses.replace(experiment, points=points), root=ROOT), page


def test_experiment_files_of_pages_are_found() -> None:
    assert len(EXPERIMENTS) > 2


def test_what_an_option_needs_can_be_read_without_the_order_of_operators() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    needs = re.findall(r"needs `([^`]+)`", page)
    assert any("&& (" in each for each in needs)
    outside = {each: re.sub(r"\([^()]*\)", "", each) for each in needs}
    assert [each for each, rest in outside.items() if "&&" in rest and "||" in rest] == []
