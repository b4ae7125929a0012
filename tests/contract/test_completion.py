"""Completion of make: the words, and bash and zsh with them."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
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
        (["rerun", "RUN", "=", "runs/nope"], set()),
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


class Zsh:
    """A zsh at a terminal that has read the completion."""

    def __init__(self) -> None:
        self.terminal, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        ends = {"stdin": slave, "stdout": slave, "stderr": slave}
        command = ["zsh", "-f", "-i"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **ends)
        os.close(slave)
        self.type("autoload -U compinit; compinit -u -D; source scripts/completion.zsh; echo re''ady\n")
        self.wait_for("ready")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def wait_for(self, text: str) -> None:
        shown, deadline = "", time.monotonic() + 60
        while text not in shown.replace("\a", ""):
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, shown
            shown += os.read(self.terminal, 4096).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes() -> None:
    zsh = Zsh()
    try:
        for begun, whole in (
            ("listnewc", "listnewconfig "),
            ("defconfig-resnet50+fp1", "defconfig-resnet50+fp16 "),
            ("CONFIG_MUON_LEARN", "CONFIG_MUON_LEARNING_RATE="),
            ("explain SYM=MUON_L", "SYM=MUON_LEARNING_RATE "),
        ):
            zsh.type(f"make {begun}\t")
            zsh.wait_for(whole)
            zsh.type("\x15")  # empties the line
    finally:
        zsh.close()
