"""Every bad line of the corpus is reported, exactly, by the loader and by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lib.kconf.cli import main
from lib.kconf.reader import read_file, read_text
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import load_tree

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "kconf"
CASES = yaml.safe_load((FIXTURES / "bad_inputs.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tree():
    return load_tree("Kconfig", srctree=FIXTURES / "tree")


def content(name: str) -> bytes:
    case = CASES[name]
    return bytes.fromhex(case["bytes"]) if "bytes" in case else (case["text"] + "\n").encode()


def expected(name: str, file: str) -> list[str]:
    return [f"{file}:{finding.replace('FILE', file)}" for finding in CASES[name]["findings"]]


def test_corpus_is_large_enough():
    assert len(CASES) >= 100


@pytest.mark.parametrize("name", CASES)
def test_findings_are_exactly_these(tree, name):
    configuration = StrictLoad(tree)
    configuration.add(read_text(content(name), name="some.config"))
    verdict = configuration.finish()
    assert [str(finding) for finding in verdict.findings] == expected(name, "some.config")
    assert verdict.notices == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_command_exits_with_2_and_prints_one_line_each(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONFIG_", raising=False)
    Path("some.config").write_bytes(content(name))
    tree_directory = str(FIXTURES / "tree")
    status = main(["check", "--kconfig", "Kconfig", "--srctree", tree_directory, "some.config"], root=ROOT)
    captured = capsys.readouterr()
    # As the tree may be foreign, a line whose value is so anyway is counted apart.
    lost = [f"some.config:{line}" for line in CASES[name].get("lost", ())]
    if "lost" not in CASES[name]:
        assert (status, captured.err) == (2, "")
        lost = expected(name, "some.config")
    else:
        assert status == (2 if lost else 0)
        assert captured.err.startswith(f"note: lines that are lost or wrong: {len(lost)}; others of which ")
        assert captured.err.endswith("the value is so anyway: 1 (V=1 shows them)\n")
    assert captured.out.splitlines() == lost


# On the project's own tree. File, and the line that must be printed.
OWN = {
    "unknown": ("CONFIG_BATCHSIZE=64", "CONFIG_BATCHSIZE is not a symbol; did you mean CONFIG_BATCH_SIZE?"),
    "hidden": (
        "CONFIG_BATCH_SIZE=128",
        "CONFIG_BATCH_SIZE=128 has no effect: it needs CONFIG_HYPER_PARAM_MANUAL=y "
        "(now CONFIG_HYPER_PARAM_AUTO=y)",
    ),
    "unquoted": (
        "CONFIG_LEARNING_RATE=0.1",
        'CONFIG_LEARNING_RATE=0.1 needs double quotes; write CONFIG_LEARNING_RATE="0.1"',
    ),
    "float": (
        'CONFIG_LEARNING_RATE="abc"',
        'CONFIG_LEARNING_RATE="abc" is not a number (Value: float, 0 < x <= 100)',
    ),
    "range": ("CONFIG_SEED=-1", "CONFIG_SEED=-1 is outside 0..2147483647"),
    "bool": ("CONFIG_EMA=Y", "CONFIG_EMA=Y is not y or n; write CONFIG_EMA=y"),
    "spaces": ("CONFIG_SEED = 3", "'CONFIG_SEED = 3' is not an assignment; write CONFIG_SEED=3"),
    "comment": (
        "CONFIG_SEED=3 # lucky",
        "a comment cannot follow a value; write CONFIG_SEED=3 and put the comment on a line of its own",
    ),
    "int": ("CONFIG_SEED=1_000", "CONFIG_SEED=1_000 is not a plain decimal number; write CONFIG_SEED=1000"),
    "unset": (
        "#CONFIG_EMA is not set",
        "'#CONFIG_EMA is not set' looks like an assignment but is none; write '# CONFIG_EMA is not set'",
    ),
    "list": (
        'CONFIG_SCHEDULE_STEP=y\nCONFIG_LR_STEP_PCT_LIST="50,100"',
        "CONFIG_LR_STEP_PCT_LIST=\"50,100\" has the element '100' that is out of range "
        "(Value: int list, rising, 1 <= x <= 99)",
    ),
    "derived": (
        'CONFIG_OPTIMIZER="adam"',
        "CONFIG_OPTIMIZER cannot be set (now adamw): it follows from CONFIG_OPTIMIZER_SGD, "
        "CONFIG_OPTIMIZER_ADAM, CONFIG_OPTIMIZER_ADAMW, CONFIG_OPTIMIZER_MUON, CONFIG_OPTIMIZER_ADAM_ATAN2; "
        "set CONFIG_OPTIMIZER_ADAM=y",
    ),
    "members": (
        "CONFIG_BUDGET_STEPS=y\nCONFIG_BUDGET_SECONDS=y",
        "CONFIG_BUDGET_SECONDS=y, but the choice already has CONFIG_BUDGET_STEPS=y (.config:1); keep one",
    ),
    "no files": (
        'CONFIG_DATASET_SCENES=y\nCONFIG_DATA_DIR="elsewhere"',
        'CONFIG_DATA_DIR="elsewhere" has no effect: it needs !CONFIG_DATASET_IS_GENERATED || '
        "CONFIG_TOKENIZER_GPT2 (now CONFIG_DATASET_IS_GENERATED=y by CONFIG_DATASET_SCENES)",
    ),
}


def kconf(directory: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The real command, in `directory`, with `.config` there."""
    environment = {"PATH": "/usr/bin:/bin", "KCONFIG_CONFIG": ".config", **variables}
    command = [sys.executable, str(ROOT / "scripts" / "kconf.py"), *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)


def test_a_second_choice_member_in_a_full_file_is_one_fault(tmp_path):
    """What follows from the choice (CONFIG_BUDGET, the symbols of the other member) is not judged."""
    file = tmp_path / ".config"
    file.write_text("CONFIG_MODEL_LENET5=y\n")
    assert kconf(tmp_path, "olddefconfig").returncode == 0
    text = file.read_text()
    file.write_text(text.replace("# CONFIG_BUDGET_STEPS is not set", "CONFIG_BUDGET_STEPS=y"))
    done = kconf(tmp_path, "checkconfig")
    assert done.returncode == 2 and text != file.read_text()
    (fault, total) = done.stderr.splitlines()
    assert "CONFIG_BUDGET_STEPS=y, but the choice already has CONFIG_BUDGET_EPOCHS=y" in fault
    assert total.startswith("error: 1 fault")


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_command_leaves_the_file_alone(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KCONFIG_CONFIG", ".config")
    text, reason = OWN[name]
    file = tmp_path / ".config"
    file.write_text(text + "\n")
    before = file.read_bytes(), file.stat().st_mtime_ns
    assert main(["olddefconfig"], root=ROOT) == 2
    line = text.count("\n") + 1
    assert capsys.readouterr().err.splitlines() == [
        f".config:{line}: {reason}",
        "error: 1 fault in the configuration; nothing was changed",
    ]
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert [path.name for path in tmp_path.iterdir()] == [".config"]


def check(*arguments: str, capsys) -> tuple[int, str, str]:
    status = main(["check", *arguments], root=ROOT)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_files_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    tree_at = ("--srctree", str(FIXTURES / "tree"))
    status, out, err = check(*tree_at, "folder", "missing", capsys=capsys)
    assert status == 2 and err == ""
    assert out.splitlines() == [
        "folder: cannot be read: Is a directory",
        "missing: cannot be read: No such file or directory",
    ]


# What reads or writes a configuration, given a pipe that nobody writes to, and the message.
ON_A_PIPE = {
    "checkconfig": (["checkconfig", "pipe"], {}, "pipe: cannot be read"),
    "configuration": (["olddefconfig"], {"KCONFIG_CONFIG": "pipe"}, "pipe: cannot be read"),
    "fragment": (["defconfig", "--fragments=pipe", "lenet5"], {}, "pipe: cannot be read"),
    "merge": (["merge", "--fragments=pipe"], {}, "pipe: cannot be read"),
    "presets": (["alldefconfig"], {"KCONFIG_ALLCONFIG": "pipe"}, "pipe: cannot be read"),
    "check": (["check", "pipe"], {}, "pipe: cannot be read"),
    "savedefconfig": (["savedefconfig", "pipe"], {}, "error: cannot write pipe"),
    "defconfig": (["defconfig", "lenet5"], {"KCONFIG_CONFIG": "pipe"}, "error: cannot write pipe"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_PIPE)
def test_a_pipe_is_refused_at_once_and_stays_one(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".config").write_text("CONFIG_SEED=3\n")
    arguments, variables, message = ON_A_PIPE[name]
    if name == "check":
        arguments = [*arguments, "--srctree", str(FIXTURES / "tree")]
    done = kconf(tmp_path, *arguments, **variables)
    assert done.returncode == 2
    assert f"{message}: it is not a regular file" in done.stderr + done.stdout
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / ".config").read_text() == "CONFIG_SEED=3\n"


def test_a_device_is_refused(capsys):
    status, out, _ = check("--srctree", str(FIXTURES / "tree"), "/dev/null", capsys=capsys)
    assert (status, out) == (2, "/dev/null: cannot be read: it is not a regular file\n")


def test_file_without_permission(tmp_path, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    # Raised by hand, for root may read anything.
    monkeypatch.setattr(Path, "read_bytes", refuse)
    layer = read_file(tmp_path / "secret")
    assert [str(fault) for fault in layer.faults] == [f"{tmp_path}/secret: cannot be read: Permission denied"]


FAULTY_TREES = {
    "loop": (
        'config A\n\tbool "a"\n\tdepends on B\n\nconfig B\n\tbool "b"\n\tdepends on A\n',
        "error: Kconfig:1: dependency loop: A -> B -> A\n",
    ),
    "syntax": ('config A\n\tbool "a"\nnonsense here\n', "error: Kconfig:3: couldn't parse 'nonsense here':"),
    "no end": (
        'choice\n\tprompt "a"\n\nconfig A\n\tbool "a"\n',
        "error: expected 'endchoice' at end of 'Kconfig'\n",
    ),
    "missing source": ('source "nope"\n', "error: Kconfig:1: 'nope' not found"),
    "no kconfig": (None, "error: {tree}/Kconfig: No such file or directory\n"),
    "not text": (b'config A\n\tbool "\xff"\n', "error: Kconfig: not UTF-8 (invalid start byte)\n"),
    "recursive source": ('source "Kconfig"\n', "error: Kconfig:1: recursive 'source' of 'Kconfig' detected."),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY_TREES)
def test_faults_of_a_tree_are_one_line(tmp_path, name):
    # In a process of its own: kconfiglib leaves the faulty file open.
    text, message = FAULTY_TREES[name]
    if text is not None:
        (tmp_path / "Kconfig").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "empty").write_text("")
    done = kconf(tmp_path, "check", "--srctree", str(tmp_path), "empty")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(message.format(tree=tmp_path))
