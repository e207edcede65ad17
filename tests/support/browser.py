"""Headless Chromium, driven by ChromeDriver through the WebDriver protocol (W3C), by the standard library
alone. Both programs are the distribution's packages (Debian: chromium, chromium-driver)."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",
)


class Browser:
    """A window of a browser. ``size``: of the page's visible part, in pixels."""

    def __init__(self, server: str, session: str) -> None:
        self._base = f"{server}/session/{session}"

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        return request(method, self._base + path, arguments)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Make the visible part so large, and light or dark."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **sizes)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    def command(self, name: str, **parameters: Any) -> Any:
        """Run a command of the DevTools protocol and return its result."""
        return self._call("POST", "/goog/cdp/execute", cmd=name, params=parameters)

    def open(self, path: Path) -> None:
        """Load a file, and wait until it is loaded."""
        self._call("POST", "/url", url=path.resolve().as_uri())

    def blank(self) -> None:
        """Load an empty page, and forget what was logged."""
        self._call("POST", "/url", url="about:blank")
        self.log("browser")
        self.log("performance")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function of this body returns in the page."""
        return self._call("POST", "/execute/sync", script=script, args=list(arguments))

    def log(self, kind: str) -> list[dict[str, Any]]:
        """New entries of the log "browser" (the console), or "performance" (requests among others)."""
        found: list[dict[str, Any]] = self._call("POST", "/se/log", type=kind)
        return found

    def requests(self) -> list[str]:
        """Returns the addresses that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [each for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in sent]

    def move(self, x: int, y: int) -> None:
        """Move the mouse to a place of the visible part."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: int, y: int) -> None:
        """Press and release the mouse there."""
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        """Write the visible part as PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))


def request(method: str, address: str, arguments: dict[str, Any]) -> Any:
    """Returns the value that the driver answers; RuntimeError with its own words where it refuses."""
    body = json.dumps(arguments).encode() if method == "POST" else None
    made = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(made, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        said = json.load(error)["value"]
        raise RuntimeError(f"{method} {address}: {said['error']}: {said['message']}") from None


def missing() -> list[str]:
    """Returns the programs that are needed and not there."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose own files are in ``folder``; closed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}", "--allowed-ips=127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                if request("GET", f"{server}/status", {})["ready"]:
                    break
            except OSError:
                time.sleep(0.05)
        wanted = {
            "goog:chromeOptions": {
                "binary": shutil.which("chromium"),
                "args": [*ARGUMENTS, f"--user-data-dir={folder}"],
            },
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        found = request("POST", f"{server}/session", {"capabilities": {"alwaysMatch": wanted}})
        try:
            yield Browser(server, found["sessionId"])
        finally:
            request("DELETE", f"{server}/session/{found['sessionId']}", {})
    finally:
        driver.terminate()
        driver.wait(20)
