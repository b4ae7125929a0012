"""Completion of make: the words, and bash with them. (zsh takes the same words.)"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lib.kconf.defconfig import available
from lib.kconf.tree import has_prompt, load_own_tree
from tests.contract.making import ROOT, named_targets, user_targets

BASH = """
source scripts/completion.bash
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
compopt() {{ :; }}
_anneal_make make
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def words(word: str, *, cwd: Path = ROOT) -> set[str]:
    done = subprocess.run(["scripts/complete.sh", word], cwd=cwd, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def bash(*line: str, cwd: Path = ROOT) -> set[str]:
    """What bash offers for the last of the words, as bash cuts them."""
    script = BASH.format(words=" ".join(f"'{word}'" for word in ("make", *line)))
    done = subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_target_is_offered() -> None:
    assert words("") == set(user_targets()) | named_targets()


def test_a_beginning_narrows_the_words() -> None:
    assert words("defconfig-lenet5") == {"defconfig-lenet5", "defconfig-lenet5-mnist"}
    assert words("nope") == set()


def test_fragments_are_offered_after_a_plus() -> None:
    fragments = {path.name for path in available(ROOT)[1]}
    assert words("defconfig-lenet5+") == {f"defconfig-lenet5+{name}" for name in fragments}
    assert words("defconfig-lenet5+fp32+de") == {
        f"defconfig-lenet5+fp32+{name}" for name in ("debug", "deterministic")
    }


def test_every_option_is_offered_and_no_other() -> None:
    names = {one.name for one in load_own_tree(ROOT).unique_defined_syms if has_prompt(one)}
    assert words("CONFIG_") == {f"CONFIG_{name}=" for name in names}
    assert words("SYM=") == {f"SYM={name}" for name in names}


def test_runs_are_offered(tree: Path) -> None:
    (tree / "runs/lenet5/20260101T000000Z-01234567").mkdir(parents=True)
    assert words("RUN=", cwd=tree) == {"RUN=runs/lenet5/20260101T000000Z-01234567"}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (["defconfig-resnet50+fp"], {"defconfig-resnet50+fp16", "defconfig-resnet50+fp32"}),
        (["explain", "SYM", "=", "MUON_L"], {"MUON_LEARNING_RATE"}),
        (["explain", "CONFIG_MUON_LEARN"], {"CONFIG_MUON_LEARNING_RATE="}),
        (["diffconfig", "A", "=", "resnet5"], {"resnet50"}),
        (["rerun", "RUN", "="], set()),
    ],
)
def test_bash_offers_what_stands_behind_an_equals_sign(line: list[str], offered: set[str]) -> None:
    assert bash(*line) == offered


def test_elsewhere_bash_does_as_before(tmp_path: Path) -> None:
    script = f"""
    before() {{ COMPREPLY=(as-before); }}
    complete -F before make
    source {ROOT}/scripts/completion.bash
    cd {tmp_path}
    COMP_WORDS=(make x) COMP_CWORD=1
    _anneal_make make
    echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "as-before\n"
