"""Causal language models of transformers: their loss is that of their own logits, documents stay apart.

Directories are made from configurations of two layers, and refused where the library would go on silently.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data import TokenPart
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.tokenizers import _spelling
from lib.data.types import Dataset, InputDtype, TextSpec
from lib.errors import ConfigError
from lib.memory import estimate
from lib.memory.simulation import simulation
from lib.nn import IGNORED
from lib.nn.activation_checkpointing import configure_recomputation
from lib.nn.model_code import build_model
from lib.plan.fitting import step_settings
from lib.plan.gpus import parse_gpu
from models.huggingface import causal
from tests.extras.foreign import config_of
from tests.support.training import CPU
from train.planning.memory_estimate import MemoryTraces
from train.planning.run_plan import predicted_plan
from train.training_data import make_training_data

ROOT = Path(__file__).resolve().parents[2]
ROWS, T, TOKENS = 8, 16, 256
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "vocab_size": 320, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES,
    "mistral": SIZES | {"sliding_window": 6},
    "gemma": SIZES,  # tied, as the next one
    "gemma3_text": SIZES | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": SIZES,
    "smollm3": SIZES,
    "gpt2": GPT2 | dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    "granite": SIZES | {"logits_scaling": 8.0},
    "cohere2": SIZES | {"logit_scale": 0.25, "sliding_window": 6},
}
SPEC = TextSpec(name="random", vocab_size=320, block_size=T, unit="token")
BYTES = TextSpec(name="random", vocab_size=TOKENS, block_size=T, unit="byte")


def folder_of(name: str, place: Path, **changed: Any) -> Path:
    folder = place / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": name, **FAMILIES[name], **changed}))
    return folder


def with_weights(
    name: str, place: Path, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changed: Any
) -> Path:
    """A directory as others give it: weights and a tokenizer of all bytes."""
    import tokenizers
    import transformers

    folder = folder_of(name, place, **changed)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(
        folder, max_shard_size=shard
    )
    letters = {letter: byte for byte, letter in _spelling().items()}  # its tokens are those of ByteTokenizer
    bytes_alone = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    bytes_alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_alone).save_pretrained(folder)
    return folder


def made(folder: Path, spec: Any = SPEC) -> Any:
    return build_model("huggingface", {"dir": str(folder), "input": "causal"}, spec, seed=0)


def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float32
    )


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows whose numbers of targets are very uneven."""
    random = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(3, TOKENS, (2, ROWS, T), generator=random)
    for row, count in enumerate((15, 1, 10, 2, 16, 1, 3, 5)):
        targets[row, count:] = IGNORED
    return tokens, targets


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() and found
    return max(float((found[n] - e).norm() / e.norm().clamp(min=1e-9)) for n, e in expected.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_models_own_logits(name: str, tmp_path: Path) -> None:
    folder = with_weights(name, tmp_path)
    ours, reference, (tokens, targets) = made(folder).double(), theirs(folder).double().train(), batch()
    loss = ours(tokens, targets)
    logits = reference(input_ids=tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    assert abs(float(loss / expected) - 1) <= 1e-10 and loss.dtype == torch.float64
    loss.backward()
    expected.backward()
    assert relative(gradients(ours), gradients(reference)) <= 1e-10
    torch.testing.assert_close(ours(tokens), logits, rtol=0, atol=1e-10)
    tied = reference.lm_head.weight is reference.get_input_embeddings().weight
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) == tied
    assert ours.config.use_cache == reference.config.use_cache  # and so is what is exported


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_count_by_their_tokens_in_any_split(name: str, tmp_path: Path) -> None:
    model, (tokens, targets) = made(folder_of(name, tmp_path)).double(), batch()
    count, found = (targets != IGNORED).sum(), list[dict[str, Tensor]]()
    for size in (8, 4, 2, 1):
        model.zero_grad()
        for rows in torch.arange(ROWS).split(size):
            (model(tokens[rows], targets[rows]) / count).backward()
        found.append(gradients(model))
    assert max(relative(each, found[0]) for each in found[1:]) <= 1e-6  # norms are in single precision
    model.zero_grad()
    for row in range(ROWS):
        own = targets[row : row + 1]
        (model(tokens[row : row + 1], own) / (own != IGNORED).sum() / ROWS).backward()
    assert relative(gradients(model), found[0]) > 0.1, "a mean of means would not be found"


DOCUMENTS = (7, 5, 2)  # and padding


def packed(random: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens_BT = torch.randint(3, TOKENS, (2, T), generator=random)
    numbers = torch.tensor([n for n, length in enumerate(DOCUMENTS) for _ in range(length)])
    documents_BT = F.pad(numbers, (0, T - len(numbers)), value=-1).expand(2, T)
    return tokens_BT, documents_BT


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_what_they_are_alone(name: str, tmp_path: Path) -> None:
    model = made(folder_of(name, tmp_path, use_cache=True))
    configure_recomputation(model, "blocks")  # as in training
    tokens_BT, documents_BT = packed(torch.Generator().manual_seed(1))
    logits = model(torch.stack([tokens_BT, documents_BT], dim=1))
    assert torch.isfinite(logits).all(), "padding sees itself"
    for document in range(len(DOCUMENTS)):
        inside = documents_BT[0] == document
        alone = model(tokens_BT[:, inside])
        assert float((logits[:, inside] - alone).abs().max()) <= 1e-5
    whole = model(tokens_BT)
    assert float((logits[:, 7:12] - whole[:, 7:12]).abs().max()) > 1e-3, "a leak would not be found"


def test_the_librarys_own_packing_leaks_by_default(tmp_path: Path) -> None:
    """Why the mask is ours: the cache that a configuration asks for switches theirs off, silently."""
    reference = theirs(with_weights("llama", tmp_path)).eval()
    tokens_BT, documents_BT = packed(torch.Generator().manual_seed(1))
    inside, positions = documents_BT[0] == 1, causal.positions(documents_BT)
    assert positions[0].tolist() == [*range(7), *range(5), *range(2), *range(2)]
    alone = reference(input_ids=tokens_BT[:, inside]).logits
    for cache, leaks in ((True, True), (False, False)):
        found = reference(input_ids=tokens_BT, position_ids=positions, use_cache=cache).logits[:, inside]
        assert (float((found - alone).abs().max()) > 1e-3) == leaks


def test_weights_are_read_in_the_type_of_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = with_weights("qwen2", tmp_path, dtype=torch.bfloat16), list[Any]()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"dtype": "float16"}))  # would round
    real = causal.loaded
    monkeypatch.setattr(
        causal, "loaded", lambda *a, dtype, **k: (asked.append(dtype), real(*a, dtype=dtype, **k))[1]
    )
    model = made(folder)
    assert asked == [torch.bfloat16] and {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = theirs(folder).state_dict()
    assert all(torch.equal(stored[name], weight) for name, weight in model.state_dict().items())
    assert "weights of model.safetensors" in model.build_note
    with torch.device("meta"):
        shapes = made(folder)
    assert sum(each.numel() for each in shapes.parameters()) == sum(
        each.numel() for each in model.parameters()
    )


def test_shards_are_the_weights_of_one_file(tmp_path: Path) -> None:
    whole, parts = (with_weights("llama", tmp_path / size, shard=size) for size in ("1GB", "100KB"))
    files = sorted(parts.glob("*.safetensors"))
    assert len(files) > 2 and not (parts / "model.safetensors").exists()
    model, expected = made(parts), made(whole).state_dict()
    assert all(torch.equal(expected[name], weight) for name, weight in model.state_dict().items())
    assert f"weights of {files[0].name} and {len(files) - 1} more" in model.build_note
    files[1].unlink()
    with pytest.raises(ConfigError, match=f"the weights in .* cannot be read: .*{files[1].name}"):
        made(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSpec:
    """Of data that this model knows nothing of, but that they are tokens."""

    name: str
    vocab_size: int
    block_size: int
    synthetic: bool = False
    input_dtype: ClassVar[InputDtype] = "int64"

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (2, self.block_size)


def test_any_data_in_tokens_fit(tmp_path: Path) -> None:
    folder = with_weights("llama", tmp_path)
    spec = PackedSpec(name="packed", vocab_size=TOKENS, block_size=T)
    model, other = made(folder, spec), made(folder, BYTES)
    inputs, (_, targets) = torch.zeros(ROWS, *spec.input_shape, dtype=torch.int64), batch()
    assert torch.equal(model(inputs, targets), other(inputs[:, 0], targets))
    for wrong, told in (
        ({"vocab_size": 321}, "packed is not in the tokens"),
        ({"block_size": 65}, "is too long"),
    ):
        with pytest.raises(ConfigError, match=told):
            made(folder, replace(spec, **wrong))
    with simulation("cuda"):
        planned = made(folder, spec)
    rows: list[Any] = [((ROWS, *spec.input_shape), torch.int64), ((ROWS, T), torch.int64)]
    assert estimate(planned, rows, precision="bf16", loss=None).peak_bytes > 0


def test_rows_are_not_cut_where_attention_has_dropout(tmp_path: Path) -> None:
    kinds = {"name": "chats", "vocab_size": 320, "block_size": T, "unit": "token", "pad": 0, "end": 2}
    by_length = ChatSpec(**kinds, bucketed=True)
    assert made(folder_of("llama", tmp_path), by_length)
    folder = folder_of("llama", tmp_path / "drops", attention_dropout=0.1)
    assert made(folder, ChatSpec(**kinds))
    with pytest.raises(ConfigError, match="CHAT_BUCKETING=y is not for a model with dropout in attention"):
        made(folder, by_length)


@pytest.mark.parametrize("change", ["scale", "mask", "library"])
def test_a_model_that_computes_otherwise_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_weights("llama", tmp_path)
    monkeypatch.setattr(causal, "_compared", set())
    if change == "scale":
        monkeypatch.setattr(
            causal.Causal,
            "__setattr__",
            lambda s, n, v: nn.Module.__setattr__(s, n, v * 2 if n == "hidden_scale" else v),
            raising=False,
        )
    elif change == "mask":
        monkeypatch.setattr(
            causal, "causal_mask", lambda tokens, *_, **__: torch.zeros(1, 1, *[tokens.shape[1]] * 2)
        )
    else:
        monkeypatch.setattr(causal.Causal, "_masks", lambda *_: {0: torch.zeros(1, 1, 1, 1)})
    with pytest.raises(ConfigError, match=r"llama cannot be trained here: .*a difference of"):
        made(folder)


def text_data(config: Any, length: int = T) -> Any:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, TOKENS, (64 * length,), generator=random).to(torch.uint16).numpy()
    parts = TokenPart(tokens, length, shifted=True), TokenPart(tokens[: 8 * length], length)
    spec = TextSpec(name="random", vocab_size=TOKENS, block_size=length, unit="byte")
    return make_training_data(config, Dataset(spec, *parts, "random"))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_memory_is_planned_without_the_device_and_checkpointing_saves(name: str, tmp_path: Path) -> None:
    config = config_of("lm-llama", tmp_path, precision="auto", block_size=32)
    options = {"dir": str(folder_of(name, tmp_path)), "input": "causal"}
    config, peaks = config.replace(model_options=options), list[int]()
    for recompute in ("none", "blocks"):
        own = config.replace(grad_checkpoint=recompute)
        data = text_data(own, 32)
        for hardware in (CPU, parse_gpu("h100-80gx4")):
            plan, _ = predicted_plan(own, data, hardware)
            assert plan.strategy != "pipeline"
            peaks.append(MemoryTraces(own, data).of(step_settings(plan), hardware).trace.peak_bytes)
    assert peaks[2] < peaks[0] and peaks[3] < peaks[1]


def test_logits_are_never_whole(tmp_path: Path) -> None:
    rows, length, words = 16, 1024, 50_000
    folder = folder_of("llama", tmp_path, vocab_size=words, max_position_embeddings=length)
    spec = TextSpec(name="random", vocab_size=words, block_size=length, unit="token")

    def whole(logits_BTV: Tensor) -> Tensor:
        targets_N = torch.zeros(rows * length, dtype=torch.int64)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_N, reduction="sum")

    def peak(count: int, loss: Any) -> int:
        with simulation("cuda"):
            model = made(folder, spec)
        inputs: Any = [((rows, length), torch.int64)] * count
        return estimate(model, inputs, precision="bf16", loss=loss).peak_bytes

    assert peak(2, None) < 0.3 * peak(1, whole)


def test_compiled_it_is_one_graph_with_the_same_loss(tmp_path: Path) -> None:
    model, (tokens, targets) = made(folder_of("gemma3_text", tmp_path)), batch()
    documents = torch.arange(T).div(5, rounding_mode="floor").expand(ROWS, T)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for given in (tokens, torch.stack([tokens, documents], dim=1)):
        torch.testing.assert_close(compiled(given, targets), model(given, targets))
    torch._dynamo.reset()


def test_a_simulated_build_has_the_type_that_trains(tmp_path: Path) -> None:
    """Of a config.json that says bfloat16, as those of pretrained models do."""
    with simulation("cuda"):
        model = made(folder_of("llama", tmp_path, dtype="bfloat16"))
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def program(place: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "text.txt").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(1000)))
    settings = {
        "MODEL_HUGGINGFACE": "y", "HUGGINGFACE_INPUT_CAUSAL": "y", "HUGGINGFACE_DIR": f'"{folder}"',
        "DATASET_TEXT_FILES": "y", "DATA_DIR": f'"{place / "text.txt"}"', "BLOCK_SIZE": "16",
        "BUDGET_STEPS": "y", "MAX_STEPS": "3", "TARGET_EFFECTIVE_BATCH": "8", "EMA": "y",
    }  # fmt: skip
    (place / ".config").write_text("".join(f"CONFIG_{name}={value}\n" for name, value in settings.items()))
    command = ["env", f"KCONFIG_CONFIG={place / '.config'}", sys.executable, "-m", "train"]
    command += ["--runs", str(place / "runs"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_a_directory_is_trained_sampled_and_exported(tmp_path: Path) -> None:
    folder = with_weights("gemma", tmp_path, dtype=torch.bfloat16)
    (folder / "LICENSE").write_text("as it was")
    planned = program(tmp_path, folder, "plan", "--gpu", "rtx3090")
    assert planned.returncode == 0 and "weights of model.safetensors" in " ".join(planned.stdout.split())
    done = program(tmp_path, folder, "train")
    assert done.returncode == 0, done.stderr
    assert "step 3" in done.stdout and "Sample: " in done.stdout
    out = tmp_path / "out"
    exported = program(tmp_path, folder, "export", "--format", "huggingface", "--directory", str(out))
    assert exported.returncode == 0 and "at most 0.0e+00 from" in exported.stdout, exported.stderr
    assert (out / "LICENSE").read_text() == "as it was" and (out / "tokenizer.json").is_file()
    again, before = made(out), made(folder)  # it is a directory like the first
    moved = {n for n, w in again.state_dict().items() if not torch.equal(w, before.state_dict()[n])}
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert theirs(out).config.tie_word_embeddings
