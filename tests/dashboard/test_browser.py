"""The dashboard in a real browser: pages, controls, links, silence, bytes; times are printed."""

import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import browsing
import pytest
from browsing import PAGES, Tab

import kvsim
from kvsim.sweeps.driver import replay_all
from traces import random_trace

#: Pixels of the page's height, and by how many each text is wider than its place.
_SIZES = """() => [
  document.querySelector("[data-testid=stMain]").scrollHeight,
  ...[...document.querySelectorAll("[data-testid=stHtml], [data-testid=stText]")].map(
    (text) => text.scrollWidth - text.clientWidth),
]"""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def looked_into(folder, tmp_path_factory):
    """The folder of traces with a run, and a trace of 4,096 tokens."""
    root = tmp_path_factory.mktemp("browser") / "folder"
    shutil.copytree(folder, root)
    sample = kvsim.open_trace(root / "sample.zarr")
    policies = [kvsim.policy(name) for name in ("streaming_llm", "tova")]
    replay_all([sample], policies, [64, 128], interval=64).save(root / "runs" / "first")
    kvsim.save_trace(random_trace(layers=1, heads=1, n=4096, prompt_len=2048), root / "long.zarr")
    return root


@pytest.fixture(scope="module")
def link(looked_into, serve):
    """The address, with its token, that `kvsim dashboard` prints."""
    with serve(looked_into) as printed:
        yield printed


@pytest.fixture(scope="module")
def address(link):
    """Where the pages are, without the token, which the browser has in a cookie."""
    return browsing.home(link)


@pytest.fixture(scope="module")
def tab(link):
    """One tab for all tests, with the token in a cookie; to load a page anew takes seconds."""
    with browsing.chromium(link) as context:
        yield Tab(context.new_page(), quiet=100)


@pytest.fixture
def sample(tab, address):
    """The tab on a page where the sample is chosen."""
    if not tab.page.locator("[data-testid=stSelectbox] input[value='sample.zarr']").count():
        tab.open(address, "retention", trace="sample.zarr")
    return tab


def opens(tab, page, took, capsys):
    """Check a page that was opened: no traceback, and it asks nothing of the world."""
    title = tab.page.locator("[data-testid=stHeading]").first
    title.filter(has_text=re.compile(f"^{page}$", re.IGNORECASE)).wait_for(timeout=10_000)
    tab.check()
    tab.fits()
    with capsys.disabled():
        print(f"\n{page}: {took:.1f} s, {sum(tab.received) / 1e6:.2f} MB")


def test_the_printed_address_opens_the_first_page(tab, link, address, capsys):
    """The browser gets its cookie from it, and the token leaves the address."""
    tab.page.context.clear_cookies()
    took = tab.open(address, trace="sample.zarr", token=link.partition("token=")[2])

    opens(tab, PAGES[0], took, capsys)
    assert "token" not in tab.page.url


@pytest.fixture
def neighbour():
    """Another server of this machine: its address, and the cookies that it receives, by path."""
    received = {}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            received[self.path] = self.headers.get("Cookie", "")
            self.send_response(200)
            self.send_header("Set-Cookie", "kvsim=taken; Path=/")
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<img src=/image.png>")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/segments?trace=sample.zarr", received
        server.shutdown()


def test_another_server_gets_no_token(tab, link, address, neighbour):
    """Browsers send cookies to all ports; a page there, its images and cookies change nothing."""
    page, received = neighbour
    other = tab.page.context.new_page()
    other.goto(page, wait_until="load")
    token = link.partition("token=")[2]
    other.goto(f"{link.partition('?')[0]}{'0' * 32}/favicon.png?token={token}")

    assert "/image.png" in received
    assert not any(token in cookies for cookies in received.values())
    assert other.url == f"{address}/favicon.png"
    assert other.goto(f"{address}/_stcore/health").ok
    other.close()


def test_a_layer_is_changed_and_the_link_restores_it(sample, capsys):
    """The link follows the control, and a page that is loaded anew follows the link."""
    sample.follow("retention")
    took = sample.choose("Layer", "0")

    sample.linked("layer=0")
    sample.page.goto(sample.page.url)
    sample.settle()
    assert (sample.chosen("Layer"), sample.chosen("Trace")) == ("0", "sample.zarr")
    sample.check()
    with capsys.disabled():
        print(f"\nchange of a layer: {took:.1f} s")


@pytest.fixture
def hostile(tab, address):
    """The pages of a trace whose tokens and name are markup."""
    if "hostile" not in tab.page.url:
        tab.open(address, "retention", trace="more/hostile.zarr")
    return tab


@pytest.mark.deep
@pytest.mark.parametrize("page", PAGES)
def test_hostile_tokens_and_names_stay_text(hostile, page):
    """No image is fetched, no script runs, no mark turns the text around, and nothing breaks."""
    hostile.received.clear()
    hostile.follow(page)

    hostile.check()
    hostile.fits()
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", hostile.page.inner_text("body"))
    assert sum(hostile.received) < 1e6
    height, *wider = hostile.page.evaluate(_SIZES)
    assert height < 10_000
    assert max(wider, default=0) <= 0
    if page not in ("answer", "compare"):
        assert hostile.chosen("Trace") == "more/hostile.zarr"
    assert hostile.page.title() != "taken"
