"""make EXTERNAL=DIR from the configuration to the evaluation, and what is told of changed code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from lib.runs.directory import resolve_run
from tests.e2e.runner import Runner
from tests.support.configs import ROOT
from tests.support.external import write_external

pytestmark = pytest.mark.slow


def make(out: Path, *words: str, status: int = 0) -> str:
    command = ["make", "VENV=", f"PYTHON={sys.executable}", f"O={out}", *words]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ANNEAL_", "MAKE"))}
    environment = {**clean, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    folder, out = write_external(tmp_path / "of me"), tmp_path / "out"
    assert "is not there" in make(out, f"EXTERNAL={tmp_path / 'none'}", "defconfig-tiny_net", status=2)
    assert not out.exists(), "nothing is made"
    kept = f"EXTERNAL={folder} is kept in {out}/.external"
    assert kept in make(out, f"EXTERNAL={folder}", "defconfig-tiny_net")
    assert "tiny_net" in make(out, "list-defconfigs") and "Width of" in make(
        out, "explain", "SYM=TINY_NET_WIDTH"
    )
    told = make(out, "EXTERNAL=", "checkconfig", status=2)
    assert f"made with EXTERNAL={folder}, and EXTERNAL= is not given" in told
    assert not (out / ".external").exists()
    assert "tiny_net" not in make(out, "list-defconfigs")
    told = make(out, "defconfig-tiny_net", status=2)
    assert (
        "called 'tiny_net'; make list-defconfigs shows what there is; EXTERNAL=DIR is kept for each O="
        in told
    )
    written = make(out, f"EXTERNAL={folder}", "new-model", "NAME=net2", "TASK=classify")
    assert f"next: make O={out} defconfig-net2 && make O={out} train" in written


def test_it_is_kept_also_where_the_configuration_is_refused(tmp_path: Path) -> None:
    folder, out = write_external(tmp_path / "of me"), tmp_path / "out"
    with (folder / "defconfigs" / "tiny_net").open("a") as file:
        file.write("CONFIG_NOWHERE=y\n")
    told = make(out, f"EXTERNAL={folder}", "defconfig-tiny_net", status=2)
    assert f"EXTERNAL={folder} is kept in {out}/.external" in told and "no configuration was written" in told
    assert [each.name for each in out.iterdir()] == [".external"]


@pytest.mark.long
def test_the_files_of_its_page_train(tmp_path: Path) -> None:
    page, folder = (ROOT / "docs/tutorials/external.md").read_text("utf-8"), tmp_path / "my_lab"
    files = re.findall(r"`((?:models|defconfigs)/my_net\S*)` [^`]*?:\n\n```\w*\n(.*?)^```", page, re.M | re.S)
    for name, text in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert [name for name, _ in files] == [
        "models/my_net/Kconfig",
        "models/my_net/model.py",
        "defconfigs/my_net",
    ]
    small = ("CONFIG_DATA_LIMIT=512", "CONFIG_NUM_EPOCHS=1", "CONFIG_DEVICE_CPU=y")
    assert "Done: " in make(tmp_path / "out", f"EXTERNAL={folder}", "defconfig-my_net", "train", *small)
    for number in range(40):
        file = tmp_path / "photos" / ("dark", "light")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), (number + 99 * (number % 2),) * 3).save(file)
    own = ("CONFIG_DATASET_IMAGE_FOLDER=y", f"CONFIG_DATA_DIR={tmp_path / 'photos'}", "CONFIG_IMAGE_SIZE=16")
    runner = Runner(tmp_path / "out")
    given = dict(word.split("=", 1) for word in (*small[1:], *own, "CONFIG_TARGET_EFFECTIVE_BATCH=8"))
    names = {"KCONFIG_MAKE_VARIABLES": " ".join(given), "ANNEAL_EXTERNAL": str(folder)}
    assert "Done: " in runner.run("train", **given, **names), "as make train calls it"


def test_its_names_are_completed(tmp_path: Path) -> None:
    folder = write_external(tmp_path / "of me")
    environment = {**os.environ, "ANNEAL_EXTERNAL": str(folder)}

    def words(word: str) -> set[str]:
        command = ["scripts/complete.sh", word]
        return set(subprocess.check_output(command, cwd=ROOT, env=environment, text=True).splitlines())

    assert words("defconfig-tiny_") == {"defconfig-tiny_net"}
    assert words("SYM=TINY_NET_") == {"SYM=TINY_NET_WIDTH"}


@pytest.mark.long
def test_a_run_keeps_and_tells_its_code(tmp_path: Path) -> None:
    folder, out = write_external(tmp_path / "of me"), tmp_path / "out"
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    if shutil.which("git"):
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
            subprocess.run([*git, *words], check=True)
    small = ("CONFIG_DATA_LIMIT=256", "CONFIG_NUM_EPOCHS=1", "CONFIG_DEVICE_CPU=y", "CONFIG_NUM_DEVICES=2")
    make(out, f"EXTERNAL={folder}", "defconfig-tiny_net", "train", *small)
    run = resolve_run(out / "runs")
    code = run.read_json("plugins")
    assert code["model"]["folder"] == f"{folder}/models/tiny_net"
    assert code["data set"]["folder"] == "lib/data/datasets/digits"
    assert code["EXTERNAL"]["git_dirty"] is (False if shutil.which("git") else None)
    assert "Different from" not in make(out, "eval")
    with (folder / "models" / "tiny_net" / "model.py").open("a") as file:
        file.write("# changed\n")
    for words in (("eval",), ("rerun",)):
        output = make(out, *words)
        assert f"Different from {run.name}: plugins: model sha256 {code['model']['sha256']} -> " in output
        assert "task sha256" not in output
    again = resolve_run(out / "runs")
    assert again.identity == run.identity, "neither path nor code is in the identity"
    (run.path / "plugins.json").unlink()  # as runs of older versions
    assert "Different from" not in make(out, "eval", f"RUN={run.path}")
