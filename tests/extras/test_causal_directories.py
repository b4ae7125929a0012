"""Directories that are no causal language model that can be trained: one line, exit status 2, nothing made.

The library would go on with most of them, with random weights or without a tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.data.huggingface_tokenizer import HuggingFaceTokenizer
from lib.errors import ConfigError
from tests.extras.test_causal import BYTES, SIZES, made, program, with_weights


def rewrite(name: str, **changed: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def reweighted(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return write


def swapped(name: str, **values: Any) -> Callable[[Path], None]:
    """Another family's configuration, without weights."""

    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "config.json").write_text(json.dumps({"model_type": name, **SIZES, **values}))

    return write


NORM = "model.layers.1.input_layernorm.weight"
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "code": (rewrite("config.json", auto_map={"AutoModel": "m.M"}), "asks for code: auto_map names"),
    "code of the tokenizer": (
        rewrite("tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["m.T", None]}),
        "has no tokenizer that can be read: .* contains custom code",
    ),
    "quantized": (rewrite("config.json", quantization_config={}), "is of quantized weights"),
    "no tokenizer": (
        without("tokenizer.json", "tokenizer_config.json"),
        "has no tokenizer that can be read: it has none of tokenizer.json",
    ),
    "damaged tokenizer": (
        lambda f: f.joinpath("tokenizer.json").write_text("{") and None,
        r"tokenizer.json is not JSON: .*; copy it again",
    ),
    "a type that there is not": (
        rewrite("config.json", dtype="float7"),
        r"config.json is not understood by transformers .*float7.*; mend or copy it again",
    ),
    **{
        f"{name} {value}": (
            rewrite("config.json", **{name: value}),
            r"config.json (is not understood|makes no model).*; mend or copy it again",
        )
        for name, value in (
            ("num_key_value_heads", 0),
            ("num_attention_heads", 5),
            ("hidden_act", "bent"),
            ("rope_parameters", {"rope_type": "bent", "rope_theta": 1.0}),
            ("num_hidden_layers", "two"),
            ("hidden_size", None),
            ("hidden_size", -64),
            ("head_dim", 15),
            ("rope_parameters", {"rope_type": "yarn"}),
        )
    },
    "more tokens than rows": (rewrite("config.json", vocab_size=250), "the data have 256, the model 250"),
    "other tokens": (
        lambda f: added(f, 20),
        "random is not in the tokens of .*: the data have 256, the model 320 and its tokenizer 276",
    ),
    "tokenizer beyond the rows": (
        lambda f: added(f, 90),
        "the data have 256, the model 320 and its tokenizer 346",
    ),
    "one layer too many": (
        rewrite("config.json", num_hidden_layers=3),
        r"9 missing \(model.layers.2.* and 8",
    ),
    "one layer too few": (rewrite("config.json", num_hidden_layers=1), r"9 unexpected \(model.layers.1"),
    "another width": (rewrite("config.json", intermediate_size=96), r"6 mismatched \(model.layers.0.mlp"),
    "a weight missing": (reweighted(lambda w: w.pop(NORM)), rf"1 missing \({NORM}\)"),
    "no weight at all": (reweighted(lambda w: w.clear()), "do not fit: 21 missing"),
    "a head of its own": (rewrite("config.json", tie_word_embeddings=True), "contradicts itself"),
    "a missing head": (reweighted(lambda w: w.pop("lm_head.weight")), r"1 missing \(lm_head.weight\)"),
    "integers": (reweighted(lambda w: w.update({NORM: torch.ones(64).int()})), "has weights of torch.int32"),
    "cut off": (lambda f: cut(f / "model.safetensors"), "model.safetensors is damaged or not .* it has"),
    "adapter": (lambda f: f.joinpath("adapter_config.json").write_text("{}") and None, "has an adapter"),
    "pickle": (lambda f: f.joinpath("model.safetensors").rename(f / "model.bin") and None, "is a pickle"),
    "too long": (
        rewrite("config.json", max_position_embeddings=8),
        "BLOCK_SIZE=16 is too long .*BLOCK_SIZE=8",
    ),
    "eager only": (swapped("gemma2"), "gemma2 has no sdpa attention"),
    "soft cap": (swapped("gemma3_text", final_logit_softcapping=30.0), r"caps its logits \(final_logit_soft"),
    "experts": (
        swapped("mixtral", num_local_experts=4),
        r"has experts: model.layers.0.mlp.experts.gate_up_proj",
    ),
    "state space": (swapped("mamba"), "mamba has layers of linear_attention"),
    "chunks": (swapped("llama4_text"), "llama4_text has layers of chunked_attention"),
    "masked": (swapped("bert"), "bert cannot be trained here: its head alone does not give its logits"),
    "images": (swapped("vit"), "no causal language model of text alone for vit"),
    "old attention": (swapped("stablelm"), "StableLm.* is not passed what its tokens may see"),
}


def added(folder: Path, count: int) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{n}>" for n in range(count)])
    tokenizer.save_pretrained(folder)


def cut(file: Path, count: int = 100) -> None:
    file.write_bytes(file.read_bytes()[:-count])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_weights("llama", tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_directory_is_one_line(fault: str, good: Path, tmp_path: Path) -> None:
    folder, (spoil, told) = tmp_path / "model", BAD[fault]
    shutil.copytree(good, folder)
    made(folder, BYTES)
    spoil(folder)
    with pytest.raises(ConfigError, match=told) as caught:
        made(folder, BYTES)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (rewrite("config.json", attention_bias="maybe"), r"config.json is not understood.*attention_bias"),
        (rewrite("config.json", dtype="float7"), r"config.json is not understood.*float7"),
        (lambda f: cut(f / "tokenizer.json"), r"/tokenizer.json is not JSON: "),
        (lambda f: cut(f / "tokenizer_config.json", 9), r"/tokenizer_config.json is not JSON: "),
        (lambda f: cut(f / "config.json", 9), r"/config.json is not JSON: "),
    ],
)
def test_a_file_that_keeps_the_tokenizer_from_being_read_is_named(
    change: Callable[[Path], None], told: str, good: Path, tmp_path: Path
) -> None:
    """Chats open it before the model is made."""
    shutil.copytree(good, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"^/[^ ]*{told}.*; (mend or )?copy it again") as caught:
        HuggingFaceTokenizer(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_what_is_wrong_is_found_before_there_is_a_run(good: Path, tmp_path: Path) -> None:
    """Also of models that are too large for a trial: on the meta device."""
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    rewrite("config.json", num_hidden_layers=3)(folder)
    with torch.device("meta"), pytest.raises(ConfigError, match="9 missing"):
        made(folder)
    done = program(tmp_path, folder, "train")
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    assert [line for line in done.stderr.splitlines() if "error" in line] == done.stderr.splitlines()[-1:]
