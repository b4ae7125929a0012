"""A plan can be read on any terminal and in any log."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest

from lib.plan import plan
from lib.plan.show import WARNS, compact_text, named_decisions, plain_text, show
from lib.plan.types import Plan
from tests.support.configs import load_hardware, make_config, make_facts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def decided() -> Plan:
    return plan(make_config("resnet50"), load_hardware("cpu-8g"), make_facts("resnet50"))


def words_of(text: str) -> str:
    """The text without its layout: letters and digits only, in order."""
    return "".join(character for character in text if character.isalnum())


@pytest.mark.parametrize("columns", [40, 60, 71, 72, 100, 200])
def test_plain_text_holds_every_reason_at_every_width(decided: Plan, columns: int) -> None:
    text = plain_text(decided, columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    for field in dataclasses.fields(decided):
        if field.name != "reasons" and getattr(decided, field.name) != ():
            assert words_of(decided.reasons[field.name]) in words_of(text), field.name


def test_where_there_is_little_room_a_reason_stands_under_its_value(decided: Plan) -> None:
    lines = plain_text(decided, columns=40).splitlines()
    assert lines[0].split() == ["device", "cpu"] and lines[1].startswith("  Intel")


def test_plain_text_is_aligned(decided: Plan) -> None:
    lines = plain_text(decided, columns=400).splitlines()
    assert (
        len({line.index(reason) for line, reason in zip(lines, ordered_reasons(decided), strict=True)}) == 1
    )


def ordered_reasons(decided: Plan) -> list[str]:
    names = (field.name for field in dataclasses.fields(decided))
    return [decided.reasons[name] for name in names if getattr(decided, name) != () and name != "reasons"]


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_a_terminal_of_any_width(decided: Plan, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    show(decided, stream)
    visible = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert ("─" in visible) == (columns >= 72)  # a table where there is room for one
    assert max(map(len, visible.splitlines())) <= columns
    assert words_of(decided.reasons["micro_batch"])[:20] in words_of(visible)


def test_a_file_gets_plain_text(decided: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = io.StringIO()
    show(decided, stream)
    assert stream.getvalue() == plain_text(decided, columns=100) + "\n"
    assert stream.getvalue().isascii()


def test_a_compact_plan_has_at_most_eight_lines_besides_its_warnings() -> None:
    for name in ("cpu-8g", "cpu-24g-amx", "h100-80g-70g-free-x4"):
        decided = plan(make_config("resnet50"), load_hardware(name), make_facts("resnet50"))
        lines = compact_text(decided, columns=80).splitlines()
        assert not any(map(WARNS.search, decided.reasons.values()))
        assert len(lines) <= 8 and max(map(len, lines)) <= 80
        text = " ".join(lines)
        assert f"{decided.effective_batch} samples a step: " in text
        shares = "" if decided.world == 1 else f"{decided.effective_batch // 4} on each of 4 devices, "
        assert f" samples a step: {shares}as recommended; " in text
        assert f" x {decided.micro_batch} at a time" in " ".join(text.split())
        assert decided.device in text and decided.precision in text and ("ddp" in text) == (decided.world > 1)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"dist_strategy": "ddp"}, "CONFIG_DIST_STRATEGY_DDP=y has no effect"),
        ({"norm_batch": 0}, "not portable to machines that split the batch differently"),
        ({"activation_offload": True}, "CONFIG_ACTIVATION_OFFLOAD=y does nothing here"),
        ({"precision": "bf16"}, "slow, because the CPU has no bf16 instructions"),
        ({"num_devices": 16, "model": "lenet5"}, "so they wait for each other"),
        ({"cuda_graphs": True}, "CONFIG_CUDA_GRAPHS=y has no effect"),
    ],
)
def test_a_compact_plan_drops_no_warning(changes: dict[str, object], warning: str) -> None:
    model = str(changes.get("model", "resnet50"))
    decided = plan(make_config(**{"model": model, **changes}), load_hardware("cpu-8g"), make_facts(model))
    for columns in (60, 100):
        text = compact_text(decided, columns=columns)
        assert words_of(warning) in words_of(text)
        names = {name for name, _, _ in named_decisions(decided)} | {"batch", "numerics", "memory"}
        labelled = [line[2:] for line in text.splitlines()[1:] if line[2] != " "]
        assert all(any(f"{line} ".startswith(f"{name} ") for name in names) for line in labelled)
        for field in dataclasses.fields(decided):
            if WARNS.search(decided.reasons.get(field.name, "")):
                assert words_of(decided.reasons[field.name]) in words_of(text), field.name
