"""Storage by URL: what it does, and what it says where it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lib.errors import ConfigError
from lib.runs.storage import MissingError, Storage, StorageError, open_storage

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["file", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    url = f"file://{tmp_path}/a b/c/" if request.param == "file" else "memory://bucket/c/"
    yield open_storage(url, requested="X")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_files_come_back_as_they_went(storage: Storage, tmp_path: Path) -> None:
    assert storage.entries() == [] and storage.entries("no") == []
    storage.write("a/b/small", b"1")
    (tmp_path / "large").write_bytes(b"2" * 1000)
    storage.upload(tmp_path / "large", "a/large")
    storage.write("a/large.not", b"")
    assert storage.entries() == ["a"] and storage.below("a").entries() == ["b", "large", "large.not"]
    assert storage.sizes() == {"a/b/small": 1, "a/large": 1000, "a/large.not": 0}
    assert storage.below("a/large").sizes() == {"": 1000}
    storage.download("a/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"2" * 1000 and storage.read("a/b/small") == b"1"
    storage.write("a/b/small", b"another")
    assert storage.below("a").read("b/small") == b"another"
    storage.remove("a/large")
    storage.remove("a/large")
    assert storage.below("a").entries() == ["b", "large.not"]
    storage.remove("a")
    assert storage.entries() == []


def test_objects_that_stand_for_folders_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console makes an object `data/` for the folder data, and a file of that name cannot be on a disk."""
    found = {"/bucket/data/": {"size": 0, "type": "file"}, "/bucket/data/x": {"size": 1, "type": "file"}}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: found)
    assert open_storage("memory://bucket", requested="X").sizes() == {"data/x": 1}


def test_what_is_not_there_is_told_by_url(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=f"cannot read {storage.url}/q: it does not exist"):
        storage.read("q")
    with pytest.raises(MissingError, match=f"cannot read {storage.url}/q"):
        storage.download("q", tmp_path / "q")


def test_a_check_leaves_nothing(storage: Storage) -> None:
    storage.check()
    assert storage.entries() == []


class Broken(MemoryFileSystem):
    """Raises as packages below fsspec do."""

    error: Exception = OSError()

    def pipe_file(self, *_: Any, **__: Any) -> None:
        raise self.error


class OfAPackage(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (PermissionError("Access Denied"), "Access Denied"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OfAPackage("no\ncredentials"), "no credentials"),
        (RuntimeError(), "RuntimeError"),
        (NotImplementedError("read-only"), "read-only"),
        (FileNotFoundError("bucket"), "it does not exist"),
    ],
)
def test_what_storage_raises_is_one_line(error: Exception, why: str) -> None:
    files = Broken(skip_instance_cache=True)
    files.error = error
    with pytest.raises(StorageError) as told:
        Storage("gs://b", files, "/b", False).check()
    assert str(told.value).startswith("cannot write gs://b/.check-") and told.value.why == why


def test_a_mistake_of_ours_stays_one() -> None:
    files = Broken(skip_instance_cache=True)
    files.error = TypeError("an argument too many")
    with pytest.raises(TypeError):
        Storage("gs://b", files, "/b", False).write("x", b"")


def test_what_reads_back_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("memory://b", requested="X")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_: b"else")
    with pytest.raises(StorageError, match="the content differs from what was written"):
        storage.check()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("gs://b/x", r"the package gcsfs is not installed; install it, for example with \S+ install gcsfs$"),
        ("s3://b/x", r"the package s3fs is not installed; "),
        ("sftp://b/x", r"the package paramiko is not installed; "),
        ("foo://b", r'X="foo://b" cannot be opened: Protocol not known: foo'),
        ("gs://", 'X="gs://" names no bucket or folder'),
        ("memory://", 'X="memory://" names no bucket or folder'),
        ("file:///", 'X="file:///" names no bucket or folder'),
        ("data/x", r'X="data/x" is not a URL; a path is written file://'),
    ],
)
def test_what_cannot_be_opened_is_told_in_one_line(
    url: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gcsfs", "s3fs", "paramiko"):  # whether or not they are here
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=told) as error:
        open_storage(url, requested="X")
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write .*: (Not a directory|File exists)"):
        open_storage(f"file://{tmp_path}/file/x", requested="X").check()


def test_on_a_disk_a_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"file://{tmp_path}", requested="X")
    storage.write("a", b"old")

    def killed(*_: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "mv", killed)
        with pytest.raises(StorageError, match="killed"):
            storage.write("a", b"new")
    assert storage.read("a") == b"old"
    storage.write("a", b"new")
    assert storage.read("a") == b"new" and storage.entries() == ["a"]


def test_fsspec_is_imported_where_a_url_is_opened_only() -> None:
    code = "import lib.runs.storage, sys; sys.exit('fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    packages = ("anneal", "lib", "models", "train", "scripts")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = {path for path in files if re.search(r"^ *(from|import) fsspec", path.read_text(), re.M)}
    assert found == {ROOT / "lib/runs/storage.py"}
