"""Data at a URL: copied once and whole, and used from the disk."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data.remote import local_copy
from lib.errors import ConfigError, DataError, ToolkitError
from lib.runs.storage import Storage, open_storage
from tests.support.configs import make_config
from tests.support.datasets import opened
from tests.support.remote import clean_bucket
from train.training_data import _data_dir

URL = "memory://sets/some"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with clean_bucket(monkeypatch):
        storage = open_storage(URL, requested="X")
        storage.write("a.txt", b"1")
        storage.write("deep/er/b.txt", b"22")
        open_storage("memory://sets", requested="X").write("something/else", b"333")
        yield storage


def copied(cache: Path, url: str = URL) -> tuple[Path, list[str]]:
    said: list[str] = []
    return local_copy(url, cache_dir=cache, log=said.append), said


def test_everything_is_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = copied(tmp_path / "data")
    assert (folder / "a.txt").read_bytes() == b"1" and (folder / "deep/er/b.txt").read_bytes() == b"22"
    assert not (folder / "something").exists() and folder.parent.parent == tmp_path / "data"
    assert said == [
        f"Data: copying 2 files, 0.0 MB, from {URL} to {tmp_path / 'data'}",
        f"Data: {URL}, as it was copied to {folder.parent}",
    ]
    (folder / "more").write_text("of a download")
    monkeypatch.setattr("lib.data.remote.open_storage", None)
    assert copied(tmp_path / "data", URL + "/") == (folder, said[1:])
    assert {path.name for path in folder.iterdir()} == {"a.txt", "deep", "more"}


def test_a_url_of_a_file_is_that_file(tmp_path: Path) -> None:
    for _ in range(2):
        file, _ = copied(tmp_path, f"{URL}/deep/er/b.txt")
        assert file.name == "b.txt" and file.read_bytes() == b"22"


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (
            lambda folder: (folder / "a.txt").write_text("12"),
            "folder/a.txt has another size than was written",
        ),
        (
            lambda folder: (folder / "deep/er/b.txt").write_text("23"),
            "folder/deep/er/b.txt has another content than was written",
        ),
        (lambda folder: (folder / "deep/er/b.txt").unlink(), "b.txt is missing"),
        (lambda folder: (folder.parent / "manifest.json").write_text("[]"), "manifest.json is damaged"),
    ],
)
def test_a_copy_that_is_not_whole_is_made_again(tmp_path: Path, harm: Any, told: str) -> None:
    folder, _ = copied(tmp_path)
    harm(folder)
    again, said = copied(tmp_path)
    assert again == folder and said[0] == f"{folder.parent}: {told}; making it again"
    assert (folder / "a.txt").read_bytes() == b"1" and (folder / "deep/er/b.txt").read_bytes() == b"22"


def test_what_is_too_much_to_read_at_every_start_is_known_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = copied(tmp_path)
    (folder / "deep/er/b.txt").write_text("23")
    monkeypatch.setattr("lib.data.cache._VERIFIED_BYTES", 1)  # which a.txt takes, the smallest
    assert len(copied(tmp_path)[1]) == 1
    (folder / "a.txt").write_text("2")
    assert "a.txt has another content" in copied(tmp_path)[1][0]


def test_a_copy_that_is_cut_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(_: Storage, _name: str, path: Path) -> None:
        path.write_bytes(b"1")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "download", cut)
        with pytest.raises(DataError, match=f"{URL}/deep/er/b.txt came with 1 bytes, not 2"):
            copied(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []
    shutil.rmtree(tmp_path)
    assert copied(tmp_path)[0].is_dir()


def test_one_process_copies_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download, names = Storage.download, list[str]()

    def counted(storage: Storage, name: str, path: Path) -> None:
        names.append(name)
        download(storage, name, path)

    monkeypatch.setattr(Storage, "download", counted)
    threads = [threading.Thread(target=copied, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["a.txt", "deep/er/b.txt"]


def test_what_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there are no files at memory://sets/none; look at CONFIG_DATA_DIR"):
        copied(tmp_path, "memory://sets/none")
    with pytest.raises(ConfigError, match='CONFIG_DATA_DIR="nothing://x" cannot be opened'):
        copied(tmp_path, "nothing://x")
    with (
        pytest.raises(DataError, match="is not a name that a disk could have"),
        monkeypatch.context() as patch,
    ):
        patch.setattr(Storage, "sizes", lambda _: {"../a": 1})
        copied(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolkitError, match="cannot write the data cache"):
        copied(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "sizes", lambda _: {"a": 10**18})
        with pytest.raises(DataError, match=r"does not fit on the disk of .*it has 1000000000\.0 GB"):
            copied(tmp_path)


def test_a_data_set_is_read_from_its_copy(tmp_path: Path, bucket: Storage) -> None:
    for part in ("train", "val"):
        np.arange(20, dtype=np.uint16).tofile(tmp_path / f"{part}.bin")
        bucket.upload(tmp_path / f"{part}.bin", f"token_bins/{part}.bin")
    config = make_config("lenet5", data_dir=URL)
    folder = _data_dir(config, root=tmp_path, log=print)
    assert folder is not None and folder.parent.parent == tmp_path / "data"
    cache_dir = tmp_path / "cache"
    dataset = opened("token_bins", {"vocab_size": 20}, data_dir=folder, cache_dir=cache_dir, block_size=4)
    assert (dataset.train.size, dataset.test.size) == (4, 5)
