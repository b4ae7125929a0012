"""Layers: which wins, what is reported, and what a file written by a tool may hold."""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.kconf import load, write
from lib.kconf.reader import HEADER, command_line, read_text
from lib.kconf.strict import StrictLoad, Verdict
from lib.kconf.tree import load_tree
from tests.support.configs import ROOT

TREE = Path(__file__).resolve().parents[2] / "fixtures" / "kconf" / "tree"


@pytest.fixture(scope="module")
def tree():
    return load_tree("Kconfig", srctree=TREE)


def judge(tree, *files: str | bytes, overrides: dict[str, str] | None = None) -> Verdict:
    configuration = StrictLoad(tree)
    for name, text in zip("abc", files, strict=False):
        configuration.add(read_text(text if isinstance(text, bytes) else text.encode(), name=name))
    if overrides is not None:
        configuration.add(command_line(overrides))
    return configuration.finish()


def lines_of(verdict: Verdict) -> list[str]:
    return [str(finding) for finding in verdict.findings]


GOOD = {
    "empty": b"",
    "blank lines and comments": b"\n  \n# hello\n#\n  # indented\n# CONFIG_DEBUG=y was an idea\n",
    "carriage returns": b"CONFIG_DEBUG=y\r\nCONFIG_NUM_EPOCHS=3\r\n# CONFIG_EMA is not set\r\n",
    "no newline at the end": b"CONFIG_NUM_EPOCHS=3",
    "trailing blanks": b"CONFIG_NUM_EPOCHS=3  \t\n",
    "same value twice": b"CONFIG_DEBUG=y\nCONFIG_DEBUG=y\n",
    "default member n with another y": b"# CONFIG_MODEL_LENET5 is not set\nCONFIG_MODEL_MLP=y\n",
    "member that is not the default n": b"CONFIG_MODEL_MLP=n\n",
    "what it depends on comes later": b"CONFIG_BATCH_SIZE=8\nCONFIG_HYPER_PARAM_MANUAL=y\n",
    "the selected symbol was y": b"CONFIG_MODEL_GPT2=y\nCONFIG_FAST_ATTENTION=y\n",
    "floats": b'CONFIG_LEARNING_RATE="1e-4"\n',
    "negative": b"CONFIG_OFFSET=-10\n",
    "separators that are no line ends": 'CONFIG_NOTE="a\u2028b\x0bc\x85d"\n'.encode(),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_file_has_no_findings(tree, name):
    assert judge(tree, GOOD[name]) == Verdict((), ())


def test_a_line_of_blanks_takes_no_time(tree):
    """Where a comment is looked for at each of them, and again up to the end, it is half a minute."""
    blanks = " " * 100_000
    started = time.process_time()
    [finding] = lines_of(judge(tree, f"CONFIG_NUM_EPOCHS=1{blanks}x\n"))
    assert finding.endswith("x is not a plain decimal number")
    assert time.process_time() - started < 5


def test_whether_a_tool_wrote_a_short_file_is_seen_from_a_few_symbols():
    class Counted(list):
        seen = 0

        def __iter__(self):
            for item in super().__iter__():
                self.seen += 1
                yield item

    own = load_tree("Kconfig", srctree=TREE)
    full = read_text(write.full_text(own).removeprefix(HEADER).encode(), name="full")
    own.unique_defined_syms = Counted(own.unique_defined_syms)
    configuration = StrictLoad(own)
    own.unique_defined_syms.seen = 0
    assert not configuration.is_by_tool(read_text(b"CONFIG_DEBUG=y\n", name="short"))
    assert own.unique_defined_syms.seen < len(own.unique_defined_syms) / 2
    assert configuration.is_by_tool(full)
    half = dataclasses.replace(full, assignments=full.assignments[: (len(full.assignments) + 1) // 2])
    assert configuration.is_by_tool(half)
    assert not configuration.is_by_tool(dataclasses.replace(full, assignments=half.assignments[:-1]))


def test_string_arrives_byte_for_byte(tree):
    assert lines_of(judge(tree, r'CONFIG_NOTE="q\"uote \\ $HOME #x"')) == []
    assert tree.syms["NOTE"].str_value == 'q"uote \\ $HOME #x'


def test_later_file_wins_and_says_so(tree):
    verdict = judge(tree, "CONFIG_NUM_EPOCHS=3\n", "CONFIG_NUM_EPOCHS=4\n")
    assert verdict == Verdict((), ("b:1: CONFIG_NUM_EPOCHS=4 replaces CONFIG_NUM_EPOCHS=3 of a:1",))
    assert tree.syms["NUM_EPOCHS"].str_value == "4"


def test_later_file_moves_a_choice_and_says_so(tree):
    verdict = judge(tree, "CONFIG_MODEL_MLP=y\n", "\nCONFIG_MODEL_GPT2=y\n")
    assert verdict == Verdict((), ("b:2: CONFIG_MODEL_GPT2=y replaces CONFIG_MODEL_MLP=y of a:1",))
    assert tree.syms["MODEL"].str_value == "gpt2"


def test_same_value_in_a_later_file_is_not_worth_a_word(tree):
    assert judge(tree, "CONFIG_NUM_EPOCHS=3\n", "CONFIG_NUM_EPOCHS=3\n") == Verdict((), ())


def test_what_a_later_file_hides_is_a_notice(tree):
    verdict = judge(tree, 'CONFIG_EMA=y\nCONFIG_EMA_DECAY="0.9"\n', "# CONFIG_EMA is not set\n")
    assert lines_of(verdict) == []
    assert verdict.notices == (
        "b:1: CONFIG_EMA=n replaces CONFIG_EMA=y of a:1",
        'a:2: CONFIG_EMA_DECAY="0.9" has no effect: it needs CONFIG_EMA=y (now n)',
    )


def test_what_never_took_is_a_finding_however_many_files(tree):
    verdict = judge(tree, 'CONFIG_EMA_DECAY="0.9"\n', "# CONFIG_EMA is not set\n")
    assert lines_of(verdict) == ['a:1: CONFIG_EMA_DECAY="0.9" has no effect: it needs CONFIG_EMA=y (now n)']


def test_later_file_may_bring_what_an_earlier_one_needs(tree):
    assert lines_of(judge(tree, 'CONFIG_EMA_DECAY="0.9"\n', "CONFIG_EMA=y\n")) == []


def test_range_that_a_later_file_tightens_is_a_finding(tree):
    verdict = judge(tree, "CONFIG_NUM_WORKERS=9\n", "CONFIG_DEBUG=y\n")
    assert lines_of(verdict) == ["a:1: CONFIG_NUM_WORKERS=9 is outside 0..4 (the range while CONFIG_DEBUG)"]


def test_command_line_wins_silently_and_moves_choices(tree):
    verdict = judge(
        tree,
        "CONFIG_MODEL_MLP=y\nCONFIG_DEBUG=y\n",
        overrides={"CONFIG_MODEL_GPT2": "y", "CONFIG_DEBUG": "n"},
    )
    assert verdict == Verdict((), ())
    assert (tree.syms["MODEL"].str_value, tree.syms["DEBUG"].str_value) == ("gpt2", "n")


@pytest.mark.parametrize(
    ("name", "value", "finding"),
    [
        ("BATCH_SIZE", "64", "CONFIG_BATCH_SIZE=64 has no effect: it needs CONFIG_HYPER_PARAM_MANUAL=y "
         "(now CONFIG_HYPER_PARAM_AUTO=y); give CONFIG_HYPER_PARAM_MANUAL=y CONFIG_BATCH_SIZE=64"),
        ("TRACE", "y", "CONFIG_TRACE=y has no effect: it needs CONFIG_DEBUG=y (now n); "
         "give CONFIG_DEBUG=y CONFIG_TRACE=y"),
        ("GPT2_SIZE_LARGE", "y", "CONFIG_GPT2_SIZE_LARGE=y has no effect: it needs CONFIG_MODEL_GPT2=y "
         "(now CONFIG_MODEL_LENET5=y); give CONFIG_MODEL_GPT2=y CONFIG_GPT2_SIZE_LARGE=y"),
        ("LEARNING_RATE", "abc", 'CONFIG_LEARNING_RATE="abc" is not a number (Value: float, 0 < x <= 10)'),
        ("LEARNING_RATE", '"0.1"',
         'CONFIG_LEARNING_RATE="\\"0.1\\"" is not a number (Value: float, 0 < x <= 10)'),
        ("NUM_EPOCHS", "0", "CONFIG_NUM_EPOCHS=0 is outside 1..1000000"),
        ("NOTE", "a\nb", "CONFIG_NOTE has a line break in its value; a string is a single line"),
        ("MODEL_LENET5", "n", "CONFIG_MODEL_LENET5=n leaves no member of the choice; set another =y: "
         "CONFIG_MODEL_GPT2, CONFIG_MODEL_MLP"),
        ("MODEL", "gpt2", "CONFIG_MODEL cannot be set (now lenet5): it follows from CONFIG_MODEL_LENET5, "
         "CONFIG_MODEL_GPT2, CONFIG_MODEL_MLP; set CONFIG_MODEL_GPT2=y"),
        ("NOTE", "a\udcff", "CONFIG_NOTE has a byte in its value that is not UTF-8"),
        ("BATCHSIZE", "3", "CONFIG_BATCHSIZE is not a symbol; did you mean CONFIG_BATCH_SIZE?"),
    ],
)  # fmt: skip
def test_command_line_is_checked_like_a_file(tree, name, value, finding):
    assert lines_of(judge(tree, "", overrides={f"CONFIG_{name}": value})) == [f"command line: {finding}"]


@pytest.mark.parametrize("name", ["BATCH_SIZE", "TRACE", "GPT2_SIZE_LARGE", "EMA_DECAY"])
def test_command_that_is_offered_works(tree, name):
    value = {"BATCH_SIZE": "64", "EMA_DECAY": "0.5"}.get(name, "y")
    [finding] = lines_of(judge(tree, "", overrides={f"CONFIG_{name}": value}))
    words = finding.split("; give ")[1].split()
    assert len(words) == 2
    offered = dict(word.split("=", 1) for word in words)
    assert lines_of(judge(tree, "", overrides=offered)) == []


def test_what_a_member_excludes_needs_another_member(tmp_path):
    """Of a choice of two that is offered, of a choice of three all are named, of more the first six."""
    lines = ['mainmenu "Choices"']
    for name, members in (("TWO", 2), ("THREE", 3), ("MANY", 9)):
        config = [f'config {name}_{number}\n\tbool "{number}"' for number in range(members)]
        lines += [f'choice {name}\n\tprompt "{name}"', *config, "endchoice"]
        lines += [f'config WITH_{name}\n\tint "With"\n\tdepends on !{name}_0\n\tdefault 1']
    (tmp_path / "Kconfig").write_text("\n".join(lines) + "\n")
    tree = load_tree("Kconfig", srctree=tmp_path)
    needs = {
        "TWO": "CONFIG_TWO_1=y (now CONFIG_TWO_0=y); give CONFIG_TWO_1=y CONFIG_WITH_TWO=4",
        "THREE": "CONFIG_THREE_1=y or CONFIG_THREE_2=y (now CONFIG_THREE_0=y)",
        "MANY": "CONFIG_MANY_1=y or CONFIG_MANY_2=y or CONFIG_MANY_3=y or CONFIG_MANY_4=y or CONFIG_MANY_5=y "
        "or CONFIG_MANY_6=y or another member (now CONFIG_MANY_0=y)",
    }
    for name, text in needs.items():
        [finding] = lines_of(judge(tree, "", overrides={f"CONFIG_WITH_{name}": "4"}))
        assert finding.endswith(f"CONFIG_WITH_{name}=4 has no effect: it needs {text}")
        member = text.split("=")[0]
        assert not lines_of(judge(tree, "", overrides={member: "y", f"CONFIG_WITH_{name}": "4"}))


def test_an_offered_value_is_quoted_for_the_shell():
    """Which splits it at blanks, and make takes a dollar sign for itself."""
    with pytest.raises(ConfigError) as caught:
        load(
            root=ROOT,
            config_file=ROOT / "defconfigs/tabular-regression",
            overrides={"CONFIG_TABULAR_INPUTS": "a,b $c,d'e"},
        )
    [finding] = caught.value.findings or [str(caught.value)]
    words = shlex.split(finding.split("; give ")[1])
    assert words == ["CONFIG_DATASET_TABULAR=y", "CONFIG_TABULAR_INPUTS=a,b $$c,d'e"]


def test_offered_command_turns_off_what_is_in_the_way(tree):
    [finding] = lines_of(judge(tree, "CONFIG_EMA=y\n", overrides={"CONFIG_TRACE": "y"}))
    assert finding.endswith("; give CONFIG_DEBUG=y CONFIG_EMA=n CONFIG_TRACE=y")
    offered = {"CONFIG_DEBUG": "y", "CONFIG_EMA": "n", "CONFIG_TRACE": "y"}
    assert lines_of(judge(tree, "CONFIG_EMA=y\n", overrides=offered)) == []


def full_file(tree, text: str = "") -> str:
    judge(tree, text)
    return write.full_text(tree)


def test_full_file_may_name_what_nobody_can_set(tree):
    text = full_file(tree, "CONFIG_MODEL_GPT2=y\n")
    assert "CONFIG_MODEL_HAS_ATTENTION=y" in text and 'CONFIG_MODEL="gpt2"' in text
    assert judge(tree, text) == Verdict((), ())
    assert judge(tree, text.removeprefix(HEADER)) == Verdict((), ())  # as kconfiglib itself writes it


def test_derived_value_in_a_short_file_is_an_error_even_if_right(tree):
    assert lines_of(judge(tree, 'CONFIG_MODEL="lenet5"\n')) == [
        "a:1: CONFIG_MODEL cannot be set: it follows from "
        "CONFIG_MODEL_LENET5, CONFIG_MODEL_GPT2, CONFIG_MODEL_MLP; set CONFIG_MODEL_LENET5=y"
    ]


def test_edited_derived_value_in_a_full_file_is_an_error(tree):
    text = full_file(tree).replace('CONFIG_MODEL="lenet5"', 'CONFIG_MODEL="gpt2"')
    line = text.splitlines().index('CONFIG_MODEL="gpt2"') + 1
    assert lines_of(judge(tree, text)) == [
        f"a:{line}: CONFIG_MODEL cannot be set (now lenet5): it follows from CONFIG_MODEL_LENET5, "
        "CONFIG_MODEL_GPT2, CONFIG_MODEL_MLP; remove the line or run make olddefconfig"
    ]


def test_one_bad_line_in_a_full_file_is_one_finding(tree):
    text = full_file(tree).replace("CONFIG_NUM_EPOCHS=10", "CONFIG_NUM_EPOCH=10")
    [finding] = lines_of(judge(tree, text))
    assert finding.endswith("CONFIG_NUM_EPOCH is not a symbol; did you mean CONFIG_NUM_EPOCHS?")


def test_verdict_can_be_asked_again_after_another_layer(tree):
    configuration = StrictLoad(tree)
    configuration.add(read_text(b'CONFIG_EMA_DECAY="0.9"\n', name="a"))
    assert len(configuration.finish().findings) == 1
    configuration.add(command_line({"CONFIG_EMA": "y"}))
    assert configuration.finish() == Verdict((), ())


def test_nothing_of_an_earlier_load_stays(tree):
    judge(tree, "CONFIG_NUM_EPOCHS=77\nCONFIG_MODEL_GPT2=y\n")
    judge(tree, "")
    assert (tree.syms["NUM_EPOCHS"].str_value, tree.syms["MODEL"].str_value) == ("10", "lenet5")
