"""What the documents say exists, and every command of README and the tutorials is run by some test."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kconfiglib
import pytest

from tests.contract.making import table
from tests.support.examples import told_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / "docs").rglob("*.md"),
]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))

# How each command of README and the tutorials is tested: RUN here, as it stands; DRY by make -n, where it
# would call a terminal or this very test; or by the test that is named: a file::function, or a directory in
# which some file holds the command word by word.
RUN, DRY, END_TO_END = "run", "dry", "tests/e2e"
OWN_TORCH = "tests/contract/test_bootstrap.py::test_a_torch_of_an_existing_environment_is_kept"
WITHOUT_VENV = "tests/contract/test_bootstrap.py::test_without_venv_nothing_is_installed"
NEW_MODEL = "tests/contract/test_scaffold.py::test_a_new_model_passes_the_tests_of_models"
IN_EXTERNAL = "tests/contract/test_scaffold.py::test_new_plug_ins_of_external_are_written_there"
NEW_DATA = "tests/contract/test_scaffold.py::test_a_new_data_set_trains_at_once"
NEW_TASK = "tests/contract/test_scaffold.py::test_a_model_of_a_new_task_trains_at_once"
EXTERNAL = "tests/e2e/test_external.py::test_it_is_kept_until_it_is_forgotten"
INSTALL = "tests/anneal/test_install.py::test_an_editable_installation_has_this_package_alone"
ON_PATH = "tests/anneal/test_install.py::test_the_tree_on_the_path_of_python_is_enough"
SETTINGS = "tests/contract/test_docs.py::test_the_settings_of_a_tutorial_are_possible"
FINE_TUNED = "tests/e2e/test_finetune.py::test_a_run_is_fine_tuned_on_a_folder_of_images"
FETCH = "tests/extras/test_fetch.py::test_what_is_downloaded_is_shown_first_and_pinned"
COMMANDS = {
    "make fetch REPO=owner/name DIRECTORY=../my-llama": FETCH,
    ".venv/bin/python -m scripts.sample_images data/shapes": FINE_TUNED,
    "make train-finetune-resnet": FINE_TUNED,
    "make train-finetune-resnet CONFIG_INITIAL_WEIGHTS= CONFIG_RESET_HEAD=n CONFIG_FREEZE= "
    "CONFIG_LAYER_DECAY=1.0": FINE_TUNED,
    "make defconfig-finetune-resnet": RUN,
    "make setconfig SET=\"FREEZE='stem stages.0' LAYER_DECAY=0.7\"": SETTINGS,
    "make defconfig-lenet5": RUN,
    "make new-model NAME=my_net TASK=my_task": NEW_TASK,
    'make setconfig SET="DATASET_TAGGED=y DATA_DIR=../texts JSONL_FILE=train.jsonl"': SETTINGS,
    'make setconfig SET="TABULAR_TARGETS=urgent,billing TABULAR_TARGET_LABELS=y CLASS_WEIGHTS=balanced"'
    "": SETTINGS,
    "make train CONFIG_BEST_METRIC=entity_f1": END_TO_END,
    'make setconfig SET="DATASET_CHAT=y DATA_DIR=../chats CHAT_FILE=chat.jsonl BLOCK_SIZE=512"': SETTINGS,
    "make train CONFIG_BEST_METRIC=exact_match": END_TO_END,
    "make defconfig-chat-tiny": RUN,
    "make sweep SWEEP=chat-tiny": DRY,
    'make sample PROMPT="Capital of Chile?" TEMPERATURE=0': END_TO_END,
    "make train CONFIG_BEST_METRIC=loss CONFIG_EARLY_STOP_EVALS=3 CONFIG_HOLDOUT=5000": END_TO_END,
    "make train CONFIG_METRICS=macro_f1,roc_auc CONFIG_CLASS_WEIGHTS=balanced": END_TO_END,
    "make defconfig-lenet5 && make train": END_TO_END,
    "make runs": RUN,
    "make ab A=lenet5+fp32 B=lenet5+bf16": END_TO_END,
    "make watch": RUN,
    "make profile": END_TO_END,
    "make doctor": RUN,
    "make defconfig-resnet18": RUN,
    "make defconfig-gpt2-tiny": RUN,
    "make defconfig-gpt2": RUN,
    'make setconfig SET="DATASET_IMAGE_FOLDER=y DATA_DIR=../photos IMAGE_SIZE=64"': SETTINGS,
    "make setconfig SET=\"IMAGE_FOLDER_GROUP='p[0-9]+'\"": SETTINGS,
    'make setconfig SET="TARGET_EFFECTIVE_BATCH=32 NUM_EPOCHS=20"': SETTINGS,
    'make setconfig SET="TARGET_EFFECTIVE_BATCH=16 NORM_BATCH=16"': SETTINGS,
    "PYTHONPATH=DIR DIR/.venv/bin/python program.py": ON_PATH,
    'make setconfig SET="DATASET_JSONL=y DATA_DIR=../reviews MAX_STEPS=150"': SETTINGS,
    "make data-check": END_TO_END,
    'make setconfig SET="AUGMENT_RESIZED_CROP=y AUGMENT_FLIP_HORIZONTAL=y AUGMENT_BRIGHTNESS=0.3 '
    'AUGMENT_CONTRAST=0.3"': SETTINGS,
    'make setconfig SET="DATASET_TEXT_FILES=y DATA_DIR=../texts"': SETTINGS,
    "make defconfig-tabular-regression": RUN,
    'make setconfig SET="DATASET_TABULAR=y DATA_DIR=../houses TABULAR_FILE=houses.csv TABULAR_TARGETS=price"'
    "": SETTINGS,
    "make train CONFIG_MODEL_TIMM=y CONFIG_TIMM_NAME=resnet18 CONFIG_TARGET_EFFECTIVE_BATCH=128": DRY,
    "make train CONFIG_MODEL_HUGGINGFACE=y CONFIG_HUGGINGFACE_DIR=models/my-vit": DRY,
    'make setconfig SET="MODEL_HUGGINGFACE=y HUGGINGFACE_INPUT_CAUSAL=y HUGGINGFACE_DIR=../my-llama"'
    "": SETTINGS,
    'make setconfig SET="MODEL_HUGGINGFACE=y HUGGINGFACE_INPUT_TEXT=y HUGGINGFACE_DIR=../my-bert '
    'RESET_HEAD=y DATASET_JSONL=y DATA_DIR=../reviews BLOCK_SIZE=128 LEARNING_RATE=0.00005"': SETTINGS,
    "make predict INPUT=texts.txt": DRY,
    "make export FORMAT=huggingface DIRECTORY=my-classifier": DRY,
    'make setconfig SET="MODEL_HUGGINGFACE=y HUGGINGFACE_INPUT_CAUSAL=y HUGGINGFACE_DIR=../my-llama '
    "ADAPT_LORA=y LEARNING_RATE=0.0002 DATASET_CHAT=y DATA_DIR=../chats CHAT_FILE=chat.jsonl "
    'BLOCK_SIZE=512 BUDGET_EPOCHS=y NUM_EPOCHS=3"': SETTINGS,
    "make export MERGE=y BEST=1 DIRECTORY=tuned": DRY,
    'make setconfig SET="DATASET_TEXT_FILES=y DATA_DIR=../texts BLOCK_SIZE=512"': SETTINGS,
    'make setconfig SET="DATASET_TOKEN_BINS=y VOCAB_SIZE=32000 DATA_DIR=../tokens"': SETTINGS,
    'make setconfig SET="TABULAR_TARGETS=kind TABULAR_TARGET_CLASSES=y"': SETTINGS,
    'make setconfig SET="DEVICE_CUDA=y NUM_DEVICES=8 DIST_NNODES=2"': SETTINGS,
    'make setconfig SET="SLURM_PARTITION=gpu SLURM_TIME=12:00:00"': SETTINGS,
    "make train CONFIG_MAX_STEPS=2000": DRY,
    "make train CONFIG_BUDGET_STEPS=y CONFIG_MAX_STEPS=20": DRY,
    'make sample PROMPT="Once upon"': END_TO_END,
    "make plan GPU=all": END_TO_END,
    "make plan GPU=all PRICE=2.5": END_TO_END,
    "make plan GPU=all PRICE=list": END_TO_END,
    "make plan GPU=h100-80gx3 PRICE=12": END_TO_END,
    "make plan GPU=rtx4090": END_TO_END,
    "make plan GPU=h100-80gx4:70G": END_TO_END,
    "make plan GPU=rtx4090 CONFIG_GRAD_CHECKPOINT_BLOCKS=y": END_TO_END,
    "make plan GPU=rtx4090 CONFIG_PRECISION_FP32=y": END_TO_END,
    "make plan GPU=h100-80gx8": END_TO_END,
    "make plan GPU=a100-40gx16 CONFIG_DIST_NETWORK_GBIT=25": END_TO_END,
    "make plan GPU=h100-80g:70G CONFIG_AUTO_METHOD_TABLE=y": END_TO_END,
    "make sbatch": END_TO_END,
    "make submit": DRY,
    "make launch-print CONFIG_DIST_NNODES=2 CONFIG_DIST_ENDPOINT=10.0.0.1:29500": END_TO_END,
    "make train CONFIG_DIST_NNODES=2 CONFIG_DIST_ENDPOINT=10.0.0.1:29500": DRY,
    "make explain SYM=MY_NET_WIDTH": NEW_MODEL,
    "make kconfig-docs": END_TO_END,
    "make diffconfig A=lenet5+fp32 B=lenet5+bf16": RUN,
    "make sweep SWEEP=my.yaml": END_TO_END,
    'make runs WHERE="model=lenet5" SORT=accuracy': RUN,
    "make curve THRESHOLD=0.9": END_TO_END,
    "make elastic-check GPU=a100-40g": RUN,
    "make elastic-demo": END_TO_END,
    "make scaling-plan QUICK=1": END_TO_END,
    "make scaling QUICK=1": DRY,
    "make plots": END_TO_END,
    "make report": END_TO_END,
    'make compare RUNS="20261121 20261122"': END_TO_END,
    "make curve": END_TO_END,
    "make eval": END_TO_END,
    "make eval BEST=1": END_TO_END,
    "make resume RUN=20261121T093620Z": END_TO_END,
    "make rerun": END_TO_END,
    "make explain SYM=LEARNING_RATE": RUN,
    "make defconfig-resnet18 && make train": END_TO_END,
    "make defconfig-resnet18+bf16": RUN,
    "make menuconfig": DRY,
    "make plan": END_TO_END,
    "make plan GPU=h100-80gx4": END_TO_END,
    "make preflight": END_TO_END,
    "make train CONFIG_SEED=7": END_TO_END,
    "make train-resnet50": END_TO_END,
    "make help": RUN,
    "make defconfig-gpt2-tiny && make train": END_TO_END,
    "make sample PROMPT=import": END_TO_END,
    "make train CONFIG_INITIAL_WEIGHTS=runs/resnet18/20261121T093620Z-a1f5e51b CONFIG_RESET_HEAD=y"
    "": END_TO_END,
    "make EXTERNAL=../my_lab new-model NAME=my_net TASK=classify": IN_EXTERNAL,
    "make export DIRECTORY=exported": DRY,
    "make export FORMAT=onnx DIRECTORY=out": DRY,
    "make export FORMAT=pt2 DIRECTORY=out-pt2 BEST=1": END_TO_END,
    "make predict INPUT=photos": END_TO_END,
    "make predict INPUT=../photos": END_TO_END,
    'find photos -name "*.png" ! -name broken.png | make predict INPUT=-': END_TO_END,
    'make predict INPUT="a.jpg b.png" OUT=found.csv': END_TO_END,
    "make predict RUN=20261121T093620Z BEST=1 INPUT=rows.csv OUT=found.jsonl TOP=3": END_TO_END,
    "make predict INPUT=questions.jsonl OUT=answers.jsonl TOKENS=100": END_TO_END,
    "make bench": DRY,
    "python3 -m venv .venv": OWN_TORCH,
    ".venv/bin/pip install torch --index-url INDEX_URL": OWN_TORCH,
    "make train": END_TO_END,
    "make train VENV=": WITHOUT_VENV,
    "make new-model NAME=my_net TASK=classify": NEW_MODEL,
    "make defconfig-my_net && make train": END_TO_END,
    "make EXTERNAL=../my_lab list-defconfigs": EXTERNAL,
    "pip install -e .": INSTALL,
    "make new-data NAME=my_data": NEW_DATA,
    "make defconfig-my_data && make train": NEW_DATA,
    "make new-task NAME=my_task": NEW_TASK,
    "make new-model NAME=my_other TASK=my_task": NEW_TASK,
    "make test": DRY,
    "make test-deletion": DRY,
    "make test-long": DRY,
    **{command: END_TO_END for commands in told_of("README_END_TO_END") for command, *_ in commands},
    **dict.fromkeys((command for commands in told_of("README_RUN") for command in commands), RUN),
    **dict.fromkeys((command for commands in told_of("README_DRY") for command in commands), DRY),
}

MADE_BY_USE = (
    *(".venv", "data", "runs", "build", "include", "defconfigs/my_net", "models/my_net"),
    "tests/golden/my_net.json",
    *("lib/data/datasets/my_data", "train/tasks/my_task", "my_lab", "../my_lab"),
)
PLACEHOLDERS = {"CONFIG_NAME", "CONFIG_X", "INDEX_URL"}
# Variables of other Kconfig tools, of which docs/configuration.md says how it is here.
OF_OTHER_TOOLS = {
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "ANNEAL_EXTERNAL",  # of python, in the place of make's EXTERNAL=
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "KCONFIG_WARN_UNKNOWN_SYMBOLS",
    "KCONFIG_WERROR",
    "KCONFIG_OVERWRITECONFIG",
}


def code_of(text: str) -> tuple[list[str], list[str]]:
    """Lines of fenced blocks, and code spans outside them."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.M | re.S)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    indented = [line.strip() for line in outside.splitlines() if line.startswith("    ")]
    return [line for block in blocks for line in block.splitlines()] + indented, spans


def commands_of(text: str) -> list[str]:
    """Commands of the shell blocks of a document, without the comments after them."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S)
    lines = (re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def make_words(text: str) -> Iterator[str]:
    """Every target and variable that the code of a document gives to make."""
    lines, spans = code_of(text)
    for line in [*lines, *spans]:
        for command in re.split(r"&&|;", re.sub(r"\s#.*", "", line)):
            if command.split()[:1] == ["make"]:
                yield from shlex.split(command)[1:]


@functools.cache
def make_database() -> str:
    command = ["make", "-npq", "printvars"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def make_variables() -> set[str]:
    return {name for row in table() for name in row.variables}


def unknown_make_words(text: str) -> list[str]:
    targets = set(re.findall(r"^([\w.+-]+):", make_database(), flags=re.M))
    targets |= {"defconfig-NAME", "NAME_defconfig", "train-NAME"}
    targets |= {
        f"defconfig-{name}"
        for name in re.findall(r"make (?:EXTERNAL=\S+ )?new-(?:model|data) NAME=(\w+)", text)
    }
    return [word for word in make_words(text) if not word_exists(word, targets, make_variables())]


def word_exists(word: str, targets: set[str], variables: set[str]) -> bool:
    name, equals, _ = word.partition("=")
    if equals:
        return name in variables or name.startswith("CONFIG_")
    base, *fragments = word.split("+")
    known = all(
        fragment == "FRAGMENT" or (ROOT / "defconfigs/fragments" / fragment).exists()
        for fragment in fragments
    )
    return word.startswith("-") or (base in targets and known)


@functools.cache
def symbols_of_the_tree() -> frozenset[str]:
    tree = kconfiglib.Kconfig(str(ROOT / "Kconfig"), warn_to_stderr=False)
    return frozenset({*tree.syms, *tree.named_choices})


def unknown_symbols(text: str) -> list[str]:
    known = symbols_of_the_tree() | set(re.findall(r"^config (\w+)$", text, flags=re.M))
    named = set(re.findall(r"\bCONFIG_[A-Z][A-Z0-9_]*(?![*\w])", text)) - PLACEHOLDERS
    _, spans = code_of(text)
    bare = {match[0] for span in spans if (match := re.fullmatch(r"([A-Z][A-Z0-9]*_[A-Z0-9_]+)(=.*)?", span))}
    bare = {re.sub(r"=.*", "", name) for name in bare} - PLACEHOLDERS - OF_OTHER_TOOLS - make_variables()
    return sorted({name.removeprefix("CONFIG_") for name in named | bare} - known)


def missing_paths(text: str, *, base: Path) -> list[str]:
    lines, spans = code_of(text)
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    code = [re.sub(r"(^|\s)#.*", "", line) for line in [*lines, *spans]]
    words = [word.rstrip(",.:;") for line in code for word in line.split()]
    own = [
        word for word in words if re.fullmatch(r"\.?[\w.-]+(/[\w.*<>-]+)*/?", word) and looks_like_path(word)
    ]
    placeholder = re.compile("<|NAME|DIR")
    candidates = {word for word in own if not word.startswith(MADE_BY_USE) and not placeholder.search(word)}
    absent = {word for word in candidates if not exists(word.rstrip("/").partition("::")[0])}
    return sorted(absent | {link for link in links if not (base / link).exists()})


def exists(word: str) -> bool:
    """A file, a directory, a pattern of them, or a module that is named without its suffix."""
    return any(ROOT.glob(word)) or any(ROOT.glob(f"{word}.py"))


def looks_like_path(word: str) -> bool:
    return "/" in word or word.endswith((".md", ".lock", ".toml", ".txt"))


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert unknown_make_words(text) == []
    assert unknown_symbols(text) == []
    assert missing_paths(text, base=document.parent) == []


def test_what_does_not_exist_is_found() -> None:
    text = """Run `make trian`, `make train LR=3` or `make defconfig-lenet5+nope`.
```sh
make test && make tset   # make comment
```
Set `CONFIG_NO_SUCH`, `NO_SUCH_EITHER` and `CONFIG_SEED`.
Read `lib/nothing.py`, `nothing.md`, [x](y.md), `lib/config` and `lib/`.
"""
    assert unknown_make_words(text) == ["tset", "trian", "LR=3", "defconfig-lenet5+nope"]
    assert unknown_symbols(text) == ["NO_SUCH", "NO_SUCH_EITHER"]
    assert missing_paths(text, base=ROOT) == ["lib/nothing.py", "nothing.md", "y.md"]


def test_every_command_of_readme_and_tutorials_is_tested_and_no_other() -> None:
    pages = {page: set(commands_of(page.read_text(encoding="utf-8"))) for page in DOCUMENTS}
    first = [commands for page, commands in pages.items() if page in (ROOT / "README.md", *TUTORIALS)]
    assert len(first) > 5 and set().union(*first) - set(COMMANDS) == set()
    assert set(COMMANDS) - set().union(*pages.values()) == set(), "no page has them"


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command, how in COMMANDS.items() if how not in (RUN, DRY)])
def test_a_test_runs_the_command(command: str) -> None:
    place, _, function = COMMANDS[command].partition("::")
    if function:
        assert f"def {function}(" in (ROOT / place).read_text(encoding="utf-8")
    else:
        files = [*(ROOT / place).glob("test_*.py"), *(ROOT / "tests" / "models").glob("*/example.py")]
        assert any(command in texts_of(file) for file in files)


@functools.cache
def texts_of(file: Path) -> set[str]:
    """The string literals of a Python file: one command may be the beginning of another."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command, how in COMMANDS.items() if how == RUN])
def test_the_command_runs(command: str, unused: Path) -> None:
    environment = {**os.environ, "VENV": "", "PYTHON": sys.executable}
    done = subprocess.run(["sh", "-c", command], cwd=unused, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [command for command, how in COMMANDS.items() if how == DRY])
def test_the_command_is_understood(command: str) -> None:
    words = shlex.split(command)
    done = subprocess.run([words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Tests")[2]
    first, *others = commands_of(section)[:3]
    assert lines[-5:] == ["make check", first, "make test-extras", *others]
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")


def missing_definitions(text: str) -> list[str]:
    """What a text calls `path.py:name` without such a function or class being there."""
    wanted = re.findall(r"\b([\w/]+\.py):([A-Za-z_]\w*)", text)
    return [
        f"{path}:{name}"
        for path, name in wanted
        if not re.search(
            rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
        )
    ]


def test_the_pictures_of_the_architecture_name_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert text.count(".py:") >= 15, "the pictures are gone"
    assert missing_definitions(text) == []
    assert missing_definitions("lib/nn/batch_norm.py:nothing lib/nn/batch_norm.py:GhostBatchNorm2d") == [
        "lib/nn/batch_norm.py:nothing"
    ]
