"""The dashboard in Chromium, for tests, benchmarks and screenshots: a server, and what a page did.

Playwright is imported on use: most tests need no browser.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

#: Pages by their address; the first one opens by default.
PAGES = ("answer", "retention", "response", "segments", "compare")
#: Milliseconds without a change after which a page stands still.
QUIET = 300
# When the page last changed, when its script last ended, and when it was last clicked or typed
# into, on its own clock.
_WATCH = """() => {
  const state = "data-test-script-state";
  window.changed = performance.now();
  const note = (changes) => {
    window.changed = performance.now();
    for (const { attributeName, target } of changes)
      if (attributeName === state && target.getAttribute(state) === "notRunning")
        window.ran = window.changed;
  };
  new MutationObserver(note).observe(document, {
    subtree: true, childList: true, attributes: true, characterData: true });
  const acted = () => { window.acted = performance.now(); };
  for (const kind of ["click", "keydown"]) document.addEventListener(kind, acted, true);
}"""
# The script has run since the last click, charts are drawn, and nothing has changed for a while. A
# click that no script answers, as one that a scrolling list swallows, is waited for a second.
_STILL = """(quiet) => {
  const still = performance.now() - window.changed;
  return still > (window.ran > (window.acted || 0) ? quiet : 1000)
    && document.querySelector("[data-testid=stApp][data-test-script-state=notRunning]")
    && document.querySelector("[data-testid=stHeading], [data-testid=stAlert]")
    && !document.querySelector("[data-testid=stSpinner], [data-testid=stSkeleton]")
    && !document.querySelector("[data-testid=stPlotlyChart]:not(:has(.main-svg))");
}"""

# How many pixels the page is wider than the screen.
_OVERFLOW = "document.documentElement.scrollWidth - window.innerWidth"


@contextmanager
def serve(folder: str | Path, browser: str | None = None) -> Iterator[str]:
    """Run `kvsim dashboard` and yield its address; browser: a command that it opens pages with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["dashboard", str(folder), "--port", str(port)]
    options += [] if browser else ["--no-browser"]
    server = subprocess.Popen(
        [sys.executable, "-c", "from kvsim.cli import main; main()", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | ({"BROWSER": browser} if browser else {}),
    )
    assert server.stdout is not None
    try:
        # printed before the first answer; without a server the pipe ends, and this with it
        link = server.stdout.readline().removeprefix("Dashboard: ").strip()
        assert link.startswith(f"http://127.0.0.1:{port}/?token=")
        deadline = time.monotonic() + 90
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)
        yield link
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)
        server.stdout.close()


def home(link: str) -> str:
    """Return the address of the pages, to which a printed one leads."""
    parts = urlsplit(link)
    connection = HTTPConnection(parts.netloc, timeout=60)
    connection.request("GET", f"/?{parts.query}")
    location = connection.getresponse().headers["Location"]
    connection.close()
    assert "token" not in location
    return f"http://{parts.netloc}{location.rstrip('/')}"


@contextmanager
def chromium(link: str) -> Iterator[Any]:
    """Open one browser that has the token of a link in a cookie; yield its context.

    Its pages share a process, which compiles the megabytes of scripts once; one stays open.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        shared = ("--process-per-site", "--renderer-process-limit=1", "--disable-gpu")
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-background-networking", *shared],
        )
        context = browser.new_context(viewport={"width": 1280, "height": 1100})
        context.set_default_timeout(120_000)
        context.request.get(link, max_redirects=0)  # loads no page
        context.new_page().goto(f"{home(link)}/_stcore/health")
        yield context
        browser.close()


@dataclass
class Tab:
    """What a page did: requests to other hosts, what its policy refused, bytes over its socket.

    quiet: milliseconds without a change after which the page stands still.
    """

    page: Any
    quiet: int = QUIET
    elsewhere: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Listen from the start."""
        self.page.add_init_script(f"({_WATCH})()")
        self.page.on("request", self._request)
        self.page.on("console", self._note)
        self.page.on("websocket", lambda ws: ws.on("framereceived", self._frame))

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:", "ws://127.0.0.1:")):
            self.elsewhere.append(request.url)

    def _note(self, message: Any) -> None:
        if "Content Security Policy" in message.text:
            self.violations.append(message.text)

    def _frame(self, frame: Any) -> None:
        self.received.append(len(frame))

    def open(self, address: str, page: str = PAGES[0], **link: Any) -> float:
        """Open a page by its link; seconds until its last change."""
        query = urlencode(link, doseq=True)
        self.page.goto(f"{address}/{'' if page == PAGES[0] else page}?{query}")
        self.settle()
        return self.page.evaluate("window.changed") / 1000

    def follow(self, page: str) -> float:
        """Go to a page by its link above, which loads no scripts anew; seconds."""
        self.page.get_by_role("link", name=page.capitalize(), exact=True).last.click()
        title = self.page.locator("[data-testid=stHeading]").first
        title.filter(has_text=page.capitalize()).wait_for()
        return self.settle()

    def settle(self) -> float:
        """Wait until the page stands still; seconds from the last click or key to its change."""
        self.page.wait_for_function(_STILL, arg=self.quiet)
        return self.page.evaluate("(window.changed - (window.acted || 0)) / 1000")

    def choose(self, label: str, value: str) -> float:
        """Choose an option of a select box; seconds."""
        box = self.page.locator("[data-testid=stSelectbox]").filter(has_text=label).first
        for _ in range(10):  # a list that is still scrolling to the option may swallow the click
            box.locator("input").click()
            box.locator("input").fill(value)  # a list shows no more options than it has room for
            self.page.get_by_role("option", name=value, exact=True).click()
            took = self.settle()
            if self.chosen(label) == value:
                return took
            self.page.keyboard.press("Escape")
        raise AssertionError(f"{label} cannot be set to {value}")

    def linked(self, text: str) -> None:
        """Wait until the link has a text, which the run that answers a control gives it.

        Once it has, that run has begun, however late, and the page stands still when it has ended.
        """
        self.page.wait_for_url(lambda url: text in url)
        self.settle()

    def chosen(self, label: str) -> str:
        """The value of a select box."""
        box = self.page.locator("[data-testid=stSelectbox]").filter(has_text=label).first
        return box.locator("input").input_value()

    def overflow(self) -> int:
        """How many pixels the page is wider than the screen."""
        return self.page.evaluate(_OVERFLOW)

    def fits(self) -> None:
        """Wait until the page is no wider than the screen: charts follow their columns late."""
        self.page.wait_for_function(f"() => {_OVERFLOW} <= 0", timeout=10_000)

    def check(self) -> None:
        """No traceback, no word to another host, and nothing that the page's policy refuses."""
        assert self.page.locator("[data-testid=stException]").count() == 0
        assert self.elsewhere == []
        assert self.violations == []
