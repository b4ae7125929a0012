"""`make elastic-check` and `make elastic-demo`."""

from __future__ import annotations

import pytest

from lib.errors import ConfigError, ToolkitError
from scripts import elastic


def test_the_rules_are_shown_for_a_gpu_that_is_only_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert elastic.show("a100-40gx5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NVIDIA A100-SXM4-40GB, 42.3 GB; 5 of them"
    assert lines[2].split() == [
        "1",
        "single_gpu",
        "encoder",
        "on",
        "0,",
        "llama",
        "on",
        "0,",
        "qwen",
        "on",
        "0",
    ]
    assert any(line.startswith("  5  ddp_5gpu") for line in lines)
    assert elastic.show("rtx4090") == 0
    assert "  2  none: model_split leaves room for -10 samples" in capsys.readouterr().out


def test_without_a_gpu_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "probe", lambda _: elastic.parse_gpu("cpu-24g"))
    with pytest.raises(ConfigError, match="name one: GPU=a100-40g"):
        elastic.show("")


@pytest.mark.parametrize(
    ("two", "alike"),
    [
        ((64, [0.7] * 10 + [0.8]), True),
        ((64, [0.71] * 11), False),
        ((64, [0.7] * 10), False),
        ((128, [0.7] * 11), False),
    ],
)
def test_the_demonstration_fails_where_two_do_not_train_as_one(
    two: tuple[int, list[float]], alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_trained", {1: (64, [0.7] * 11), 2: two}.__getitem__)
    if alike:
        assert elastic.demonstrate() == 0
        return
    with pytest.raises(ToolkitError, match="did not train alike"):
        elastic.demonstrate()
