"""The downloader against a real HTTP server that cuts, lies and refuses."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lib.data.datasets.download import fetch
from lib.data.datasets.mnist.data import IDX_SETS, IdxSet
from lib.data.datasets.published import Remote
from lib.errors import DataError, ToolkitError
from lib.runs import console
from tests.support.datasets import opened

CONTENT = bytes(range(256)) * 4000  # about one megabyte
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Behaviour:
    """How the server treats its next requests."""

    content: bytes = CONTENT
    status: int = 200
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # bytes to send before each of the first responses is cut
    stall: bool = False
    wrong_range: bool = False
    tells_length: bool = True
    requested: list[str | None] = field(default_factory=list)  # the Range header of each request


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        behaviour = self.server.behaviours[self.path.split("/")[1]]
        requested = self.headers.get("Range")
        behaviour.requested.append(requested)
        if behaviour.stall:
            self.server.released.wait(10)
            return
        if behaviour.status != 200:
            self.send_error(behaviour.status)
            return
        content = behaviour.content
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested and behaviour.ranges else 0
        if start >= len(content) > 0 and start:
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            first = start + behaviour.wrong_range
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        if behaviour.tells_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + behaviour.cuts.pop(0) if behaviour.cuts else len(content)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # one that takes no more
            self.wfile.write(content[start:end])

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviours: dict[str, Behaviour] = {}
        self.released = threading.Event()

    def url(self, name: str, **changes: object) -> str:
        self.behaviours[name] = Behaviour(**changes)  # type: ignore[arg-type]
        return f"http://127.0.0.1:{self.server_port}/{name}"


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def _fetch(
    target: Path, *urls: str, said: list[str] | None = None, sha256: str = SHA256, seconds: float = 5
) -> None:
    log = [].append if said is None else said.append
    fetch(target, urls=[f"{url}/file" for url in urls], sha256=sha256, log=log, timeout_seconds=seconds)


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_file_is_fetched_with_progress(server: _Server, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    fetch(
        tmp_path / "new" / "file",
        urls=[server.url("good") + "/file"],
        sha256=SHA256,
        log=lambda _: None,
        progress=lambda *report: reports.append(report),
    )
    assert (tmp_path / "new" / "file").read_bytes() == CONTENT and _left(tmp_path / "new") == ["file"]
    assert reports[0] == ("file", 0, len(CONTENT)) and reports[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in reports] == sorted(done for _, done, _ in reports)


def test_a_cut_connection_is_resumed(server: _Server, tmp_path: Path) -> None:
    url = server.url("cut", cuts=[300_000, 200_000, 100_000, 1, 1])
    _fetch(tmp_path / "file", url)
    assert (tmp_path / "file").read_bytes() == CONTENT
    starts = [None, 300_000, 500_000, 600_000, 600_001, 600_002]
    assert server.behaviours["cut"].requested == [start and f"bytes={start}-" for start in starts]


def test_what_an_earlier_run_left_is_resumed(server: _Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:700_000])
    _fetch(tmp_path / "file", server.url("good"))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.behaviours["good"].requested == ["bytes=700000-"]


def test_a_server_without_ranges_starts_again(server: _Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"x" * 500)
    _fetch(tmp_path / "file", server.url("plain", ranges=False))
    assert (tmp_path / "file").read_bytes() == CONTENT and _left(tmp_path) == ["file"]


def test_a_server_without_ranges_that_always_cuts_is_given_up(server: _Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"connection cut after 1000 of 1024000 bytes"):
        _fetch(tmp_path / "file", server.url("plain", ranges=False, cuts=[1000] * 99))
    assert len(server.behaviours["plain"].requested) < 10


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("extra", [0, 10])
def test_a_part_as_long_as_the_file_or_longer(
    server: _Server, tmp_path: Path, ranges: bool, extra: int
) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT + b"x" * extra)
    _fetch(tmp_path / "file", server.url("good", ranges=ranges))
    assert (tmp_path / "file").read_bytes() == CONTENT and _left(tmp_path) == ["file"]


def test_a_wrong_part_is_noticed_and_fetched_whole(server: _Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    _fetch(tmp_path / "file", server.url("good"))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.behaviours["good"].requested == ["bytes=1000-", None]


def test_a_wrong_hash_deletes_the_download_and_says_so(server: _Server, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(
        DataError, match=r"SHA-256 is [0-9a-f]{64}, not [0-9a-f]{64}; the download was deleted"
    ):
        _fetch(tmp_path / "file", server.url("bad", content=b"tampered"), said=said)
    assert _left(tmp_path) == []
    assert len(said) == 1 and said[0].startswith("downloading file from"), "the error says the rest"


def test_the_next_mirror_takes_over(server: _Server, tmp_path: Path) -> None:
    urls = [
        server.url("gone", status=404),
        server.url("tampered", content=b"tampered"),
        server.url("cut", cuts=[400_000, 0, 0, 0]),
        server.url("good"),
    ]
    _fetch(tmp_path / "file", *urls)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.behaviours["good"].requested == ["bytes=400000-"]


def test_a_wrong_range_is_not_trusted(server: _Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match="another range than was asked for"):
        _fetch(tmp_path / "file", server.url("odd", wrong_range=True))


def test_all_mirrors_failing_is_one_error_with_each_reason(server: _Server, tmp_path: Path) -> None:
    urls = [server.url("gone", status=404), server.url("ill", status=503), "http://127.0.0.1:1"]
    with pytest.raises(DataError) as caught:
        _fetch(tmp_path / "file", *urls)
    text = str(caught.value)
    assert "gone/file: HTTP status 404" in text and "ill/file: HTTP status 503" in text
    assert "127.0.0.1:1/file: " in text and "refused" in text and "\n" not in text
    assert _left(tmp_path) == []


def test_a_stalled_server_times_out(server: _Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="timed out"):
        _fetch(tmp_path / "file", server.url("stall", stall=True), seconds=0.2)


def test_a_file_that_is_there_is_not_asked_for(server: _Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    _fetch(tmp_path / "file", server.url("good"))
    assert (tmp_path / "file").read_bytes() == b"mine" and not server.behaviours["good"].requested


def test_a_disk_that_cannot_be_written_is_not_the_fault_of_the_mirror(
    server: _Server, tmp_path: Path
) -> None:
    (tmp_path / "file.part").mkdir()
    with pytest.raises(ToolkitError, match=r"cannot write .*file\.part") as caught:
        _fetch(tmp_path / "file", server.url("good"))
    assert not isinstance(caught.value, DataError)


def test_opening_a_data_set_downloads_what_is_missing(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PLAIN_DOWNLOAD_INTERVAL_SECONDS", 0.0)

    def remote(name: str, content: bytes) -> Remote:
        return Remote(name, hashlib.sha256(content).hexdigest(), (server.url(name, content=content),))

    images = b"\0\0\x08\x03\0\0\0\x02\0\0\0\x1c\0\0\0\x1c" + bytes(2 * 784)
    labels = b"\0\0\x08\x01\0\0\0\x02\x03\x04"
    contents = (images, labels, images, labels)
    remotes = tuple(
        remote(old.file, content) for old, content in zip(IDX_SETS["mnist"].remotes, contents, strict=True)
    )
    wanted = IdxSet(IDX_SETS["mnist"].spec, ("mnist",), remotes)
    monkeypatch.setitem(IDX_SETS, "mnist", wanted)
    options = {"data_dir": tmp_path, "cache_dir": tmp_path / "cache", "log": lambda _: None}
    dataset = opened("mnist", download=True, **options)
    assert dataset.train.targets.tolist() == [3, 4]
    shown = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in shown} == {remote.file for remote in remotes}
    assert f"{remotes[0].file} 100%  0.0 of 0.0 MB" in shown
    assert opened("mnist", download=False, **options).test.size == 2
    (tmp_path / "mnist" / remotes[3].file).unlink()
    server.behaviours[remotes[3].file].status = 404
    with pytest.raises(DataError, match=r"is not there.*HTTP status 404.*CONFIG_DATASET_DIGITS"):
        opened("mnist", download=True, **options)


@pytest.mark.parametrize("tells", [True, False])
def test_more_than_any_file_has_is_not_taken(
    tells: bool, server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.data.datasets.download.LARGEST_BYTES", len(CONTENT) - 1)
    with pytest.raises(DataError, match=r"it sends \d+ bytes or more, and at most 1023999 are taken"):
        _fetch(tmp_path / "file", server.url("endless", tells_length=tells))
    assert _left(tmp_path) == []
    monkeypatch.setattr("lib.data.datasets.download.LARGEST_BYTES", len(CONTENT))
    _fetch(tmp_path / "file", server.url("good", tells_length=tells))
    assert (tmp_path / "file").read_bytes() == CONTENT
