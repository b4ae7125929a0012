"""What a task cannot do is said in one line, with what to do, before a run exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib import kconf
from lib.config import config_from_values
from lib.errors import ConfigError
from train.training_data import open_to_train

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"HYPER_PARAM_MANUAL": "y", "TARGET_EFFECTIVE_BATCH": "4", "BATCH_SIZE": "4"}
TABLE = {"DATASET_TABULAR": "y", "TABULAR_TARGETS": "l1,l2", "TABULAR_TARGET_LABELS": "y"}
TAGS = {"DATASET_TAGGED": "y", "TOKENIZER_BYTE": "y", "LABEL_SMOOTHING": "0.0"}
MODELS = {"table": "tabular-regression", "tags": "gpt2-sst2", "friedman": "tabular-regression"}
ROWS = [f"{row / 7},{row % 2},{row % 3 // 2}" for row in range(40)]
TEXTS = [{"tokens": ["Ada", f"left{row}"], "tags": ["B-PER", "O"]} for row in range(30)]


def refusal(tmp_path: Path, which: str, options: dict[str, str], *, file: str = "") -> str:
    """One line, of an error that ends with status 2; nothing is written."""
    (tmp_path / "table.csv").write_text(file or "\n".join(["x,l1,l2", *ROWS]))
    (tmp_path / "train.jsonl").write_text(file or "\n".join(map(json.dumps, TEXTS)))
    kinds: dict[str, dict[str, str]] = {"table": TABLE, "tags": TAGS}
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
        ("table", {"EARLY_STOP_EVALS": "2", "EARLY_STOP_DELTA": "-1"}, "1 fault in the configuration"),
    ],
)
def test_what_cannot_be_done_is_refused(
    which: str, options: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path, which, options)


def lines(*texts: object) -> str:
    return "\n".join(text if isinstance(text, str) else json.dumps(text) for text in (*TEXTS, *texts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "file", "expected"),
    [
        ("table", "\n".join(["x,l1,l2", *ROWS, "1,2,0"]), "column 'l1' has '2' in row 41, not 0 or 1"),
        ("table", "\n".join(["x,l1,l2", *ROWS, "1,yes,0"]), "column 'l1' has 'yes' in row 41, not 0 or 1"),
        ("tags", lines({"tokens": ["a", "b"], "tags": ["O"]}), "train.jsonl:31 has 2 tokens and 1 tags"),
        ("tags", lines({"tokens": [], "tags": []}), 'train.jsonl:31: "tokens" is no list of texts'),
        ("tags", lines({"tokens": ["a"]}), 'train.jsonl:31: "tags" is no list of texts'),
        ("tags", lines({"tokens": ["a"], "tags": [3]}), 'train.jsonl:31: "tags" is no list of texts'),
        ("tags", lines("", "{"), "train.jsonl:32 is no JSON object"),
        ("tags", lines("[1]"), "train.jsonl:31 is no JSON object: it is list"),
        ("tags", lines("null"), "train.jsonl:31 is no JSON object"),
        ("tags", "\n", "no text is left for training"),
    ],
)
def test_a_fault_in_a_file_is_named_with_its_place(
    which: str, file: str, expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(tmp_path, which, {}, file=file)


@pytest.mark.slow
def test_one_class_alone_has_no_area_under_a_curve(tmp_path: Path) -> None:
    file = "\n".join(["x,l1,l2", *(f"{row},0,1" for row in range(60))])
    line = refusal(tmp_path, "table", {"METRICS": "roc_auc"}, file=file)
    assert "roc_auc needs more than one class" in line and "have the same targets" in line
