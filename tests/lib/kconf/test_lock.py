"""Two commands at one moment: neither loses what the other writes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.kconf import edit, listing
from lib.kconf.lock import locked
from lib.kconf.menu import _MenuTree
from lib.kconf.tree import load_own_tree

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(kconf_project, kconf):
    assert kconf("defconfig", "gpt2")[0] == 0
    shutil.copytree(ROOT / "lib", kconf_project / "lib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "scripts", kconf_project / "scripts")
    return kconf_project


def start(project: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "scripts/kconf.py", *arguments],
        cwd=project,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_place_where_no_directory_can_be_made_ends_with_an_error(tmp_path, kconf, monkeypatch):
    def refused(path, *_, **__):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr("lib.kconf.lock._PAUSE_SECONDS", 0.001)
    monkeypatch.setenv("KCONFIG_CONFIG", str(tmp_path / "automounted" / ".config"))
    monkeypatch.setattr(Path, "mkdir", refused)  # as below /proc
    status, _, err = kconf("defconfig", "lenet5")
    assert status != 0 and err == [
        "error: cannot write automounted/.config: automounted: No such file or directory"
    ]


@pytest.mark.slow
def test_a_second_command_waits_and_keeps_what_the_first_has_set(project):
    config = project / ".config"
    config.write_text(config.read_text().replace("# CONFIG_DEBUG is not set\n", ""))
    first = start(project, "oldconfig")  # has read the configuration, and has one question
    assert first.stdout.readline()
    second = start(project, "setconfig", "EMA_DECAY=0.25")
    waits = second.stderr.readline()
    assert waits.startswith(f"note: waiting for oldconfig (process {first.pid} on ")
    assert waits.endswith("), which changes .config\n")
    out, err = first.communicate("y\n")
    assert first.returncode == 0, (out, err)
    out, err = second.communicate()
    assert (second.returncode, err) == (0, ""), out
    assert {'CONFIG_EMA_DECAY="0.25"', "CONFIG_DEBUG=y"} <= set(config.read_text().splitlines())
    assert not list(project.glob(".*.lock"))


@pytest.mark.slow
def test_no_command_that_writes_runs_beside_one_that_waits_for_a_person(project, kconf):
    before = (project / ".config").read_bytes()
    with locked(Path(".config"), "menuconfig", interactive=True):
        for command in edit.OF_CONFIGURATION:
            status, out, err = kconf(command)
            assert (status, out) == (2, []), command
            holder = f"menuconfig (process {os.getpid()} on {os.uname().nodename})"
            assert err[-1] == f"error: {holder} has .config open; end that first", command
        assert kconf("checkconfig")[0] == 0  # who only looks finds the one or the other, whole
        assert kconf("savedefconfig", "out")[0] == 0
    with locked(Path("defconfigs"), "update-defconfigs", interactive=True):
        for command in edit.OF_SHIPPED:
            assert kconf(command)[0] == 2, command
    assert (project / ".config").read_bytes() == before
    assert not list(project.glob(".*.lock"))


def test_every_command_either_looks_or_locks():
    """A function that writes with neither lock would have to be in a third list."""
    assert not {*edit.OF_CONFIGURATION, *edit.OF_SHIPPED} & {*listing.COMMANDS}


def test_a_killed_command_blocks_nobody(project, kconf):
    first = start(project, "config")
    assert first.stdout.readline()
    first.kill()
    first.communicate()
    assert (project / ".config.lock").exists()
    assert kconf("setconfig", "EMA_DECAY=0.25")[0] == 0
    assert not (project / ".config.lock").exists()


def test_two_links_to_one_configuration_have_one_lock(project, kconf):
    (project / "other").mkdir()
    (project / "other" / "link").symlink_to(project / ".config")
    with locked(Path("other/link"), "menuconfig", interactive=True):
        assert kconf("setconfig", "EMA_DECAY=0.25")[0] == 2
    assert (project / "other" / "link").is_symlink()


def test_a_failure_leaves_no_directory(kconf_project, kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_CONFIG", "new/place/.config")
    assert kconf("defconfig", "nope")[0] == 2
    assert not (kconf_project / "new").exists()
    assert kconf("defconfig", "lenet5")[0] == 0
    assert sorted(path.name for path in (kconf_project / "new/place").iterdir()) == [".config"]


@pytest.mark.usefixtures("project")
def test_what_cannot_be_written_needs_no_lock(kconf, monkeypatch):
    """As in a tree that is read-only; a user who may write anything stands in the way of trying that."""

    really = os.open

    def refused(path, *arguments, **options):
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    status, out, err = kconf("setconfig", "EMA=y")
    assert (status, out, err) == (0, [".config: already has that"], [])


def test_a_file_system_without_locks_is_told(project, kconf, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
    status, _, err = kconf("setconfig", "EMA=y")
    assert status == 0 and "is on a file system without locks" in err[0]
    assert "CONFIG_EMA=y" in (project / ".config").read_text().splitlines()
    assert not list(project.glob(".*.lock"))


def test_a_directory_in_the_place_of_the_lock_is_named(project, kconf):
    (project / ".config.lock").mkdir()
    status, _, err = kconf("setconfig", "EMA=y")
    assert (status, err) == (
        2,
        ["error: .config.lock is a directory: it must be free for the lock of .config; move it elsewhere"],
    )


def test_waiting_ends_when_the_lock_is_free(project, monkeypatch):
    """The file may go between opening and locking it: the lock that is had is the one that is there."""
    lock = project / ".config.lock"
    holder = locked(Path(".config"), "setconfig")
    holder.__enter__()

    def end_it(_: float) -> None:
        holder.__exit__(None, None, None)
        monkeypatch.setattr(time, "sleep", lambda _: None)

    monkeypatch.setattr(time, "sleep", end_it)
    with locked(Path(".config"), "olddefconfig"):
        assert lock.read_text().split()[1] == "olddefconfig"
    assert not lock.exists()


def test_a_menu_locks_what_it_loads_to_save_to(project, kconf, monkeypatch):
    """In its load dialog; the file that it began with is the command's to lock."""
    tree = load_own_tree(project, kind=_MenuTree)
    tree.edit(project / ".config")
    (project / "other").write_text("CONFIG_DEBUG=y\n")
    with tree.locks:
        for name in ("other", "./other", ".config"):
            assert tree.load_config(name) == f"Loaded {name}"
        monkeypatch.setenv("KCONFIG_CONFIG", "other")
        assert kconf("setconfig", "EMA_DECAY=0.25")[0] == 2
    assert kconf("setconfig", "NUM_EPOCHS=4")[0] == 0
    tree.edit(project / ".config")
    with (
        locked(Path("other"), "menuconfig", interactive=True),
        pytest.raises(OSError, match=" has other open"),
    ):
        tree.load_config("other")
    assert not list(project.glob(".*.lock"))
