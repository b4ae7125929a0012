"""Published text classifiers with their own tokenizers: fine-tuned, predicting and exported as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lib import kconf
from lib.config import Config, config_from_values
from lib.errors import ConfigError, DataError
from lib.nn import IGNORED
from lib.runs.identity import identity
from tests.contract import test_readers
from tests.e2e.runner import TINY, Runner
from tests.extras.text_classifiers import KINDS, LABELS, folder_of, lines, tagged_lines, write_lines
from tests.support.configs import ROOT
from train.initial_weights import reset_head
from train.training_data import TrainingData, built, check_start, open_training_data

SIZE = 16  # tokens, so that some texts are cut


def options_of(place: Path, **changes: str) -> dict[str, str]:
    own = {"MODEL_HUGGINGFACE": "y", "HUGGINGFACE_INPUT_TEXT": "y", "HUGGINGFACE_DIR": str(place / "model")}
    own |= {} if "DATASET_TAGGED" in changes else {"DATASET_JSONL": "y"}
    own |= {"DATA_DIR": str(place), "BLOCK_SIZE": str(SIZE), "PRECISION_FP32": "y"}
    return {f"CONFIG_{name}": value for name, value in {**own, **changes}.items()}


def resolved_of(place: Path, **changes: str) -> Any:
    return kconf.load_written("", root=ROOT, overrides=options_of(place, **changes))


def opened(place: Path, **changes: str) -> tuple[Config, TrainingData]:
    config = config_from_values(resolved_of(place, **changes).values)
    return config, open_training_data(config, root=ROOT, log=lambda _: None)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_lines(tmp_path / "train.jsonl", lines())
    return tmp_path


def theirs(folder: Path, texts: list[str]) -> torch.Tensor:
    """Logits of transformers' own tokenizer and model, one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        rows = [tokenizer(text, truncation=True, max_length=SIZE, return_tensors="pt") for text in texts]
        return torch.cat([model(**row).logits for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, place: Path) -> None:
    folder_of(kind, place / "model", labels=LABELS)
    config, data = opened(place)
    assert config.tokenizer == "huggingface" and config.block_size == SIZE
    check_start(config, data.dataset, ROOT, log=print)
    model = built(config, data.dataset.spec).eval()
    tokens, labels = data.dataset.train.take()
    with torch.no_grad():
        found = model(torch.from_numpy(tokens))
    assert model.config.vocab_size == 320 or kind == "distilbert"  # type: ignore[union-attr]
    from lib.data.sampler import held_out_by_hash

    texts = [row["text"] for row in lines()]
    kept = [text for text, out in zip(texts, held_out_by_hash(texts, 20), strict=True) if not out]
    expected = theirs(place / "model", kept)
    assert len(kept) == len(tokens) and (tokens[:, -1] != data.dataset.spec.pad).any()  # type: ignore[attr-defined]
    assert (found - expected).abs().max() <= 1e-5 and expected.std(dim=0).min() > 0.01
    assert "are longer than 16 tokens, and cut" in data.dataset.source
    assert data.dataset.class_names == tuple(LABELS) and labels.max() == 1


def test_a_run_knows_its_tokenizer_by_content(place: Path) -> None:
    folder_of("bert", place / "model", labels=LABELS)
    shutil.copytree(place / "model", place / "moved")
    known, moved = (
        identity(resolved_of(place, HUGGINGFACE_DIR=str(place / name)).in_effect)
        for name in ("model", "moved")
    )
    assert known == moved
    file = place / "moved/tokenizer.json"
    file.write_text(file.read_text().replace("[SEP] $B", "$B"))
    text = json.loads(file.read_text())
    text["post_processor"]["single"] = text["post_processor"]["single"][:-1]  # without [SEP]
    file.write_text(json.dumps(text))
    assert identity(resolved_of(place, HUGGINGFACE_DIR=str(place / "moved")).in_effect) != known


def test_refusals_name_the_cure(place: Path) -> None:
    folder_of("bert", place / "model", labels=LABELS)
    for changes, message in (
        (
            {"BLOCK_SIZE": "63"},
            r"BLOCK_SIZE=63 is not for the tokenizer .*at most 62 .*set CONFIG_BLOCK_SIZE=62",
        ),
        ({"BLOCK_SIZE": "2"}, r"BLOCK_SIZE=2 is not for .*at least 3 tokens; set CONFIG_BLOCK_SIZE=3"),
        ({"TOKENIZER_BYTE": "y"}, r"the weights in .* do not fit: 1 mismatched .*word_embeddings"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(place, **changes)
    write_lines(place / "train.jsonl", [*lines(), {"text": "a [PAD] b", "label": "bad"}])
    with pytest.raises(DataError, match=r"train.jsonl:61 has the token of padding, \[PAD\]: .* remove it"):
        opened(place)
    write_lines(place / "train.jsonl", lines())
    file = place / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 7}))
    with pytest.raises(ConfigError, match="has pad_token_id=7, its tokenizer 0; write pad_token_id=0"):
        opened(place)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": 0, "vocab_size": 20}))
    with pytest.raises(ConfigError, match=r"is not in the tokens of .*the model 20"):
        opened(place)
    settings = json.loads((place / "model/tokenizer_config.json").read_text())
    del settings["pad_token"]
    (place / "model/tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="has no token of padding; name its pad_token"):
        opened(place)


def test_a_tokenizer_that_gives_types_is_refused(place: Path) -> None:
    folder_of("bert", place / "model", labels=LABELS)
    file = place / "model/tokenizer.json"
    content = json.loads(file.read_text())
    for part in content["post_processor"]["single"]:
        next(iter(part.values()))["type_id"] = 1
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="gives tokens of a single text types"):
        opened(place)


CHECKS = (
    test_readers.test_training_does_not_depend_on_the_split_or_on_where_it_resumes,
    test_readers.test_ranks_have_the_gradient_of_one_process_together,
)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize("check", CHECKS)
def test_training_is_exact(kind: str, check: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(kind, place / "model", labels=LABELS)
    config, data = opened(place)
    config = config.replace(target_effective_batch=8, max_steps=4, budget="steps")
    monkeypatch.setattr(test_readers, "opened", lambda *_: (config, data))
    check(name="jsonl", root=place)


TOKENS = "AutoModelForTokenClassification"


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_words_have_their_tags_at_their_last_tokens(kind: str, place: Path) -> None:
    folder_of(kind, place / "model", labels=["B-X", "O"], auto=TOKENS)
    write_lines(place / "train.jsonl", rows := tagged_lines())
    config, data = opened(place, DATASET_TAGGED="y")
    check_start(config, data.dataset, ROOT, log=print)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(place / "model").eval()
    model, cut = built(config, data.dataset.spec).eval(), 0
    parts, pad = [each.take() for each in (data.dataset.train, data.dataset.test)], data.dataset.spec.pad  # type: ignore[attr-defined]
    found = {tuple(row[row != pad]): own for part in parts for row, own in zip(*part, strict=True)}
    for row in rows:
        text = " ".join(row["tokens"])
        given = tokenizer(text, truncation=True, max_length=SIZE, return_tensors="pt")
        whole, wanted, end = tokenizer(text), np.full(SIZE, IGNORED), -1
        for word, tag in zip(row["tokens"], row["tags"], strict=True):
            end += len(word) + 1
            last = whole.char_to_token(end - 1)
            if last < SIZE - 1:
                wanted[last] = ["B-X", "O"].index(tag)
            else:
                cut += 1
        ids = tuple(given["input_ids"][0].tolist())
        assert (found[ids] == wanted).all(), text
        with torch.no_grad():
            own = model(torch.tensor([[*ids, *[pad] * (SIZE - len(ids))]]))  # type: ignore[attr-defined]
            assert (own[0, : len(ids)] - theirs(**given).logits[0]).abs().max() <= 1e-5
    assert cut and f"words are longer than {SIZE} tokens, and cut" in data.dataset.source


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_training_on_tags_is_exact(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(name, place / "model", labels=["B-X", "O"], auto=TOKENS)
    write_lines(place / "train.jsonl", tagged_lines())
    config, data = opened(place, DATASET_TAGGED="y")
    config = config.replace(target_effective_batch=8, max_steps=4, budget="steps")
    monkeypatch.setattr(test_readers, "opened", lambda *_: (config, data))
    for check in CHECKS:
        check(name="tagged", root=place)


@pytest.mark.parametrize("fault", ["word", "padding", "slow"])
def test_texts_that_cannot_be_tagged_are_named(
    fault: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of("bert", place / "model", labels=["B-X", "O"], auto=TOKENS)
    word, message = {
        "word": ("\u200b", r"train.jsonl:61: the tokenizer has no token for .*; leave the word out"),
        "padding": ("[PAD]", r"train.jsonl:61 has the token of padding; remove it"),
        "slow": ("a", "does not tell words apart; give the folder a tokenizer.json"),
    }[fault]
    write_lines(place / "train.jsonl", [*tagged_lines(), {"tokens": ["a", word], "tags": ["O", "O"]}])
    if fault == "slow":
        monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises((DataError, ConfigError), match=message):
        opened(place, DATASET_TAGGED="y")


HEADS = {
    "of three classes": (
        ["bad", "fine", "good"],
        r"classifier.weight is \(3, 32\), and the model has \(2, 32\)",
    ),
    "none": (None, "classifier.weight is missing"),
    "in another order": (["good", "bad"], "classes are good, bad, those of the data bad, good"),
}


@pytest.mark.parametrize("fault", HEADS)
def test_another_head_needs_a_word(fault: str, place: Path) -> None:
    labels, message = HEADS[fault]
    folder_of("bert", place / "model", labels=labels)
    config, data = opened(place)
    with pytest.raises(ConfigError, match=f"{message}.*RESET_HEAD=y") as caught:
        check_start(config, data.dataset, ROOT, log=print)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    check_start(config_of_reset(place), data.dataset, ROOT, log=print)


def config_of_reset(place: Path) -> Config:
    return config_from_values(resolved_of(place, RESET_HEAD="y").values)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_head_that_fits_is_new_where_that_is_set(kind: str, place: Path) -> None:
    folder_of(kind, place / "model", labels=LABELS)
    _, data = opened(place)
    config = config_of_reset(place)
    kept, first, again, other = (built(config, data.dataset.spec).state_dict() for _ in range(4))
    for weights, seed in ((first, 1), (again, 1), (other, 2)):
        model = built(config, data.dataset.spec)
        name = "classifier" if kind == "bert" else "classifier.out_proj"
        assert reset_head(model, config.replace(seed=seed)) == f"; new head, not read: {name}"
        weights.update(model.state_dict())
    changed = {name for name in kept if not torch.equal(kept[name], first[name])}
    assert changed == {f"{name}.weight", f"{name}.bias"}
    assert all(torch.equal(first[each], again[each]) for each in kept)
    assert not torch.equal(first[f"{name}.weight"], other[f"{name}.weight"])
    assert first[f"{name}.weight"].std() == pytest.approx(0.02, rel=0.3), "as transformers begins"


def test_a_directory_without_weights_has_no_head_to_reset(place: Path) -> None:
    folder_of("bert", place / "model", labels=LABELS)
    (place / "model/model.safetensors").unlink()
    _, data = opened(place)
    with pytest.raises(ConfigError, match=r"RESET_HEAD=y has no effect: .* has no weights"):
        check_start(config_of_reset(place), data.dataset, ROOT, log=print)


SHORT = TINY | {"CONFIG_MAX_STEPS": "30", "CONFIG_TARGET_EFFECTIVE_BATCH": "32", "CONFIG_DATA_LIMIT": "0"}
TEXTS = ["The film was good", "A very dull plot", "the plot was bad and" + " very fine film" * 9]


@pytest.mark.parametrize("kind", ["bert", "roberta", "gpt2"])
def test_from_a_directory_to_a_pipeline(kind: str, place: Path) -> None:
    """Fine-tuned with a new head, a run predicts, and is exported to a directory that transformers takes."""
    folder_of(kind, place / "model", labels=["sad", "so so", "glad"])
    (place / "model/LICENSE").write_text("Do as you like.")
    runner = Runner(place)
    (place / "none").write_text("")
    runner.configure(str(place / "none"), {**options_of(place), **SHORT})
    refused = runner.run("train", status=2)
    assert "CONFIG_RESET_HEAD=y starts with a new head" in refused and not runner.runs.exists()
    runner.configure(str(place / "none"), {**options_of(place), **SHORT, "CONFIG_RESET_HEAD": "y"})
    output = runner.run("train")
    assert "new head, not read: " in output
    write_lines(place / "texts.jsonl", [{"text": text} for text in TEXTS])
    shutil.move(place / "train.jsonl", place / "gone.jsonl")
    said = runner.run("predict", f"--input={place}/texts.jsonl", f"--out={place}/found.jsonl")
    assert "1 of 3 texts are cut at 16 tokens" in said
    rows = [json.loads(line) for line in (place / "found.jsonl").read_text().splitlines()]
    out = place / "out"
    assert "from the run's own outputs" in runner.run("export", "--format=huggingface", f"--directory={out}")
    settings = json.loads((out / "config.json").read_text())
    assert settings["id2label"] == {"0": "bad", "1": "good"} and settings["label2id"] == {"bad": 0, "good": 1}
    assert (out / "LICENSE").read_text() == "Do as you like."
    assert "AutoModelForSequenceClassification" in (out / "README.md").read_text()
    code: dict[str, Any] = {}
    program = (out / "README.md").read_text().split("```python")[1].split("```")[0]
    exec(program.replace('"."', repr(str(out))), code)
    assert code["classify"](TEXTS) == [row["prediction"] for row in rows]
    pipeline = transformers.pipeline("text-classification", model=str(out), top_k=None)
    for row, scores in zip(rows, pipeline(TEXTS, truncation=True, batch_size=3), strict=True):
        for each in scores:
            assert each["score"] == pytest.approx(row[f"p_{each['label']}"], abs=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (
        tokenizer.model_max_length == SIZE and len(tokenizer(TEXTS[2], truncation=True)["input_ids"]) == SIZE
    )
    shutil.move(place / "model", place / "elsewhere")
    lost = runner.run("predict", f"--input={place}/texts.jsonl", status=2)
    assert (
        f"made with in CONFIG_HUGGINGFACE_DIR={place}/model" in lost and "it is not there; put them" in lost
    )
    shutil.move(place / "elsewhere", place / "model")
    with (place / "model/config.json").open("a") as file:
        file.write("\n")
    changed = runner.run("predict", f"--input={place}/texts.jsonl", status=2)
    assert "some were changed, added or removed; put them back" in changed and "accept it" not in changed
