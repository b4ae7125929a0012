"""A language model learns to answer: from a file of conversations to a question of the user."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lib.runs import metrics
from tests.e2e.runner import Runner

pytestmark = [pytest.mark.slow, pytest.mark.long]

LETTERS = "abcdefghijkl"
SETTINGS = {
    "CONFIG_GPT2_SIZE_CUSTOM": "y",
    "CONFIG_GPT2_LAYERS": "2",
    "CONFIG_GPT2_HEADS": "2",
    "CONFIG_GPT2_WIDTH": "64",
    "CONFIG_DATASET_CHAT": "y",
    "CONFIG_CHAT_PACKING": "y",
    "CONFIG_CHAT_VALIDATION_PCT": "20",
    "CONFIG_BLOCK_SIZE": "64",
    "CONFIG_TARGET_EFFECTIVE_BATCH": "16",
    "CONFIG_MAX_STEPS": "120",
    "CONFIG_EVAL_INTERVAL_STEPS": "20",
    "CONFIG_BEST_METRIC": "exact_match",
    "CONFIG_PRECISION_FP32": "y",
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """What is asked for is the first of two letters, and the second one."""
    folder = tmp_path_factory.mktemp("chat")
    lines = [
        {"messages": [{"role": "user", "content": a + b}, {"role": "assistant", "content": f"{a}, then {b}"}]}
        for a in LETTERS
        for b in LETTERS
    ]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    runner = Runner(folder)
    runner.configure("gpt2-tiny", SETTINGS | {"CONFIG_DATA_DIR": str(folder)})
    runner.run("train")
    return runner


def test_it_answers_what_it_was_not_shown(runner: Runner) -> None:
    run = runner.newest()
    rows = [row for row in metrics.read(run.metrics) if row["kind"] == "eval"]
    assert rows[-1]["exact_match"] > 0.9 > rows[0]["exact_match"] + 0.2
    assert rows[-1]["perplexity"] < 1.5 < rows[0]["perplexity"]
    assert (run.checkpoints / "best").exists() and "packed into " in run.log.read_text()
    told = runner.run("eval")
    whole = f"of {rows[-1]['conversations']} conversations"
    assert re.search(
        rf"exact match {rows[-1]['exact_match']:.4f} over \d+ bytes {whole} \(validation part of chat\)",
        told,
    )


def test_it_answers_a_question_of_the_user(runner: Runner) -> None:
    options = ("--temperature", "0", "--tokens", "30")
    assert runner.run("sample", "--prompt", "cf", *options).splitlines()[-1] == " c, then f<end>"


def test_files_of_questions_are_answered_without_the_data(runner: Runner, tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "cf"}]}
    right = {"messages": [*asked["messages"], {"role": "assistant", "content": "c, then f"}]}
    wrong = {"messages": [*asked["messages"], {"role": "assistant", "content": "f, then c"}]}
    lines, out = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    lines.write_text("\n".join(map(json.dumps, (asked, right, wrong))))
    data = runner.folder / "chat.jsonl"
    kept = data.rename(tmp_path / "away.jsonl")
    try:
        told = runner.run("predict", "--input", str(lines), "--out", str(out), "--tokens", "30")
    finally:
        kept.rename(data)
    assert "exact match 0.5000 over 2 answers that are there" in told and "are cut" not in told
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["answer"] for row in found] == ["c, then f"] * 3
    assert [row["wanted"] for row in found] == [None, "c, then f", "f, then c"]
    assert [row["exact"] for row in found] == [None, True, False]
    assert [row["input"] for row in found] == [f"{lines}:{number}" for number in (1, 2, 3)]
    told = runner.run("predict", "--input", str(lines), "--out", str(out), "--tokens", "3")
    assert "3 of 3 answers are cut at TOKENS=3" in told and "exact match 0.0000" in told
    lines.write_text(json.dumps({"prompt": "x" * 70}) + "\n" + json.dumps({"prompt": "cf"}))
    told = runner.run("predict", "--input", str(lines), status=2)
    assert "there is no room for an answer: " in told and ":1 takes 87 tokens" in told
    assert "TOP=3 is for classes" in runner.run("predict", "--input", str(lines), "--top", "3", status=2)


def test_its_report_shows_answers(runner: Runner) -> None:
    runner.run("report")
    page = (runner.newest().path / "report.html").read_text()
    assert "Answers after step 120" in page and "Wanted: " in page and "Given: " in page


def test_a_fault_in_the_file_makes_no_run(runner: Runner) -> None:
    before, file = sorted(runner.runs.glob("*/*")), runner.folder / "chat.jsonl"
    text = file.read_text()
    try:
        file.write_text(text + '\n{"messages": []}')
        told = runner.run("train", status=2)
    finally:
        file.write_text(text)
    assert f'{file}:145: "messages" is no list of messages' in told and "Traceback" not in told
    assert sorted(runner.runs.glob("*/*")) == before


def test_it_is_exported(runner: Runner) -> None:
    """Packed in training, it takes one conversation in each row."""
    told = runner.run("export", "--format", "pt2", "--directory", str(runner.folder / "out"))
    assert "from the run's own outputs" in told
    rows = [row for row in (runner.folder / "out/README.md").read_text().splitlines() if "put | " in row]
    assert rows == ["| input | int64 (N, 64) |", "| output | logits of the next token (N, 64, 256) |"]
