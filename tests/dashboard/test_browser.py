"""The dashboard in a real browser: every page, every kind of control, links, speed and silence.

Times are printed and not asserted; what causes them is: the bytes that a page is sent.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch

import kvsim
from kvsim import Rope, Trace
from kvsim.sweeps.run import replay_all

PAGES = ("trace", "retention", "segments", "compare", "layers", "fidelity")
#: Screenshots for a person to look at go here, where it is set.
SHOTS = os.environ.get("KVSIM_SCREENSHOTS")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium():
    """The path of Debian's Chromium."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium; apt-get install chromium")
    return found


@pytest.fixture(scope="module")
def looked_into(folder, tmp_path_factory):
    """The folder of traces with a run, and a trace of 4,096 tokens."""
    root = tmp_path_factory.mktemp("browser") / "folder"
    shutil.copytree(folder, root)
    sample = kvsim.open_trace(root / "sample.zarr")
    policies = [kvsim.policy(name) for name in ("streaming_llm", "tova")]
    replay_all([sample], policies, [64, 128], interval=64).save(root / "runs" / "first")
    generator = torch.Generator().manual_seed(0)
    n = 4096
    q, k, v = (torch.randn(1, heads, n, 8, generator=generator) for heads in (2, 1, 1))
    Trace.from_arrays(q, k, v, prompt_len=n // 2, rope=Rope.default(8)).save(root / "long.zarr")
    return root


@pytest.fixture(scope="module")
def link(looked_into, serve):
    """The address, with its token, that `kvsim dashboard` prints."""
    with serve(looked_into) as printed:
        yield printed


@pytest.fixture(scope="module")
def address(link):
    """Where the dashboard answers, without the token, which the browser has in a cookie."""
    return link.partition("/?")[0]


@dataclass
class Seen:
    """What a page did: requests to other hosts, what its policy refused, bytes over its socket."""

    page: object
    elsewhere: list = field(default_factory=list)
    violations: list = field(default_factory=list)
    received: list = field(default_factory=list)

    def __post_init__(self):
        """Listen from the start."""
        self.page.on("request", self._request)
        self.page.on("console", self._note)
        self.page.on("websocket", lambda ws: ws.on("framereceived", self._frame))

    def _request(self, request):
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:", "ws://127.0.0.1:")):
            self.elsewhere.append(request.url)

    def _note(self, message):
        if "Content Security Policy" in message.text:
            self.violations.append(message.text)

    def _frame(self, frame):
        self.received.append(len(frame))

    def open(self, address, page="trace", **link):
        """Open a page by its link and wait until it stands still; seconds."""
        start = time.monotonic()
        query = urlencode(link, doseq=True)
        self.page.goto(f"{address}/{'' if page == 'trace' else page}?{query}")
        self.settle()
        return time.monotonic() - start

    def follow(self, page):
        """Go to a page by the link at the side, which loads no scripts anew; seconds."""
        start = time.monotonic()
        self.page.get_by_role("link", name=page.capitalize(), exact=True).click()
        title = self.page.locator("[data-testid=stHeading]").first
        title.filter(has_text=page.capitalize()).wait_for()
        self.settle()
        return time.monotonic() - start

    def settle(self):
        """Wait until the script has run."""
        self.page.wait_for_selector("[data-testid=stHeading], [data-testid=stAlert]")
        self.page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")
        self.page.wait_for_timeout(300)
        self.page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]")

    def choose(self, label, value):
        """Choose an option of a select box; seconds until the page stands still."""
        start = time.monotonic()
        box = self.page.locator("[data-testid=stSelectbox]").filter(has_text=label).first
        for _ in range(10):  # a list that is still scrolling to the option may swallow the click
            box.locator("input").click()
            self.page.get_by_role("option", name=value, exact=True).click()
            self.page.wait_for_timeout(200)
            if self.chosen(label) == value:
                break
            self.page.keyboard.press("Escape")
        self.settle()
        return time.monotonic() - start

    def linked(self, text):
        """Wait until the link says it, which it does some time after the control."""
        self.page.wait_for_url(lambda url: text in url)
        self.settle()

    def chosen(self, label):
        """What a select box says."""
        box = self.page.locator("[data-testid=stSelectbox]").filter(has_text=label).first
        return box.locator("input").input_value()

    def shoot(self, name):
        """A picture for a person to look at."""
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))

    def overflow(self):
        """How many pixels the page is wider than the screen."""
        return self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")

    def check(self):
        """No traceback, no word to another host, and nothing that the page's policy refuses."""
        assert self.page.locator("[data-testid=stException]").count() == 0
        assert self.elsewhere == []
        assert self.violations == []


@pytest.fixture(scope="module")
def chrome(chromium, link):
    """One browser for all tests, which loads the megabytes of scripts that pages share once.

    Its pages share a process, which compiles them once; one page stays open to keep it.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        shared = ("--process-per-site", "--renderer-process-limit=1", "--disable-gpu")
        browser = play.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-background-networking", *shared],
        )
        context = browser.new_context(viewport={"width": 1280, "height": 1100})
        context.set_default_timeout(120_000)
        page = context.new_page()
        page.goto(link)
        assert "token" not in page.url
        page.goto(f"{link.partition('/?')[0]}/_stcore/health")
        yield context
        browser.close()


@pytest.fixture
def seen(chrome):
    """A fresh page."""
    page = chrome.new_page()
    yield Seen(page)
    page.close()


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens(seen, address, page, capsys):
    """By its link, without a traceback, and it asks nothing of the world."""
    took = seen.open(address, page, trace="sample.zarr")

    seen.shoot(page)
    seen.check()
    assert seen.overflow() <= 0
    assert seen.page.locator("[data-testid=stHeading]").first.inner_text().lower() == page
    with capsys.disabled():
        print(f"\n{page}: {took:.1f} s, {sum(seen.received) / 1e6:.2f} MB")


def test_a_layer_is_changed_and_the_link_restores_it(seen, address, capsys):
    """The link follows the control, and a fresh page follows the link."""
    seen.open(address, trace="sample.zarr")
    took = seen.choose("Layer", "0")

    seen.linked("layer=0")
    seen.page.goto(seen.page.url)
    seen.settle()
    assert (seen.chosen("Layer"), seen.chosen("Trace")) == ("0", "sample.zarr")
    seen.check()
    with capsys.disabled():
        print(f"\nchange of a layer: {took:.1f} s")


def test_policy_and_parameter_are_changed(seen, address, capsys):
    """A policy beside another one, and the budget of segments; the link holds both."""
    seen.open(address, "retention", trace="sample.zarr")
    policy = seen.choose("Policy", "snapkv")
    seen.linked("snapkv")
    assert seen.page.locator("h3", has_text="snapkv").count() == 1
    seen.check()

    seen.open(address, "segments", trace="sample.zarr")
    start = time.monotonic()
    budget = seen.page.locator("[data-testid=stNumberInput]").filter(has_text="Budget").first
    before = int(budget.locator("input").input_value())
    budget.locator("[data-testid=stNumberInputStepUp]").click()
    seen.settle()
    parameter = time.monotonic() - start
    seen.linked(f"budget={int(budget.locator('input').input_value())}")
    assert int(budget.locator("input").input_value()) > before
    seen.check()
    with capsys.disabled():
        print(f"\nchange of a policy: {policy:.1f} s, of a parameter: {parameter:.1f} s")


def test_the_next_page_is_a_click_away_and_fits_a_wide_dark_screen(seen, address, capsys):
    """With the server warm; layer and head stay, and nothing has to be scrolled sideways."""
    seen.page.set_viewport_size({"width": 1900, "height": 900})
    seen.page.emulate_media(color_scheme="dark")
    seen.open(address, trace="sample.zarr", layer="1", head="2")
    times = {}
    for page in (*PAGES[1:], PAGES[0]):
        times[page] = seen.follow(page)
        seen.shoot(f"{page}-dark")
        seen.check()
        assert seen.overflow() <= 0, page
        assert (seen.chosen("Layer"), seen.chosen("KV head")) == ("1", "2")
    with capsys.disabled():
        print("\nnext page:", ", ".join(f"{page} {took:.1f} s" for page, took in times.items()))


def test_a_long_trace_is_sent_in_few_bytes(seen, address, capsys):
    """A map of 4,096 by 4,096 in at most 5 MB."""
    took = seen.open(address, trace="long.zarr")

    seen.shoot("long")
    seen.check()
    total = sum(seen.received)
    with capsys.disabled():
        print(f"\n4,096 x 4,096: {took:.1f} s, {total / 1e6:.2f} MB")
    assert total < 5e6


@pytest.fixture(scope="module")
def hostile(chrome, address):
    """The pages of a trace whose tokens and name are markup."""
    page = chrome.new_page()
    seen = Seen(page)
    seen.open(address, trace="more/hostile.zarr")
    yield seen
    page.close()


@pytest.mark.parametrize("page", PAGES)
def test_hostile_tokens_and_names_stay_text(hostile, page):
    """No image is fetched, no script runs, and nothing breaks."""
    hostile.follow(page)

    hostile.shoot(f"hostile-{page}")
    hostile.check()
    assert hostile.chosen("Trace") == "more/hostile.zarr"
    assert hostile.page.title() != "taken"


def test_a_broken_trace_is_a_message(seen, address):
    """And no traceback."""
    seen.open(address, trace="broken.zarr")

    seen.check()
    assert "cannot be read" in seen.page.locator("[data-testid=stAlert]").first.inner_text()
