"""A real browser that shows pages without a network: Chromium, where it is installed, spoken to by a pair of pipes.

The protocol is Chrome's DevTools protocol: a JSON object per message, with a zero byte behind each.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATH = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
needs_browser = pytest.mark.skipif(PATH is None, reason="no Chromium here, which `apt-get install chromium` brings")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb", "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
SECONDS = 60.0
"""Until a page must have settled."""


class Browser:
    """One page, which goes from URL to URL."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._number, self._rest = read, write, 0, b""
        self._session: dict[str, str] = {}
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.errors: list[str] = []
        self.tell("Runtime.enable")

    def tell(self, method: str, **values: Any) -> dict[str, Any]:
        """The result of a method of the protocol.  AssertionError: the browser refuses it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def go(self, url: str, *, size: tuple[int, int] = (900, 700), ratio: float = 1.0, touch: bool = False) -> None:
        """Load a page in a window of (width, height) pixels of CSS, each `ratio` pixels of the screen, and let it settle."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": ratio, "mobile": touch}
        self.tell("Emulation.setDeviceMetricsOverride", **metrics)
        self.tell("Emulation.setTouchEmulationEnabled", enabled=touch, maxTouchPoints=2)
        self.tell("Page.navigate", url="about:blank")  # so that another fragment is another page
        self.tell("Page.navigate", url=url)
        self.settle()

    def settle(self) -> None:
        """Wait until all tiles that are asked for are drawn.  AssertionError: a script of the page failed."""
        until = time.monotonic() + SECONDS
        ready = "typeof changed === 'function' && document.body.dataset.waiting === '0' && !waiting && !drawing"
        while not self.value(ready):
            assert not self.errors and time.monotonic() < until, self.errors or self.value("document.body.outerHTML")
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript in the page."""
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, as a user presses it."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, key=key, **text)
        self.settle()

    def screenshot(self) -> np.ndarray:
        """(H, W, 3) of what is seen."""
        picture = base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"])
        with Image.open(io.BytesIO(picture)) as image:
            return np.asarray(image.convert("RGB"))


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser, whose profile is in a folder."""
    assert PATH is not None
    (to_it, write), (read, from_it) = os.pipe(), os.pipe()

    def places() -> None:  # of the protocol: 3 is read, 4 is written
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_it, from_it)]
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    command = [PATH, *OPTIONS, f"--user-data-dir={folder}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, preexec_fn=places, close_fds=False, **quiet)
    try:
        os.close(to_it)
        os.close(from_it)
        yield Browser(read, write)
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)
