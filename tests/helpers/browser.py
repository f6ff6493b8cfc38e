"""Chromium without a window, driven over a pipe: pages are opened, clicked and looked at as a reader does it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """Where Chromium is, if it is installed (`apt-get install chromium`)."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser of its own, which cannot reach any network but this machine."""

    def __init__(self) -> None:
        program = find()
        assert program is not None
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, answers = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += ["--disable-dev-shm-usage", "--proxy-server=127.0.0.1:9", f"--user-data-dir={self.home.name}"]

        def wire() -> None:  # the browser reads commands from 3 and answers on 4
            ends = [os.dup(commands[0]), os.dup(answers[1])]
            high = [os.dup2(end, 100 + place) for place, end in enumerate(ends)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [program, *flags, "about:blank"], preexec_fn=wire, close_fds=False, stdout=quiet, stderr=quiet
        )
        os.close(commands[0])
        os.close(answers[1])
        self.write, self.read = os.fdopen(commands[1], "wb", 0), os.fdopen(answers[0], "rb")
        self.number, self.session, self.events = 0, "", list[dict[str, Any]]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.write.close()
        self.read.close()
        self.home.cleanup()

    def call(self, method: str, **options: Any) -> Any:
        """One command of the DevTools protocol, and its answer."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": options}
        message |= {"sessionId": self.session} if self.session else {}
        self.write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (one := self.read.read(1)) != b"\0":
            assert one, "the browser ended"
            text += one
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, page: Path | str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a file or an address of this machine in a window of this size, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of some JavaScript."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click of the mouse on the middle of an element."""
        box = self.run(
            f"(() => {{ const one = document.querySelector({selector!r}); one.scrollIntoView({{block: 'center'}}); "
            "const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def faults(self, own: str = "file:") -> list[str]:
        """Errors of scripts, and everything that was asked of a network; `own` begins the addresses of the page."""
        found = []
        for event in self.events:
            kind, what = event.get("method"), event.get("params", {})
            if kind == "Runtime.exceptionThrown" or (kind == "Log.entryAdded" and what["entry"]["level"] == "error"):
                found.append(json.dumps(what))
            if kind == "Network.requestWillBeSent" and not what["request"]["url"].startswith((own, "data:")):
                found.append(what["request"]["url"])
        return found

    def picture(self, file: Path, whole: bool = False) -> None:
        """A screenshot, of the whole page if asked for."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))
