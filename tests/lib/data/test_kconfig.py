"""Which sets, and which questions about them, a configuration has: images and texts do not mix."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lib import kconf, plugin_folders
from lib.config import Config, config_from_values
from lib.errors import ConfigError
from lib.kconf.tree import load_own_tree
from lib.kconf.values import Value
from lib.plugins import DATASETS, MODELS, TASKS
from tests.support.examples import examples

KINDS = (MODELS, TASKS, DATASETS)
ROOT = Path(__file__).resolve().parents[3]
MODEL = """choice MODEL_CHOICE

config MODEL_TOY_{name}
    bool "A toy"
    select {capability}
    help
      A model that only these tests have.

endchoice

config MODEL
    string
    default "toy_{lower}" if MODEL_TOY_{name}

config TABLE_SCALE
    string
    default "1.0" if MODEL_TOY_{name}

config RECOMMENDED_TARGET
    int
    default 512 if MODEL_TOY_{name}
""".replace("    ", "\t")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Kconfig tree with two more models: one that predicts tokens, one that puts labels on texts."""
    names = {"Kconfig", *(f"{kind.file}.py" for kind in KINDS)}
    files = [file for folder in ("lib", "models", "train") for file in (ROOT / folder).rglob("*")]
    for file in [ROOT / "Kconfig", *(file for file in files if file.name in names)]:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    models = ("WRITER", "MODEL_DATA_TEXT", "lm"), ("READER", "MODEL_CLASSIFIES_TEXT", "classify")
    for name, capability, task in models:
        folder = tmp_path / "models" / f"toy_{name.lower()}"
        folder.mkdir(parents=True)
        (folder / "Kconfig").write_text(MODEL.format(name=name, lower=name.lower(), capability=capability))
        (folder / "model.py").write_text(f'TASK = "{task}"\n')
    monkeypatch.setattr(plugin_folders, "ROOT", tmp_path)
    return tmp_path


def _config(tree: Path, *assignments: str) -> Config:
    file = tree / ".config"
    file.write_text("\n".join(f"CONFIG_{assignment}" for assignment in assignments) + "\n")
    return config_from_values(kconf.load(root=tree, config_file=file).values)


def _taken(symbols: Mapping[str, Any], model: str) -> set[str]:
    """The data sets that a model may be trained on."""
    assert symbols[f"MODEL_{model}"].set_value("y") and symbols[f"MODEL_{model}"].str_value == "y"
    return {name for name in DATASETS.names() if symbols[f"DATASET_{name.upper()}"].visibility}


@pytest.mark.slow
def test_each_model_has_the_sets_it_can_take(tree: Path) -> None:
    texts = {"pysource", "markov", "shakespeare", "wikitext2", "wikitext103", "text_files", "token_bins"}
    symbols = load_own_tree(tree).syms
    assert _taken(symbols, "TOY_WRITER") == texts
    assert _taken(symbols, "TOY_READER") == {"sst2", "jsonl"}
    own = {model: set(getattr(example, "DATASETS", texts)) for model, example in examples().items()}
    for model, names in own.items():
        assert names == texts or _taken(symbols, model.upper()) == names
    tables = {"friedman", "tabular"}
    assert _taken(symbols, "MLP") == tables
    assert _taken(symbols, "RESNET18") == set(DATASETS.names()) - texts.union(
        {"sst2", "jsonl", "tagged", "chat"}, tables, *own.values()
    )


def test_a_model_of_text_trains_offline_by_default_and_has_nothing_of_images(tree: Path) -> None:
    config = _config(tree, "MODEL_TOY_WRITER=y")
    assert (config.dataset, config.tokenizer, config.block_size) == ("pysource", "byte", 128)
    assert config.data_dir is None and config.data_download is False
    assert config.augment is config.augment_pad is config.image_size is None
    for setting in ("AUGMENT_SHIFT=y", "AUGMENT_PAD=2", 'DATA_DIR="x"', "VOCAB_SIZE=300"):
        with pytest.raises(ConfigError):
            _config(tree, "MODEL_TOY_WRITER=y", setting)


def test_a_model_of_images_is_asked_nothing_about_text(tree: Path) -> None:
    config = _config(tree, "MODEL_RESNET18=y")
    assert config.tokenizer is config.block_size is None
    assert config.augment == "crop_flip"
    for setting in ("BLOCK_SIZE=64", "TOKENIZER_BYTE=y"):
        with pytest.raises(ConfigError):
            _config(tree, "MODEL_RESNET18=y", setting)


def test_tokens_follow_the_set(tree: Path) -> None:
    def tokens(*assignments: str) -> tuple[str | None, Value, bool]:
        config = _config(tree, "MODEL_TOY_WRITER=y", *assignments)
        return config.tokenizer, config.data_options.get("vocab_size"), config.data_dir is not None

    assert tokens("DATASET_SHAKESPEARE=y") == ("char", None, True)
    assert tokens("DATASET_SHAKESPEARE=y", "TOKENIZER_GPT2=y") == ("gpt2", None, True)
    assert tokens("DATASET_TOKEN_BINS=y") == (None, 50_257, True)
    assert tokens("TOKENIZER_GPT2=y") == ("gpt2", None, True), "files of a vocabulary are needed"
    assert _config(tree, "MODEL_TOY_READER=y").dataset == "sst2"
    with pytest.raises(ConfigError):
        tokens("DATASET_TOKEN_BINS=y", "TOKENIZER_CHAR=y")
