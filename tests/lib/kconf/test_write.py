"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lib.kconf.write import write_atomically


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_old_content_is_kept_beside(tmp_path):
    file = tmp_path / "deep" / ".config"
    assert write_atomically(file, "one\n", keep_old=True)
    assert write_atomically(file, "two\n", keep_old=True)
    assert file.read_text() == "two\n"
    assert (tmp_path / "deep" / ".config.old").read_text() == "one\n"
    assert names(tmp_path / "deep") == [".config", ".config.old"]


def test_same_content_is_not_written(tmp_path):
    file = tmp_path / ".config"
    write_atomically(file, "one\n")
    os.utime(file, (1, 1))
    assert not write_atomically(file, "one\n", keep_old=True)
    assert file.stat().st_mtime == 1
    assert names(tmp_path) == [".config"]


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_leaves_the_old_file(tmp_path, monkeypatch, call, error):
    file = tmp_path / ".config"
    file.write_text("one\n")

    def fail(*_: object) -> None:
        raise error

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(type(error)):
        write_atomically(file, "two\n")
    assert file.read_text() == "one\n"
    assert names(tmp_path) == [".config"]


def test_symbolic_link_stays_one(tmp_path):
    (tmp_path / "real").write_text("one\n")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "two\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "two\n"


def test_read_only_file_is_respected(tmp_path, monkeypatch):
    file = tmp_path / ".config"
    file.write_text("one\n")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anything
    with pytest.raises(PermissionError, match="read-only"):
        write_atomically(file, "two\n")
    assert file.read_text() == "one\n"


@pytest.mark.parametrize("place", [".config", "link/.config", "link/a/.config"])
@pytest.mark.parametrize("command", [["defconfig", "lenet5"], ["alldefconfig"], ["olddefconfig"]])
def test_no_directory_is_made_where_a_link_leads_nowhere(kconf_project, kconf, monkeypatch, place, command):
    link = kconf_project / place.split("/")[0]
    link.symlink_to(kconf_project.parent / "outside/a/b")
    monkeypatch.setenv("KCONFIG_CONFIG", place)
    status, out, err = kconf(*command)
    assert (status, out) == (2, [])
    assert err[-1].startswith(f"error: cannot write {place}: ")
    assert not (kconf_project.parent / "outside").exists()
    assert link.is_symlink()


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(kconf_project, kconf):
    (kconf_project / ".config").symlink_to("defconfigs/mine")
    assert kconf("defconfig", "lenet5")[0] == 0
    assert (kconf_project / ".config").is_symlink() and (kconf_project / "defconfigs/mine").is_file()


def test_a_name_with_a_line_break_is_refused(kconf_project, kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_CONFIG", "a\nb")
    before = sorted(kconf_project.iterdir())
    logged = "error: KCONFIG_CONFIG='a\\nb' has a line break or another control character"
    assert kconf("defconfig", "lenet5") == (2, [], [logged])
    assert sorted(kconf_project.iterdir()) == before
