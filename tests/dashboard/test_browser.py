"""The dashboard in a real browser: every page, every kind of control, links, speed and silence.

Times are printed and not asserted; what causes them is: the bytes that a page is sent.
"""

from __future__ import annotations

import shutil

import browsing
import pytest
import torch
from browsing import PAGES, Tab

import kvsim
from kvsim import Rope, Trace
from kvsim.sweeps.run import replay_all

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not shutil.which("chromium"), reason="no chromium; apt-get install chromium"
    ),
]


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


@pytest.fixture(scope="module")
def chrome(link):
    """One browser for all tests, with the token in a cookie."""
    with browsing.chromium(link) as context:
        yield context


@pytest.fixture
def seen(chrome):
    """A fresh page."""
    page = chrome.new_page()
    yield Tab(page)
    page.close()


@pytest.mark.parametrize("page", ["answer", "compare", "layers", "fidelity"])
def test_a_page_opens_by_its_link(seen, address, page, capsys):
    """Without a traceback, and it asks nothing of the world; other tests open the other pages."""
    took = seen.open(address, page, trace="sample.zarr")

    seen.check()
    assert seen.overflow() <= 0
    assert seen.page.locator("[data-testid=stHeading]").first.inner_text().lower() == page
    with capsys.disabled():
        print(f"\n{page}: {took:.1f} s, {sum(seen.received) / 1e6:.2f} MB")


def test_a_layer_is_changed_and_the_link_restores_it(seen, address, capsys):
    """The link follows the control, and a fresh page follows the link."""
    seen.open(address, "trace", trace="sample.zarr")
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
    value, parameter = seen.step("Budget")
    seen.linked(f"budget={value}")
    assert value == 144
    seen.check()
    with capsys.disabled():
        print(f"\nchange of a policy: {policy:.1f} s, of a parameter: {parameter:.1f} s")


def test_the_next_page_is_a_click_away_and_fits_a_wide_dark_screen(seen, address, capsys):
    """With the server warm; layer and head stay, and nothing has to be scrolled sideways."""
    seen.page.set_viewport_size({"width": 1900, "height": 900})
    seen.page.emulate_media(color_scheme="dark")
    seen.open(address, "retention", trace="sample.zarr", layer="1", head="2")
    times = {}
    for page in ("fidelity", "trace", "compare", "segments"):
        times[page] = seen.follow(page)
        seen.check()
        assert seen.overflow() <= 0, page
        if page in ("trace", "segments"):
            assert (seen.chosen("Layer"), seen.chosen("KV head")) == ("1", "2")
    with capsys.disabled():
        print("\nnext page:", ", ".join(f"{page} {took:.1f} s" for page, took in times.items()))


def test_a_long_trace_is_sent_in_few_bytes(seen, address, capsys):
    """A map of 4,096 by 4,096 in less than 1 MB."""
    took = seen.open(address, "trace", trace="long.zarr")

    seen.check()
    total = sum(seen.received)
    with capsys.disabled():
        print(f"\n4,096 x 4,096: {took:.1f} s, {total / 1e6:.2f} MB")
    assert total < 1e6


@pytest.fixture(scope="module")
def hostile(chrome, address):
    """The pages of a trace whose tokens and name are markup."""
    page = chrome.new_page()
    seen = Tab(page)
    seen.open(address, "trace", trace="more/hostile.zarr")
    yield seen
    page.close()


@pytest.mark.parametrize("page", PAGES)
def test_hostile_tokens_and_names_stay_text(hostile, page):
    """No image is fetched, no script runs, and nothing breaks."""
    hostile.follow(page)

    hostile.check()
    if page not in ("answer", "compare", "fidelity"):
        assert hostile.chosen("Trace") == "more/hostile.zarr"
    assert hostile.page.title() != "taken"


def test_a_broken_trace_is_a_message(seen, address):
    """And no traceback."""
    seen.open(address, "trace", trace="broken.zarr")

    seen.check()
    assert "cannot be read" in seen.page.locator("[data-testid=stAlert]").first.inner_text()
