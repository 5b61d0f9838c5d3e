"""A real Chromium, driven over its DevTools protocol, for pages that need a server, a keyboard and a mouse."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from fakes.polling import eventually

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)
_LARGEST_MESSAGE = 64 * 2**20  # a screenshot of a long page
# Returns an element's position; blocks mouse events on other elements until `aimed` is called.
_AIM = """((find) => {
  find().scrollIntoView({block: "center"});
  const box = find().getBoundingClientRect();
  const kinds = ["pointerdown", "mousedown", "pointerup", "mouseup", "click"];
  let hit = null;
  const look = (event) => {
    hit ??= !!find()?.contains(event.target);
    if (!hit) { event.preventDefault(); event.stopImmediatePropagation(); }
  };
  for (const kind of kinds) window.addEventListener(kind, look, true);
  window.aimed = () => { for (const kind of kinds) window.removeEventListener(kind, look, true); return hit; };
  return [box.x + box.width / 2, box.y + box.height / 2];
})"""


def chromium_binary() -> str:
    """Returns the path of Chromium; skips the test without it."""
    for name in BINARIES:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium: install it (apt-get install chromium, or brew install --cask chromium)")


class ProtocolError(Exception): ...


class Page:
    """A tab. Elements are named by JavaScript expressions, so that a test states how a person finds them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._calls = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result; skips events that arrive before it."""
        self._calls += 1
        self._connection.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == self._calls:
                if "error" in answer:
                    raise ProtocolError(answer["error"])
                return answer["result"]

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Returns an expression's value once it is true.

        The page itself polls every 100 ms: DevTools calls that frequent would leave a large page no time for anything
        else.
        """
        look = (
            "new Promise((resolve) => { const end = Date.now() + 1000; const look = () => { let found = null;"
            f" try {{ found = ({expression}); }} catch (_) {{}}"
            " if (found || Date.now() > end) resolve(found); else setTimeout(look, 100); }; look(); })"
        )

        def value_now() -> Any:
            try:
                return self.value(look)
            except ProtocolError:  # the page was replaced by another during the call
                return None

        return eventually(value_now)

    def click(self, element: str) -> None:
        """Brings an element into view and clicks it as a mouse does; retries if it has moved."""
        eventually(lambda: self._hits(element))

    def _hits(self, element: str) -> bool:
        x, y = self.until(f"{_AIM}(() => ({element}))")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        return self.value("!window.aimed || window.aimed()")  # another page has no `aimed`

    def fill(self, element: str, text: str) -> None:
        """Clicks a field, selects its content, and types a text over it."""
        self.click(element)
        self.call("Input.dispatchKeyEvent", type="keyDown", commands=["selectAll"], key="a")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path, *, width: int = 1300, height: int = 2400) -> Iterator[Page]:
    """Starts Chromium with a single tab; its profile lies in `folder`."""
    profile = folder / "profile"
    size = f"--window-size={width},{height}"
    process = subprocess.Popen(
        [chromium_binary(), *_FLAGS, size, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        file = profile / "DevToolsActivePort"
        eventually(lambda: file.is_file() and len(file.read_text().split()) == 2)
        port, path = file.read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=_LARGEST_MESSAGE, proxy=None) as main:
            pages = Page(main).call("Target.getTargets")["targetInfos"]
        tab = next(page["targetId"] for page in pages if page["type"] == "page")
        address = f"ws://127.0.0.1:{port}/devtools/page/{tab}"
        with connect(address, max_size=_LARGEST_MESSAGE, proxy=None) as connection:
            yield Page(connection)
    finally:
        process.kill()
        process.wait()
