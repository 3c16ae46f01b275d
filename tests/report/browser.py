"""A headless Chromium that is driven over a pipe: the DevTools protocol without any package.

The browser is the first of `NAMES` on the path, or what the environment variable
`MOEMESH_TEST_BROWSER` names (a program and its first arguments, as one would type them).
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60.0


def find() -> list[str] | None:
    """Command of a browser; None if no browser is installed."""
    if named := os.environ.get("MOEMESH_TEST_BROWSER"):
        return shlex.split(named)
    path = next(filter(None, map(shutil.which, NAMES)), None)
    return None if path is None else [path]


class Browser:
    """One page of a headless browser; leave the context to end it."""

    def __init__(self, command: list[str], profile: Path) -> None:
        # The browser reads commands from descriptor 3 and writes answers to 4, each ended by NUL.
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        arguments = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run",
                     "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
                     "about:blank"]  # fmt: skip
        # A shell moves the descriptors to the numbers that the browser expects.
        moved = f'exec "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", moved, "bash", *command, *arguments],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._number, self._buffer = 0, b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path: Path, *, width: int, scheme: str = "light") -> None:
        """Show a file at a window width in CSS pixels, preferring the colour scheme."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression of JavaScript in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(str(reply["exceptionDetails"]))
        return reply["result"].get("value")

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser is silent")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
