"""make fetch: what it shows, keeps and refuses, against a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.configs import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}" + bytes(1000),
    "modeling_own.py": b"raise SystemExit('run')",
    "pytorch_model.bin": b"\x80\x02.",
    "LICENSE": b"as is",
}


class Hub(BaseHTTPRequestHandler):
    """The answers of a hub with one repository, me/tiny."""

    corrupt: ClassVar[bool] = False

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/") if part]
        if parts[:4] == ["api", "models", "me", "tiny"] and parts[-1] in ("main", COMMIT):
            facts = {"id": "me/tiny", "sha": COMMIT, "cardData": {"license": "mit"}, "siblings": siblings()}
            tree = [
                {"type": "file", "path": each["rfilename"], "size": each["size"], "oid": "0" * 40}
                | of_lfs(each)
                for each in siblings()
            ]
            self.answer(json.dumps(tree if "tree" in parts else facts).encode())
        elif parts[:4] == ["me", "tiny", "resolve", COMMIT]:
            content = FILES["/".join(parts[4:])]
            digest = sha256(content)
            content = content[:-1] + b"x" if self.corrupt else content
            self.answer(content, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def answer(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def siblings() -> list[dict[str, Any]]:
    plain = [{"rfilename": name, "size": len(content), "blobId": "0" * 40} for name, content in FILES.items()]
    return [each | of_lfs(each) for each in plain]


def of_lfs(sibling: dict[str, Any]) -> dict[str, Any]:
    content = FILES[sibling["rfilename"]]
    facts = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
    facts |= {"oid": facts["sha256"]}
    return {"lfs": facts} if sibling["rfilename"].endswith((".safetensors", ".bin")) else {}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Hub, "corrupt", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def fetch(hub: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "scripts.fetch", *words]
    return subprocess.run(
        command, cwd=ROOT, env=known | settings, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_what_is_downloaded_is_shown_first_and_pinned(hub: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tiny"
    done = fetch(hub, tmp_path / "home", "--repo=me/tiny", f"--directory={folder}")
    assert done.returncode == 0, done.stderr
    assert f"DIRECTORY={folder}: there is no folder {folder.parent}; it will be made\n" in done.stdout
    assert f"main, now commit {COMMIT}" in done.stdout and "mit" in done.stdout
    assert "3 of 5" in done.stdout and "free disk" in done.stdout
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "LICENSE", "source.json"}, "neither code nor pickles"
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    source = json.loads((folder / "source.json").read_text())
    assert (source["repository"], source["commit"], source["license"]) == ("me/tiny", COMMIT, "mit")
    assert source["sha256"] == {name: sha256(FILES[name]) for name in names - {"source.json"}}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--repo=me/none"], 1, "me/none cannot be downloaded: "),
        (["--repo=tiny"], 2, "REPO=tiny is no repository; give REPO=owner/name"),
        (["--repo=me/tiny:x"], 1, "me/tiny:x cannot be downloaded: "),
        (["--repo=me/tiny", "--revision=other"], 1, "me/tiny cannot be downloaded: "),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(
    words: list[str], status: int, message: str, hub: str, tmp_path: Path
) -> None:
    done = fetch(hub, tmp_path / "home", *words, f"--directory={tmp_path / 'new'}")
    assert (done.returncode, len(done.stderr.splitlines())) == (status, 1), done.stderr
    assert done.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "new").exists()


def test_no_hub_and_damaged_files_are_told(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--repo=me/tiny", f"--directory={tmp_path / 'new'}")
    done = fetch("http://127.0.0.1:9", tmp_path / "home", *words)
    assert (
        done.returncode == 1
        and "me/tiny cannot be downloaded" in done.stderr
        and "Traceback" not in done.stderr
    )
    monkeypatch.setattr(Hub, "corrupt", True)
    done = fetch(hub, tmp_path / "home", *words)
    assert done.returncode == 1 and "is not what the hub has" in done.stderr
    assert not (tmp_path / "new").exists()
