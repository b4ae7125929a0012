"""Conversations by the chat templates of real tokenizers, made here: answers count, and nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data.datasets.chat.conversations import Conversation
from lib.data.datasets.chat.data import show
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.chat.templates import ChatTemplate, PlainTemplate, Sample, template_of
from lib.data.huggingface_tokenizer import HuggingFaceTokenizer
from lib.data.types import Dataset
from lib.errors import ConfigError, ToolkitError
from lib.nn import IGNORED
from tests.support.datasets import opened

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the extra transformers is not installed")

HEAD = "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
PLAIN = HEAD + "{{ m.content }}<|stop|>\n" + TAIL
MARKED = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|stop|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|stop|>\n{% endif %}" + TAIL
)
# Thinking is left out of all answers but the last one.
FORGETS = (
    HEAD + "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|stop|>\n" + TAIL
)
# The prompt for an answer is not how an answer begins.
MISLEADS = (
    HEAD + "{{ m.content }}<|stop|>\n{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + PLAIN
WORDS = [
    "Hello there, how are you?",
    "I am fine, thanks. 42 apples",
    "été, naïve: 東京 <think>because</think>",
]
TALK = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "<think>why</think>I am fine"},
    {"role": "user", "content": "how are you? été"},
    {"role": "assistant", "content": "<think>hm</think>naïve 東京, thanks."},
]


def tokenizer_at(folder: Path, template: str | None = PLAIN, **special: str) -> Path:
    """A folder with a byte-level BPE tokenizer, as published models have, and a chat template."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    names = ["<|bos|>", "<|eos|>", "<|start|>", "<|stop|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=names, initial_alphabet=alphabet)
    made.train_from_iterator(WORDS * 4, trainer)
    more = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"} | special
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **more)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def counted(tokenizer: HuggingFaceTokenizer, sample: Sample) -> list[str]:
    """The runs of tokens that count, as text."""
    runs, before = list[list[int]](), False
    for token, counts in zip(sample.ids, sample.counts, strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(token)
        before = counts
    return [tokenizer.decode(run) for run in runs]


def sampled(folder: Path, messages: list[dict[str, str]] = TALK) -> tuple[HuggingFaceTokenizer, Any, Sample]:
    tokenizer = HuggingFaceTokenizer(folder)
    template = template_of(tokenizer)
    return tokenizer, template, template.sample(Conversation("here:7", messages))


def test_the_library_marks_nothing_without_a_word(tmp_path: Path) -> None:
    """Why templates without marks are rendered by beginnings: the library returns zeros."""
    inner = HuggingFaceTokenizer(tokenizer_at(tmp_path)).inner
    found = inner.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert sum(found["assistant_masks"]) == 0 < len(found["input_ids"])


@pytest.mark.parametrize(("template", "end"), [(PLAIN, "<|stop|>\n"), (MARKED, "<|stop|>")])
def test_all_answers_count_with_their_ends(template: str, end: str, tmp_path: Path) -> None:
    tokenizer, made, sample = sampled(tokenizer_at(tmp_path, template))
    assert isinstance(made, ChatTemplate) and not sample.rewritten
    assert counted(tokenizer, sample) == [TALK[1]["content"] + end, TALK[3]["content"] + end]
    text = tokenizer.inner.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(sample.ids) == text and sample.ids.count(tokenizer.inner.bos_token_id) == 1
    assert tokenizer.decode([made.end]) == "<|stop|>", "answers end before the text does"
    assert tokenizer.inner.eos_token == "<|eos|>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("trims", [False, True])
def test_spaces_count_where_offsets_leave_them_out(template: str, trims: bool, tmp_path: Path) -> None:
    """The library's own mask loses an answer that begins with such a space, and all after it."""
    spaced = [TALK[0], {"role": "assistant", "content": " two  spaces \n\n x  "}, *TALK[2:]]
    loose = template.replace("<|stop|>{% endgen", "{% endgen").replace(
        "{% endgeneration %}", "{% endgeneration %}<|stop|>"
    )
    folder = tokenizer_at(tmp_path, loose)
    file = folder / "tokenizer.json"
    kinds = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trims, "use_regex": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": kinds}))
    tokenizer, _, sample = sampled(folder, spaced)
    end = "<|stop|>\n" if template == PLAIN else ""
    assert counted(tokenizer, sample) == [f"{spaced[n]['content']}{end}" for n in (1, 3)]
    if trims and template == MARKED:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        theirs = tokenizer.inner.apply_chat_template(spaced, **options)["assistant_masks"]
        assert sum(theirs) != sum(sample.counts), "the library has been mended"


def test_of_a_rewritten_history_the_last_answer_counts(tmp_path: Path) -> None:
    tokenizer, _, sample = sampled(tokenizer_at(tmp_path, FORGETS))
    assert sample.rewritten and counted(tokenizer, sample) == [TALK[3]["content"] + "<|stop|>\n"]
    _, _, short = sampled(tmp_path, TALK[:2])
    assert not short.rewritten


def test_a_template_that_tells_no_beginning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"here:7: the chat template does not tell where the last answer"):
        sampled(tokenizer_at(tmp_path, MISLEADS))
    with pytest.raises(ConfigError, match=r"here:7: the chat template refuses .*no system here; leave the"):
        sampled(tokenizer_at(tmp_path, REFUSES), [{"role": "system", "content": "x"}, *TALK])
    told = r"here:7: the chat template refuses .*, or mend /.*/chat_template.jinja:2$"
    for dated in ("", "{% if strftime_now %}{% endif %}"):
        with pytest.raises(ConfigError, match=told):
            sampled(tokenizer_at(tmp_path, f"{dated}\n{{{{ messages[0].nothing.more }}}}"))


@pytest.mark.parametrize("before", ["", "{% if strftime_now is defined %}{% endif %}"])
def test_a_template_that_cannot_be_read_is_named_before_any_message(before: str, tmp_path: Path) -> None:
    """As is a folder with several and no default."""
    told = r"^/[^ ]*/chat_template.jinja:3: the chat template cannot be read: unexpected '}'; mend the templ"
    with pytest.raises(ConfigError, match=told):
        template_of(HuggingFaceTokenizer(tokenizer_at(tmp_path, before + "\n\n{{ messages }" + PLAIN)))


def test_several_templates_without_a_default_are_an_error(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_at(tmp_path))
    tokenizer.inner.chat_template = {"rag": PLAIN, "long": PLAIN}
    with pytest.raises(ConfigError, match=r"chat_template.jinja has no chat template: .*; mend the template"):
        template_of(tokenizer)


def test_the_date_of_a_template_does_not_change_the_data(tmp_path: Path) -> None:
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %A') }}{% endif %}" + PLAIN
    tokenizer, made, sample = sampled(tokenizer_at(tmp_path, dated))
    assert tokenizer.decode(sample.ids).startswith("26 Jul 2024, Friday<|bos|>")
    assert made.name.endswith(" at 2024-07-26") and len(counted(tokenizer, sample)) == 2


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    code = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="here:7: the chat template refuses"):
        sampled(tokenizer_at(tmp_path, code + PLAIN))


def test_without_a_template_there_is_the_plain_one(tmp_path: Path) -> None:
    tokenizer, made, sample = sampled(tokenizer_at(tmp_path, None))
    assert isinstance(made, PlainTemplate) and made.end == tokenizer.inner.eos_token_id
    assert sample.ids[0] == tokenizer.inner.bos_token_id and not sample.counts[0]
    assert counted(tokenizer, sample) == [f" {TALK[n]['content']}<|eos|>" for n in (1, 3)]
    assert made.vocab_size == tokenizer.vocab_size == len(tokenizer.inner)


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    """The library makes one of a single token out of a folder with config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(
        ConfigError, match=r"has no tokenizer that can be read: it has none of tokenizer\.json, "
    ):
        HuggingFaceTokenizer(tmp_path)
    for content in ("{", "{}", "[]"):
        (tmp_path / "tokenizer.json").write_text(content)
        told = (
            "tokenizer.json is not JSON: .*; copy it again" if content == "{" else "has no tokenizer that can"
        )
        with pytest.raises(ConfigError, match=told):
            HuggingFaceTokenizer(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        HuggingFaceTokenizer(tmp_path / "tokenizer.json")


def test_code_in_the_folder_is_neither_run_nor_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer_at(tmp_path)
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit(9)")
    file = tmp_path / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on standard input"))
    try:
        found = HuggingFaceTokenizer(tmp_path)
    except ConfigError as error:
        assert "custom code" in str(error)
    else:
        assert found.decode(found.encode("Hello there")) == "Hello there"


def dataset_of(folder: Path, tokenizer: str, *lines: object, size: int = 128, **options: Any) -> Dataset:
    for name in ("chat.jsonl", "other.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
    other = {"validation": "other", "validation_pct": None, "validation_file": "other.jsonl"}
    source = {"source": "file", "backwards": False, "shuffle_answers": False, "file": "chat.jsonl"}
    values = source | {"too_long": "error", "packing": False, "bucketing": False} | other | options
    place = {"data_dir": folder, "root": folder, "block_size": size, "tokenizer_dir": tokenizer}
    return opened("chat", values, tokenizer="huggingface", **place)


@pytest.mark.parametrize("packing", [False, True])
def test_the_data_set_learns_the_answers(packing: bool, tmp_path: Path) -> None:
    tokenizer_at(tmp_path / "model")
    dataset = dataset_of(tmp_path, "model", {"messages": TALK}, {"messages": TALK[:2]}, packing=packing)
    spec, tokenizer = dataset.spec, dataset.tokenizer
    assert isinstance(spec, ChatSpec) and isinstance(tokenizer, HuggingFaceTokenizer)
    assert spec.vocab_size == len(tokenizer.inner) and spec.packed == packing
    assert "by the chat template of the tokenizer" in dataset.source
    inputs, targets = dataset.train.take()
    assert inputs.min() >= -1 and inputs.max() < spec.vocab_size
    said = tokenizer.decode(targets[targets != IGNORED])
    assert sorted(said.split("\n")) == sorted(["", *(f"{TALK[n]['content']}<|stop|>" for n in (1, 1, 3))])
    lines = show(dataset, dataset.train, np.arange(dataset.train.size))
    assert f"[[{TALK[1]['content']}<end>\\n]]" in "".join(lines)
    predicted = np.roll(inputs[:, 0] if packing else inputs, -1, axis=1)
    assert (predicted[targets != IGNORED] == targets[targets != IGNORED]).all()


def test_rewritten_histories_and_lost_tokens_are_told(tmp_path: Path) -> None:
    tokenizer_at(tmp_path / "model", FORGETS)
    lines = [{"messages": TALK}, {"messages": TALK[:2]}]
    dataset = dataset_of(tmp_path, "model", *lines)
    assert "the template rewrites earlier answers: 2 count in their last one only" in dataset.source
    with pytest.raises(ConfigError, match=r"chat.jsonl:1 takes \d+ tokens, CONFIG_BLOCK_SIZE is 40"):
        dataset_of(tmp_path, "model", *lines, size=40)
    cut = dataset_of(tmp_path, "model", *lines, size=40, too_long="cut")
    assert "1 of 2 conversations for training are longer than 40: 1 are left out and 0 cut" in cut.source


@pytest.mark.parametrize("template", [PLAIN, None])
def test_control_tokens_in_a_text_are_an_error(template: str | None, tmp_path: Path) -> None:
    """Such as in text that a template was applied to already, or that speaks for another role."""
    tokenizer_at(tmp_path / "model", template)
    spoofed = {"prompt": "Hi<|stop|>", "completion": "Ho"}
    with pytest.raises(
        ConfigError, match=r"chat\.jsonl:2 has <\|stop\|> in a message: the tokenizer makes a"
    ):
        dataset_of(tmp_path, "model", {"prompt": "<think>", "completion": "x"}, spoofed)


def test_answers_without_a_token_that_counts_are_an_error(tmp_path: Path) -> None:
    silent = MARKED.replace(
        "{{ m.content }}<|stop|>{% endgeneration %}", "{% endgeneration %}{{ m.content }}<|stop|>"
    )
    tokenizer_at(tmp_path / "model", silent)
    with pytest.raises(ToolkitError, match=r"chat\.jsonl:1 (has no token that counts|: the chat)") as found:
        dataset_of(tmp_path, "model", {"messages": TALK})
    assert found.value.exit_code == 2


def test_gpt2_learns_with_such_a_tokenizer(tmp_path: Path) -> None:
    from tests.support.tokens import small_lm_config
    from tests.support.training import small_job, small_plan
    from train.job import Progress
    from train.loop import train
    from train.training_data import make_training_data

    tokenizer_at(tmp_path / "model")
    dataset = dataset_of(tmp_path, "model", *[{"messages": TALK[:2]}] * 4, size=64)
    config = small_lm_config(task="chat", max_steps=60, optimizer="adamw", learning_rate=0.02, momentum=0.0)
    job = small_job(config, small_plan(4), make_training_data(config, dataset))
    figures = train(job, Progress())
    assert figures["exact_match"] == 1.0 and figures["tokens"] == 4 * int(
        (dataset.test.take()[1][0] != IGNORED).sum()
    )
    assert dataclasses.asdict(dataset.spec)["unit"] == "token"


def test_the_plain_template_is_one_of_transformers(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(tokenizer_at(tmp_path / "own", None))
    template = template_of(tokenizer)
    assert isinstance(template, PlainTemplate)
    tokenizer.inner.chat_template = template.jinja()
    assert tokenizer.inner.chat_template.startswith("{{ bos_token }}")
    render = tokenizer.inner.apply_chat_template
    assert render(TALK, return_dict=False) == template.sample(Conversation("here", TALK)).ids
    asks = render(TALK[:3], add_generation_prompt=True, return_dict=False)
    assert asks == template.prompt(Conversation("here", TALK[:3]))
    # One that begins each text with a space has other tokens for parts of a text.
    spaced = tokenizers.Tokenizer.from_file(str(tmp_path / "own" / "tokenizer.json"))
    spaced.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    kept = {"tokenizer_object": spaced, "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    transformers.PreTrainedTokenizerFast(**kept).save_pretrained(tmp_path / "spaced")
    other = template_of(HuggingFaceTokenizer(tmp_path / "spaced"))
    assert isinstance(other, PlainTemplate) and other.jinja() is None


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["n", "y"])
def test_a_tuned_directory_is_loaded_by_transformers_and_peft(packing: str, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    from tests.e2e.runner import Runner
    from tests.extras.test_causal import theirs, with_weights

    # Packed with a template and weights in fp32, else without and in bf16, as are frozen layers in training.
    # Merged weights are rounded to it.
    packs = packing == "y"
    dtype, limit = (torch.float32, 1e-5) if packs else (torch.bfloat16, 1e-2)
    folder = tokenizer_at(with_weights("llama", tmp_path, dtype=dtype), PLAIN if packs else None)
    (folder / "LICENSE").write_text("as you like")
    source = {"repository": "me/tiny", "commit": "0" * 40, "license": "mit"}
    if packs:  # as make fetch leaves it
        (folder / "source.json").write_text(json.dumps(source))
    (tmp_path / "chat.jsonl").write_text("\n".join([json.dumps({"messages": TALK[:2]})] * 4))
    runner = Runner(tmp_path)
    settings = {
        "MODEL_HUGGINGFACE": "y", "HUGGINGFACE_INPUT_CAUSAL": "y", "HUGGINGFACE_DIR": str(folder),
        "DATASET_CHAT": "y", "DATA_DIR": str(tmp_path), "CHAT_PACKING": packing, "BLOCK_SIZE": "64",
        "ADAPT_LORA": "y", "MAX_STEPS": "3", "TARGET_EFFECTIVE_BATCH": "4", "CHAT_VALIDATION_OTHER": "y",
        "CHAT_VALIDATION_FILE": "chat.jsonl", f"PRECISION_{'FP32' if packs else 'BF16'}": "y",
    }  # fmt: skip
    runner.configure("gpt2-tiny", {f"CONFIG_{name}": value for name, value in settings.items()})
    runner.run("train")
    runner.run("export", "--format", "adapter", "--directory", str(tmp_path / "adapters"))
    told = runner.run("export", "--merge", "y", "--directory", str(tmp_path / "merged"))
    assert "at most 0.0e+00 from the run's own outputs" in told
    merged, tokens = theirs(tmp_path / "merged"), torch.arange(32)[None]
    adapted = PeftModel.from_pretrained(theirs(folder), str(tmp_path / "adapters")).eval()
    with torch.no_grad():
        difference = (merged(tokens).logits - adapted(tokens).logits).abs().max()
        moved = (merged(tokens).logits - theirs(folder)(tokens).logits).abs().max()
        assert difference <= limit and 10 * difference < moved
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    plain = template_of(HuggingFaceTokenizer(folder))
    assert tokenizer.chat_template == (plain.jinja() if isinstance(plain, PlainTemplate) else PLAIN)
    card = (tmp_path / "merged/README.md").read_text()
    assert f"these weights are {str(dtype)[6:]}" in card
    if packs:
        assert "license: mit\nlicense_link: LICENSE\nbase_model: me/tiny\n" in card
        assert f"| base model | me/tiny, commit {'0' * 40} |" in card
        assert "that of the base model, mit, in LICENSE; of the data" in card
    else:
        assert "license: other\nlicense_name: that-of-the-base-model\nlicense_link: LICENSE\n" in card
        assert f"| base model | {folder.name} |" in card and "base_model" not in card
        assert "that of the base model, in LICENSE; of the data" in card
    figures = json.loads((tmp_path / "merged/model.json").read_text())
    before, after = figures["evaluation"]["loss"], figures["evaluation_merged"]["loss"]
    assert (packs or before != after) and after == pytest.approx(before, rel=0.01)
    assert f"| evaluation | tokens {figures['evaluation_merged']['tokens']:.4f}, loss {after:.4f}" in card
    assert "before adapters were merged" in card
    assert "| input | int64 (N, 64) |" in card
    (tmp_path / "chat.jsonl").unlink()
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"messages": TALK[:1]}))
    told = runner.run("predict", "--input", str(asked), "--tokens", "3")
    assert "asked.jsonl:1" in told and f"1 prediction in {'fp32' if packs else 'bf16'}" in told
