"""Headless Chromium over its DevTools protocol, through a pair of pipes: no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120.0  # for one answer
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--remote-debugging-pipe", "about:blank"),
)


def find_chromium() -> str | None:
    """The path of an installed Chromium, None without one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page. `events` holds what it has reported."""

    def __init__(self, program: str, folder: Path) -> None:
        (commands, self._write), (self._read, answers) = os.pipe(), os.pipe()
        # Chromium reads 3 and writes 4: copies above those do not stand in each other's way.
        given = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (commands, answers)]
        line = shlex.join([program, f"--user-data-dir={folder}", *OPTIONS])
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec 3<&{given[0]} 4>&{given[1]}; exec {line}"],
            pass_fds=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in (commands, answers, *given):
            os.close(number)
        self._pending, self._number = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # at which Chromium ends
        os.close(self._read)
        try:
            self._process.wait(timeout=SECONDS)
        finally:
            self._process.kill()

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result; events on the way are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Read until an event of that name is there."""
        while all(event.get("method") != method for event in self.events):
            self.events.append(self._next())

    def open(self, path: Path, *, width: int, dark: bool) -> None:
        """Load a file at a width, in light or dark; forget the events before it."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression on the page, awaited; fail with its exception."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def _next(self) -> Any:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            assert ready, "Chromium does not answer"
            block = os.read(self._read, 1 << 20)
            assert block, "Chromium has ended"
            self._pending += block
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)
