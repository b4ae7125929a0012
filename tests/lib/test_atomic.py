import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib import atomic
from lib.atomic import check_writable
from lib.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_replaces_the_contents_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "one")
    atomic.write_text(path, "zwölf")
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_holds_the_whole_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "old")
    with path.open() as reader:
        atomic.write_text(path, "new")
        assert reader.read() == "old"


def test_two_writers_at_once_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "file", Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        atomic.write_text(path, "the other")  # at the moment when two writers are furthest
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    atomic.write_text(path, "the one")
    assert path.read_text() == "the one" and list(tmp_path.iterdir()) == [path]


def test_follows_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    link.symlink_to(target)
    atomic.write_text(link, "text")
    assert link.is_symlink() and target.read_text() == "text"


@pytest.mark.parametrize("full_at", ["first sync", "rename"])
def test_a_failure_keeps_the_old_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if full_at == "first sync" else (Path, "replace")), fail)
        with pytest.raises(OSError, match="No space left"):
            atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = os.open(pipe, os.O_RDWR)  # so that neither the writer nor the reader waits for the other
    try:
        atomic.write_bytes(pipe, b"new")
        assert pipe.is_fifo() and os.read(opened, 10) == b"new"
    finally:
        os.close(opened)


def test_a_standard_stream_is_written_to_between_other_output(tmp_path: Path) -> None:
    code = "print(1); atomic.write_bytes(Path('/dev/stdout'), b'2\\n'); print(3)"
    command = [sys.executable, "-c", f"from pathlib import Path; from lib import atomic; {code}"]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout == b"1\n2\n3\n"
    with (tmp_path / "file").open("wb") as file:
        subprocess.run(command, stdout=file, check=True, cwd=ROOT)
    assert (tmp_path / "file").read_bytes() == b"1\n2\n3\n"


def test_a_stream_may_be_in_a_folder_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    check_writable(Path("/dev/stdout"), "OUT", log=print, suffixes=[".json"])
    with pytest.raises(ConfigError, match="/dev/stdout cannot be written in /dev/stdout"):
        check_writable(Path("/dev/stdout"), "DIRECTORY", log=print)
    with pytest.raises(ConfigError, match="cannot be written in /dev"):
        check_writable(Path("/dev/file"), "OUT", log=print, suffixes=[".json"])


def test_a_folder_that_cannot_be_read_is_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refused)
    monkeypatch.setattr(os, "stat", refused)
    assert not atomic.is_stream(tmp_path / "file")


def test_a_name_with_another_suffix_is_refused(tmp_path: Path) -> None:
    check_writable(tmp_path / "a.HTML", "OUT", log=print, suffixes=[".html"])
    with pytest.raises(ConfigError, match=r"OUT=.*README\.md does not end in \.html or \.csv"):
        check_writable(tmp_path / "README.md", "OUT", log=print, suffixes=[".html", ".csv"])


def test_the_data_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def traced_fsync(descriptor: int) -> None:
        kind = "directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"  # noqa: PTH112
        events.append(f"sync {kind}")
        fsync(descriptor)

    def traced_replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "replace", traced_replace)
    atomic.write_text(path, "new")
    assert events == ["sync file", "rename", "sync directory"]


def test_a_file_system_without_directory_sync_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = errno.EINVAL

    def fail(_: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fail)
    atomic.sync_directory(tmp_path)
    error = errno.EIO
    with pytest.raises(OSError, match=str(tmp_path)):
        atomic.sync_directory(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        atomic.write_text(tmp_path / "nowhere" / "file", "text")


def test_a_folder_that_will_be_made_is_told_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    told = list[str]()
    (tmp_path / "file").touch()
    check_writable(tmp_path / "a.csv", "OUT", log=told.append, suffixes=[".csv"])
    for name in (".", "new"):
        check_writable(tmp_path / name, "DIRECTORY", log=told.append)
    assert not told
    check_writable(tmp_path / "b" / "c" / "a.csv", "OUT", log=told.append, suffixes=[".csv"])
    check_writable(tmp_path / "b" / "new", "DIRECTORY", log=told.append)
    folders = [("OUT", "b/c", "a.csv"), ("DIRECTORY", "b", "new")]
    assert told == [
        f"{variable}={tmp_path / above / name}: there is no folder {tmp_path / above}; it will be made"
        for variable, above, name in folders
    ]
    for name, suffixes in (("file/a.csv", [".csv"]), ("file", []), ("file/new", [])):
        with pytest.raises(ConfigError, match=f"OUT={tmp_path / name} cannot be written in"):
            check_writable(tmp_path / name, "OUT", log=told.append, suffixes=suffixes)
    with pytest.raises(ConfigError, match=f"OUT={tmp_path} is a folder"):
        check_writable(tmp_path, "OUT", log=told.append, suffixes=[".csv"])
    assert len(told) == 2 and [path.name for path in tmp_path.iterdir()] == ["file"]
