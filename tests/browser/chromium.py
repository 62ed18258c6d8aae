"""Headless Chromium over its debugging pipe: JSON on two file descriptors, no further package needed."""

from __future__ import annotations

import base64
import json
import math
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class BrowserError(RuntimeError):
    """Chromium stopped, did not answer in time, or a page's script raised."""


def find() -> str | None:
    """The path of a Chromium ($CHROMIUM, or on the PATH); None when there is none."""
    named = os.environ.get("CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab at a time. `with Tab(find()) as tab: tab.open(url, 390); tab.evaluate("document.title")`."""

    def __init__(self, executable: str, timeout: float = 60) -> None:
        self.timeout = timeout
        self.profile = tempfile.TemporaryDirectory(prefix="attnlib-chromium-", ignore_cleanup_errors=True)
        their_in, self.out = os.pipe()
        self.inp, their_out = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        script = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "chromium", executable, *FLAGS, f"--user-data-dir={self.profile.name}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self.buffer, self.events, self.last_id = b"", [], 0
        self.target = self.session = None

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.session = None
            self.call("Browser.close")
            self.process.wait(10)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.inp)
        self.profile.cleanup()

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.inp], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BrowserError(f"no answer from Chromium in {self.timeout:.0f} s")
            chunk = os.read(self.inp, 1 << 16)
            if not chunk:
                raise BrowserError(f"Chromium stopped (exit status {self.process.wait()})")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one DevTools command and return its result; events meanwhile are kept in `events`."""
        self.last_id += 1
        command = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.out, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + self.timeout
        while True:
            message = self._message(deadline)
            if message.get("id") == self.last_id:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.events.append(message)

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, expression: str, what: str) -> None:
        """Until the expression is true; BrowserError with `what` when the time is up."""
        deadline = time.monotonic() + self.timeout
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise BrowserError(f"waited {self.timeout:.0f} s for {what}")
            time.sleep(0.05)

    def resize(self, width: int, height: int = 900) -> None:
        """Lay the page out anew, for a window of this size in CSS pixels."""
        view = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **view)

    def open(self, url: str, width: int, height: int = 900) -> None:
        """Load a page in a fresh tab of this width in CSS pixels and wait until it has finished loading."""
        self.session, self.events, old = None, [], self.target
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if old:
            self.call("Target.closeTarget", targetId=old)
        self.session = self.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        there = f"location.href.startsWith({json.dumps(url.split('?')[0])})"
        self.wait(f"{there} && document.readyState === 'complete'", f"{url} to load")

    def requests(self) -> list[str]:
        """Addresses that were asked for since `open`."""
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def errors(self) -> list[str]:
        """Uncaught JavaScript exceptions since `open`."""
        thrown = [event for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        details = [event["params"]["exceptionDetails"] for event in thrown]
        return [detail.get("exception", {}).get("description", detail["text"]) for detail in details]

    def screenshots(self, path: Path, height: int = 2400) -> None:
        """Write the page as PNG pictures of at most this height: NAME-1.png, NAME-2.png, ..."""
        self.resize(self.evaluate("innerWidth"), height)
        path.parent.mkdir(parents=True, exist_ok=True)
        pages = math.ceil(self.evaluate("document.documentElement.scrollHeight") / height)
        for page in range(pages):
            self.evaluate(f"scrollTo({{top: {page * height}, behavior: 'instant'}})")
            answer = self.call("Page.captureScreenshot", format="png")
            picture = path.with_name(f"{path.name}-{page + 1}.png")
            picture.write_bytes(base64.b64decode(answer["data"]))
