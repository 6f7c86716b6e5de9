"""A browser that tests drive: Chromium, by the W3C WebDriver protocol of its chromedriver."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
]
START_S = 60.0


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    if shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome")):
        return ""
    return "no Chromium with chromedriver here: make browser installs it"


@contextlib.contextmanager
def browser(width: int = 1300, height: int = 900) -> Iterator[Browser]:
    """A browser of its own, with a profile of its own, ended with all its processes."""
    assert not missing(), missing()
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        tempfile.TemporaryDirectory(prefix="rlinf-browser-", ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as driver,
    ):
        try:
            found = None
            assert driver.stdout is not None
            while found is None:
                line = driver.stdout.readline()
                assert line, "chromedriver did not start"
                found = re.search(r"started successfully on port (\d+)", line)
            address = f"http://127.0.0.1:{found[1]}"
            arguments = [*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
            wanted = {
                "goog:chromeOptions": {"binary": binary, "args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
                "timeouts": {"script": 60_000, "pageLoad": 60_000},
            }
            session = _call(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
            opened = Browser(f"{address}/session/{session['sessionId']}")
            yield opened
            _call(opened.address, method="DELETE")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, 15)
            driver.wait()


class Browser:
    """One window."""

    def __init__(self, address: str) -> None:
        self.address = address

    def open(self, path: Path) -> float:
        """Show a file; returns the seconds until it said that it is ready."""
        start = time.monotonic()
        _call(f"{self.address}/url", {"url": path.as_uri()})
        self.wait("return document.documentElement.dataset.ready !== undefined")
        return time.monotonic() - start

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page."""
        body = {"script": script, "args": list(arguments)}
        return _call(f"{self.address}/execute/sync", body)

    def wait(self, script: str, *arguments: Any) -> None:
        """Until it returns something true.

        Raises:
            TimeoutError: it did not.
        """
        deadline = time.monotonic() + START_S
        while not self.run(script, *arguments):
            if time.monotonic() > deadline:
                raise TimeoutError(script)
            time.sleep(0.02)

    def drag(self, selector: str, start: float, end: float) -> None:
        """Press at a share of an element's width, move to another, release; at half its height."""
        (x0, y), (x1, _) = self.place(selector, start), self.place(selector, end)
        move = {"type": "pointerMove", "duration": 30, "origin": "viewport"}
        self._point(
            {**move, "x": x0, "y": y},
            {"type": "pointerDown", "button": 0},
            {**move, "x": (x0 + x1) // 2, "y": y},
            {**move, "x": x1, "y": y},
            {"type": "pointerUp", "button": 0},
        )

    def hover(self, selector: str, share: float) -> None:
        """Move the pointer over a share of an element's width."""
        x, y = self.place(selector, share)
        self._point({"type": "pointerMove", "duration": 0, "origin": "viewport", "x": x, "y": y})

    def double_click(self, selector: str) -> None:
        press = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self.hover(selector, 0.5)
        self._point(*press, *press)

    def place(self, selector: str, share: float) -> tuple[int, int]:
        """Bring an element into view; returns a point of it, in the window."""
        x, y = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const r = e.getBoundingClientRect();"
            "return [r.x + arguments[1] * r.width, r.y + r.height / 2]",
            selector,
            share,
        )
        return round(x), round(y)

    def prefer(self, scheme: str) -> None:
        """Have the system be ``light`` or ``dark``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._devtools("Emulation.setEmulatedMedia", {"features": [feature]})

    def size(self, width: int, height: int) -> None:
        """Of what is seen of the page."""
        about = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", about)

    def errors(self) -> list[str]:
        """Errors and warnings of the page since the last time."""
        return [row["message"] for row in _call(f"{self.address}/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        """Save what is seen of the page."""
        path.write_bytes(base64.b64decode(_call(f"{self.address}/screenshot", method="GET")))

    def _point(self, *actions: dict[str, Any]) -> None:
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        body = {"actions": [{**mouse, "actions": list(actions)}]}
        _call(f"{self.address}/actions", body)

    def _devtools(self, command: str, parameters: dict[str, Any]) -> None:
        _call(f"{self.address}/goog/cdp/execute", {"cmd": command, "params": parameters})


# Not the system's proxy: chromedriver is on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _call(url: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
    data = None if method != "POST" else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with _OPENER.open(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None
