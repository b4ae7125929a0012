"""Files of other branches and trees: what is off there and unknown here, and what is lost of them."""

from __future__ import annotations

import random
from pathlib import Path

import kconfiglib
import pytest

from lib.errors import MAX_LINES_SHOWN
from lib.kconf import diagnostics, load
from lib.kconf.cli import main
from lib.kconf.lint import fragments_take_on_every_configuration
from lib.kconf.listing import judge
from lib.kconf.tree import load_own_tree, load_tree

ROOT = Path(__file__).resolve().parents[3]
TREE = ROOT / "tests" / "fixtures" / "kconf" / "tree"
ABSENT = "# CONFIG_MODEL_ELSEWHERE is not set\nCONFIG_DEBGU=n\nCONFIG_DEBUG=y\n"
NOTE = (
    "CONFIG_MODEL_ELSEWHERE, CONFIG_DEBGU (did you mean CONFIG_DEBUG?) are not symbols here, and off anyway"
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["defconfig", "lenet5+other"],
        ["defconfig", "lenet5", "--fragments=defconfigs/fragments/other"],
        ["merge", "other"],
        ["checkconfig", "defconfigs/fragments/other"],
        ["alldefconfig"],
    ],
)
def test_what_is_off_and_unknown_is_a_notice(kconf_project, kconf, monkeypatch, arguments):
    kconf("defconfig", "lenet5")
    (kconf_project / "defconfigs/fragments/other").write_text(ABSENT)
    if arguments == ["alldefconfig"]:
        monkeypatch.setenv("KCONFIG_ALLCONFIG", "defconfigs/fragments/other")
    status, _, err = kconf(*arguments)
    assert (status, [line for line in err if "symbol" in line]) == (
        0,
        [f"note: defconfigs/fragments/other:1: {NOTE}"],
    )
    assert arguments[0] == "checkconfig" or "CONFIG_DEBUG=y\n" in (kconf_project / ".config").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["checkconfig"], ["olddefconfig"], ["setconfig", "NUM_EPOCHS=3"], ["savedefconfig", "out"]]
)
def test_a_whole_configuration_of_another_branch_is_taken(kconf_project, kconf, arguments):
    kconf("defconfig", "gpt2")
    with (kconf_project / ".config").open("a") as file:
        file.write("# CONFIG_MODEL_ELSEWHERE is not set\n")
    assert load(root=kconf_project, config_file=kconf_project / ".config").values["MODEL"] == "gpt2"
    status, _, err = kconf(*arguments)
    (note,) = err
    assert (status, note.partition(": ")[2].partition(": ")[2]) == (
        0,
        "CONFIG_MODEL_ELSEWHERE is not a symbol here, and off anyway (make olddefconfig removes this)",
    )
    kconf("olddefconfig")
    assert kconf("checkconfig")[2] == []


def test_what_somebody_types_is_no_such_thing(kconf_project, kconf, monkeypatch):
    kconf("defconfig", "lenet5")
    assert kconf("setconfig", "DEBGU=n")[0] == 2
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "CONFIG_DEBGU")
    monkeypatch.setenv("CONFIG_DEBGU", "n")
    assert kconf("checkconfig")[0] == 2
    (kconf_project / "other").write_text('CONFIG_MODEL_ELSEWHERE="n"\n')
    assert kconf("checkconfig", "other")[0] == 2


def test_a_shipped_fragment_names_no_unknown_symbol(kconf_project):
    (kconf_project / "defconfigs/fragments/other").write_text(ABSENT)
    reported = list(fragments_take_on_every_configuration(load_own_tree(kconf_project)))
    assert "defconfigs/fragments/other:2: CONFIG_DEBGU=n, which is not a symbol" in reported


def check(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.config").write_text(text)
    return main(["check", "--srctree", str(TREE), "some.config"], root=ROOT)


def test_in_a_foreign_tree_only_a_loss_is_an_error(tmp_path, monkeypatch, capsys):
    text = (
        '# CONFIG_ELSEWHERE is not set\nCONFIG_MODEL="lenet5"\nCONFIG_BATCH_SIZE=3\n'
        "# CONFIG_TRACE is not set\nCONFIG_GONE=y\n"
    )
    assert check(text, tmp_path, monkeypatch) == 2
    captured = capsys.readouterr()
    assert [line.split(":")[1] for line in captured.out.splitlines()] == ["3", "5"]
    counts = "note: lines that are lost or wrong: {}; others of which the value is so anyway: {}{}"
    assert captured.err.splitlines() == [counts.format(2, 3, " (V=1 shows them)")]
    monkeypatch.setenv("V", "1")
    assert (
        check(text.replace("CONFIG_BATCH_SIZE=3\n", "").replace("CONFIG_GONE=y\n", ""), tmp_path, monkeypatch)
        == 0
    )
    captured = capsys.readouterr()
    *others, count = captured.err.splitlines()
    assert [line.split(":")[2] for line in others] == ["1", "2", "3"]
    assert (captured.out, count) == ("", counts.format(0, 3, ""))


@pytest.mark.slow
def test_no_loss_is_missed(tmp_path):
    """300 files of random lines: each assignment that kconfiglib, the reference, drops is reported."""
    tree, oracle = (load_tree("Kconfig", srctree=TREE) for _ in range(2))
    oracle.warn = False
    source = random.Random(5)
    path = tmp_path / "some.config"
    lost = 0
    for _ in range(300):
        lines = [_line(source, tree) for _ in range(source.randint(1, 14))]
        path.write_text("".join(f"{line}\n" for line in lines))
        reported = {finding.line for finding in judge(tree, path)[0]}
        oracle.load_config(str(path))
        for number, line in enumerate(lines, 1):
            name, value = _meant(line)
            symbol = oracle.syms.get(name)
            now = symbol.str_value if symbol is not None and symbol.nodes else "n"
            lost += now != value
            assert now == value or number in reported, path.read_text()
    assert lost > 500


def _line(source: random.Random, tree: kconfiglib.Kconfig) -> str:
    symbol = source.choice(tree.unique_defined_syms)
    name = source.choices([f"CONFIG_{symbol.name}", "CONFIG_GONE"], [9, 1])[0]
    if symbol.orig_type == kconfiglib.BOOL:
        return source.choice([f"{name}=y", f"{name}=n", f"# {name} is not set", f"{name}=Y", f"{name}=y # c"])
    value = source.choice([symbol.str_value, "0", "1", "7", "-4", "0x10", "0.5", "", "+5"])
    return source.choice(
        [f"{name}={value}", f'{name}="{value}"', f'{name}="{value}" # c', f"{name}={value} # c"]
    )


def _meant(line: str) -> tuple[str, str]:
    if line.startswith("#"):
        return line.split()[1].removeprefix("CONFIG_"), "n"
    name, _, value = line.partition("=")
    return name.removeprefix("CONFIG_"), value.split('"')[1] if value.startswith('"') else value


def test_commands_in_a_foreign_tree_run_in_it(tmp_path, monkeypatch, capsys):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "name").write_text("inside")
    (there / "Kconfig").write_text(
        'config WHERE\n\tstring "Where"\n\tdefault "$(shell,cat name; touch mark)"\n'
    )
    (here / "some.config").write_text('CONFIG_WHERE="inside"\n')
    monkeypatch.chdir(here)
    for kconfig in ("Kconfig", "../there/Kconfig"):
        arguments = ["check", "--srctree", "../there", "--kconfig", kconfig, "some.config"]
        assert main(arguments, root=ROOT) == 0
    assert capsys.readouterr() == ("", "")
    assert (there / "mark").exists() and not (here / "mark").exists()
    assert Path.cwd() == here
    assert load_tree("Kconfig", srctree=there, inside=True).syms["WHERE"].str_value == "inside"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "CONFIG_GONE_{}=y",
        "garbage {}",
        "CONFIG_NUM_EPOCHS=0x{}",
        'CONFIG_MODEL="x{}"',
        "CONFIG_NUM_EPOCHS={}",
    ],
)
def test_of_thousands_of_faults_the_first_are_told(kconf_project, kconf, monkeypatch, line):
    calls: list[str] = []
    suggest = diagnostics.suggest
    monkeypatch.setattr(diagnostics, "suggest", lambda *words: calls.append(words[1]) or suggest(*words))
    (kconf_project / ".config").write_text("".join(line.format(number) + "\n" for number in range(1000)))
    for command in (["checkconfig"], ["setconfig", "EMA=y"], ["check", "--srctree", str(TREE), ".config"]):
        calls.clear()
        status, out, err = kconf(*command)
        reported = [one for one in out + err if one.startswith(".config:")]
        assert (status, len(reported)) == (2, MAX_LINES_SHOWN), command
        assert len(out + err) <= MAX_LINES_SHOWN + 2
        assert any(one.startswith("... and ") for one in out + err)
        assert len(calls) <= MAX_LINES_SHOWN  # each takes a millisecond


def test_thousands_of_notes_are_not_told_either(kconf_project, kconf):
    text = "".join(f"# CONFIG_GONE_{number} is not set\n" for number in range(1000))
    (kconf_project / "some.config").write_text(text)
    status, _, err = kconf("checkconfig", "some.config")
    assert status == 0 and len(err) == 1
    assert "CONFIG_GONE_9 and 990 more are not symbols here, and off anyway" in err[0]
