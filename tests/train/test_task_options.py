"""What a task cannot do is said in one line, with what to do, before a run exists."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lib import kconf
from lib.config import config_from_values
from lib.data.inputs import unlabelled
from lib.data.types import Dataset, ImageSpec
from lib.errors import ConfigError
from train.tasks.metrics import check_figures
from train.training_data import open_to_train

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"HYPER_PARAM_MANUAL": "y", "TARGET_EFFECTIVE_BATCH": "4", "BATCH_SIZE": "4"}
TABLE = {"DATASET_TABULAR": "y", "TABULAR_TARGETS": "l1,l2", "TABULAR_TARGET_LABELS": "y"}
TAGS = {"DATASET_TAGGED": "y", "TOKENIZER_BYTE": "y", "LABEL_SMOOTHING": "0.0"}
CHATS = {"DATASET_CHAT": "y", "TOKENIZER_BYTE": "y", "LABEL_SMOOTHING": "0.0"}
MODELS = {
    "table": "tabular-regression",
    "tags": "gpt2-sst2",
    "chat": "gpt2-sst2",
    "friedman": "tabular-regression",
}
ROWS = [f"{row / 7},{row % 2},{row % 3 // 2}" for row in range(40)]
TEXTS = [{"tokens": ["Ada", f"left{row}"], "tags": ["B-PER", "O"]} for row in range(30)]
PAIRS = [{"prompt": "Hi", "completion": f"{row:02}"} for row in range(30)]


def refusal(tmp_path: Path, which: str, options: dict[str, str], *, file: str = "") -> str:
    """One line, of an error that ends with status 2; nothing is written."""
    (tmp_path / "table.csv").write_text(file or "\n".join(["x,l1,l2", *ROWS]))
    (tmp_path / "train.jsonl").write_text(file or "\n".join(map(json.dumps, TEXTS)))
    (tmp_path / "chat.jsonl").write_text(file or "\n".join(map(json.dumps, PAIRS)))
    kinds: dict[str, dict[str, str]] = {"table": TABLE, "tags": TAGS, "chat": CHATS}
    values = {**SMALL, **kinds.get(which, {}), **options}
    if which in kinds:
        values["DATA_DIR"] = str(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError) as failure:
        resolved = kconf.load(
            root=ROOT,
            config_file=ROOT / "defconfigs" / MODELS[which],
            overrides={f"CONFIG_{name}": value for name, value in values.items()},
        )
        open_to_train(config_from_values(resolved.values), root=tmp_path, log=lambda _: None)
    assert failure.value.exit_code == 2 and sorted(tmp_path.iterdir()) == before
    (line,) = str(failure.value).splitlines()
    return line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "options", "expected"),
    [
        (
            "table",
            {"METRICS": "roc_auk"},
            "CONFIG_METRICS: multilabel does not report 'roc_auk'; did you",
        ),
        ("table", {"METRICS": "top5_accuracy"}, "multilabel does not report 'top5_accuracy'"),
        ("friedman", {"METRICS": "roc_auc"}, "regress does not report 'roc_auc'; leave it empty"),
        ("tags", {"METRICS": "macro_f1"}, "tag does not report 'macro_f1'; leave it empty"),
        ("table", {"BEST_METRIC": "accuracy"}, "CONFIG_BEST_METRIC: multilabel does not report 'accuracy'"),
        ("table", {"BEST_METRIC": "roc_auc"}, "name it in CONFIG_METRICS, too: roc_auc"),
        ("friedman", {"BEST_METRIC": "rsme"}, "regress does not report 'rsme'; did you mean rmse"),
        ("tags", {"BEST_METRIC": "f1"}, "tag does not report 'f1'"),
        ("table", {"METRICS": "roc_auc", "EVAL_ROWS_MAX": "3"}, "CONFIG_EVAL_ROWS_MAX=3; raise that"),
        ("table", {"CLASS_WEIGHTS": "1,2,3"}, "has 3 numbers for 2 classes"),
        ("table", {"CLASS_WEIGHTS": "balance"}, 'is neither "balanced" nor positive numbers'),
        ("table", {"CLASS_WEIGHTS": "1,-2"}, 'is neither "balanced" nor positive numbers'),
        ("table", {"CLASS_WEIGHTS": "1,inf"}, 'is neither "balanced" nor positive numbers'),
        ("table", {"LABEL_SMOOTHING": "0.1"}, "mlp predicts several labels"),
        ("friedman", {"CLASS_WEIGHTS": "balanced"}, "CONFIG_CLASS_WEIGHTS=balanced are for labels"),
        ("tags", {"CLASS_WEIGHTS": "balanced"}, "gpt2 predicts tags; leave it empty"),
        ("table", {"TABULAR_TARGETS": "l1,l3"}, "has no column 'l3'"),
        ("tags", {"JSONL_FILE": "other.jsonl"}, "other.jsonl is not there"),
        ("tags", {"JSONL_VALIDATION_OTHER": "y"}, "validation.jsonl is not there"),
        ("chat", {"CHAT_FILE": "other.jsonl"}, "other.jsonl is not there"),
        ("chat", {"CHAT_VALIDATION_OTHER": "y"}, "validation.jsonl is not there"),
        ("chat", {"BLOCK_SIZE": "20"}, " takes 23 tokens, CONFIG_BLOCK_SIZE is 20: "),
        (
            "chat",
            {"LABEL_SMOOTHING": "0.1"},
            "CONFIG_LABEL_SMOOTHING=0.1 is for labels: gpt2 predicts tokens",
        ),
        ("chat", {"METRICS": "accuracy"}, "chat does not report 'accuracy'; leave it empty"),
        ("chat", {"BEST_METRIC": "exact"}, "chat does not report 'exact'; did you mean exact_match"),
        (
            "chat",
            {"TOKENIZER_BYTE": "n", "TOKENIZER_HUGGINGFACE": "y"},
            "CONFIG_TOKENIZER_DIR is empty; set it to the folder",
        ),
        ("table", {"EARLY_STOP_EVALS": "2", "EARLY_STOP_DELTA": "-1"}, "1 fault in the configuration"),
    ],
)
def test_what_cannot_be_done_is_refused(
    which: str, options: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path, which, options)


def lines(*texts: object, first: list[dict[str, object]] = TEXTS) -> str:  # type: ignore[assignment]
    return "\n".join(text if isinstance(text, str) else json.dumps(text) for text in (*first, *texts))


def chats(*texts: object) -> str:
    return lines(*texts, first=PAIRS)  # type: ignore[arg-type]


def said(*messages: object) -> str:
    return lines({"messages": [*messages]}, first=[])


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "file", "expected"),
    [
        ("table", "\n".join(["x,l1,l2", *ROWS, "1,2,0"]), "column 'l1' has '2' in row 41, not 0 or 1"),
        ("table", "\n".join(["x,l1,l2", *ROWS, "1,yes,0"]), "column 'l1' has 'yes' in row 41, not 0 or 1"),
        ("tags", lines({"tokens": ["a", "b"], "tags": ["O"]}), "train.jsonl:31 has 2 tokens and 1 tags"),
        ("tags", lines({"tokens": [], "tags": []}), 'train.jsonl:31: "tokens" is no list of texts'),
        ("tags", lines({"tokens": ["a"]}), 'train.jsonl:31 has no "tags": its keys are tokens; give it one'),
        ("tags", lines({"tokens": ["a"], "tags": [3]}), 'train.jsonl:31: "tags" is no list of texts'),
        ("tags", lines("", "{"), "train.jsonl:32 is no JSON object"),
        ("tags", lines("[1]"), "train.jsonl:31 is no JSON object: it is list"),
        ("tags", lines("null"), "train.jsonl:31 is no JSON object"),
        ("tags", "\n", "no text is left for training"),
        ("chat", "\n", "chat.jsonl: no text is left for training; add some"),
        ("chat", lines(*PAIRS[:1] * 3, first=[]), "these 3, or set CONFIG_CHAT_VALIDATION_OTHER=y"),
        ("chat", chats("{"), "chat.jsonl:31 is no JSON object"),
        (
            "chat",
            chats({"text": "x"}),
            "chat.jsonl:31 is no conversation of the format: it has the keys text, and",
        ),
        (
            "chat",
            chats({"messages": [USER, ASSISTANT]}),
            "keys messages, and the first line has prompt; give all",
        ),
        (
            "chat",
            chats({"prompt": "x"}),
            'chat.jsonl:31 has no "completion": its keys are prompt; give it one',
        ),
        (
            "chat",
            chats({"prompt": "x", "completion": ""}),
            'chat.jsonl:31: "completion" is empty; give a text',
        ),
        (
            "chat",
            chats({"prompt": ["x"], "completion": "y"}),
            'chat.jsonl:31: "prompt" is no text; give a text',
        ),
        (
            "chat",
            lines({"instruction": "x", "input": 3, "output": "y"}, first=[]),
            'chat.jsonl:1: "input" is no',
        ),
        ("chat", lines({"instruction": "x"}, first=[]), 'chat.jsonl:1 has no "output": its keys are instr'),
        ("chat", said(), 'chat.jsonl:1: "messages" is no list of messages; write [{"role": ...}, ...]'),
        ("chat", said("Hi"), 'chat.jsonl:1: "messages" is no list of messages'),
        ("chat", said(USER, USER), "chat.jsonl:1 has no message of the assistant; leave the line out"),
        ("chat", said(ASSISTANT, USER), "chat.jsonl:1 begins with an answer; leave the line out"),
        ("chat", said(USER | {"role": "usr"}, ASSISTANT), "message 1 has the role 'usr'; did you mean user?"),
        (
            "chat",
            said(USER | {"role": "human"}, ASSISTANT),
            "message 1 has the role 'human'; write user for it",
        ),
        (
            "chat",
            said(USER | {"role": 7}, ASSISTANT),
            "message 1 has the role 7; write one of system, developer, user, assistant, tool",
        ),
        ("chat", said(USER, {"role": "assistant"}), 'chat.jsonl:1, message 2 has no "content": its keys are'),
        ("chat", said(USER, ASSISTANT | {"content": ""}), 'chat.jsonl:1, message 2: "content" is empty'),
        (
            "chat",
            said(USER, ASSISTANT | {"tool_calls": []}),
            "message 2 has 'tool_calls': only role and content",
        ),
    ],
)
def test_a_fault_in_a_file_is_named_with_its_place(
    which: str, file: str, expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path, which, {}, file=file)


@pytest.mark.slow
def test_one_class_alone_has_no_area_under_a_curve(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("\n".join(["x,l1,l2", *(f"{row},0,1" for row in range(60))]))
    other = {"TABULAR_VALIDATION_OTHER": "y", "TABULAR_VALIDATION_FILE": "one.csv"}
    line = refusal(tmp_path, "table", {"METRICS": "roc_auc", **other})
    assert "roc_auc needs more than one class" in line and "have the same targets" in line


def test_metrics_are_not_refused_where_targets_are_not_known() -> None:
    """Predicting and exporting open no data: each part is blank then."""
    resolved = kconf.load(
        root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides={"CONFIG_METRICS": "roc_auc"}
    )
    spec = ImageSpec(
        name="digits", channels=1, height=28, width=28, classes=10, mean=(0.5,), std=(0.5,), synthetic=True
    )
    for size in (1, 2):
        blank = unlabelled(np.zeros((size, 1, 28, 28), np.uint8))
        check_figures(config_from_values(resolved.values), Dataset(spec, blank, blank, "none"))
