"""The dashboard's server: nothing without its token, and nothing for the pages of others."""

import http.client
import re
import shlex
import stat
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import browsing
import pytest

#: Pages, scripts, files, the state of the server, and what is not there.
PATHS = (
    "/",
    "/retention?trace=sample.zarr",
    "/static/js",
    "/favicon.png",
    "/_stcore/health",
    "/_stcore/host-config",
    "/_stcore/agent/openapi.json",
    "/_stcore/stream",
    "/media/0123.csv",
    "/no/such/page",
    "//",
    "/%2e%2e/%2e%2e/etc/passwd",
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Where the browser of the server writes its arguments."""
    return tmp_path_factory.mktemp("browser") / "opened"


@pytest.fixture(scope="module")
def link(tmp_path_factory, serve, opened):
    """The address, with its token, that `kvsim dashboard` prints; its page goes with the server."""
    browser = opened.with_name("browser.py")
    browser.write_text(
        f"import pathlib, sys\npathlib.Path({str(opened)!r}).write_text(' '.join(sys.argv[1:]))\n"
    )
    command = shlex.join([sys.executable, "-S", str(browser)]) + " %s"
    with serve(tmp_path_factory.mktemp("folder"), command) as printed:
        yield urlsplit(printed)
        page = Path(urlsplit(opened.read_text()).path) if opened.exists() else None
    assert page is None or not page.parent.exists()


@pytest.fixture
def token(link):
    """The server's token."""
    return link.query.removeprefix("token=")


@pytest.fixture
def cookie(link, token):
    """The header with the token, as a browser sends it."""
    return {"Cookie": f"other=1; kvsim={token}; kvsim=of-another-server"}


@pytest.fixture
def home(link):
    """The path of the pages."""
    return urlsplit(browsing.home(link.geturl())).path


@pytest.fixture
def ask(link):
    """Send one request, and return its status, headers and content."""

    def send(path="/", method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", link.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            # a WebSocket that is opened has no end
            return answer.status, answer.headers, b"" if answer.status == 101 else answer.read()
        finally:
            connection.close()

    return send


@pytest.fixture
def socket_status(ask, link, home):
    """Ask for the WebSocket of the pages, and return the status."""

    def send(origin=f"http://127.0.0.1:{link.port}", **headers):
        headers |= {} if origin is None else {"Origin": origin}
        headers |= {"Connection": "Upgrade", "Upgrade": "websocket"}
        headers |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        return ask(f"{home}/_stcore/stream", **headers)[0]

    return send


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_sent_without_the_token(ask, token, home, cookie, path):
    """Pages, static files and the state of the server are refused, whatever the token is not."""
    wrong = [token[:-1], token + "x", token.swapcase(), "x" * len(token), "", "\xff", "%00"]
    join = "&" if "?" in path else "?"
    answers = [ask(path, **cookie), ask(home, **cookie), ask(f"{home}x{path}", **cookie)]
    path = home + path
    answers += [ask(path), ask(path, Cookie=f"kvsim-1={token}"), ask(path, Cookie="kvsim=; =;;")]
    answers += [ask(path, Cookie=f"kvsim={each}") for each in wrong]
    answers += [ask(f"{path}{join}token={each}") for each in wrong if each.isascii()]
    for status, headers, content in answers:
        assert status == 403
        assert content.startswith(b"refused: the address has no token")
        assert "Set-Cookie" not in headers


def test_the_address_becomes_a_cookie(ask, home, token):
    """The printed address leads to the pages without the token, and keeps the rest of its query."""
    assert re.fullmatch("/[0-9a-f]{32}", home)
    assert home[1:] not in token
    for path, target in {
        "/": "/",
        "/retention": "/retention",
        f"{home}/retention": "/retention",
        f"/{'0' * 32}/retention": "/retention",
        "//evil.invalid/x": "//evil.invalid/x",
        "/a%0d%0ab%3f": "/a%0D%0Ab%3F",
    }.items():
        status, headers, _ = ask(f"{path}?trace=a%20b&token={token}&layer=1")
        assert (status, headers["Location"]) == (303, f"{home}{target}?trace=a+b&layer=1")
        assert headers["Set-Cookie"].startswith(f"kvsim={token}; ")
        flags = {flag.strip().lower() for flag in headers["Set-Cookie"].split(";")[1:]}
        assert flags == {"httponly", f"path={home}", "samesite=lax"}
        assert headers["Cache-Control"] == "no-store"


def test_with_the_cookie_there_are_pages_that_no_other_may_frame(ask, home, cookie):
    """With the token come page, scripts and state; frames and foreign scripts are forbidden."""
    status, headers, page = ask(f"{home}/", **cookie)
    assert (status, b"<title>Streamlit" in page) == (200, True)
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"
    assert policy["default-src"] == "'self'"
    assert "unsafe" not in policy["script-src"]
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert ask(f"{home}/_stcore/health", **cookie)[0] == 200
    assert ask(f"{home}/retention/", **cookie)[1]["Location"] == f"{home}/retention"
    script = page.decode().partition('src="./static/js/')[2].partition('"')[0]
    assert ask(f"{home}/static/js/{script}", **cookie)[0] == 200


def test_the_socket_needs_the_token_and_a_page_of_this_server(socket_status, link, cookie):
    """The WebSocket opens with token and Origin of this server alone."""
    port = link.port
    assert socket_status(**cookie) == 101
    assert socket_status(f"http://localhost:{port}", Host=f"localhost:{port}", **cookie) == 101
    assert socket_status() == 403
    assert socket_status(Cookie="kvsim=wrong") == 403
    for origin in (
        None,
        "",
        "null",
        "http://evil.invalid",
        f"http://evil.invalid:{port}",
        f"https://127.0.0.1:{port}",
        f"http://127.0.0.1:{port + 1}",
        f"http://localhost:{port}",
        f"http://127.0.0.1:{port}.evil.invalid",
    ):
        assert socket_status(origin, **cookie) == 403, origin


def test_a_name_that_points_to_this_machine_is_refused(
    ask, socket_status, link, home, token, cookie
):
    """A site whose name is made to point to this machine gets nothing, even with the token."""
    for host in (
        "evil.invalid",
        f"evil.invalid:{link.port}",
        f"127.0.0.1:{link.port};x",
        "",
        "::1",
    ):
        assert ask(f"/?token={token}", Host=host)[0] == 403
        assert ask(f"{home}/", Host=host, **cookie)[0] == 403
        assert socket_status(f"http://{host}", Host=host, **cookie) == 403
    # forwarded from another machine
    assert ask(f"{home}/", Host="localhost:9000", **cookie)[0] == 200


def test_the_token_is_in_no_command_that_others_can_read(link, opened):
    """The browser is given a private page that leads to the address."""
    deadline = time.monotonic() + 60
    while not (opened.exists() and opened.read_text()):
        assert time.monotonic() < deadline, "no browser was opened"
        time.sleep(0.02)
    page = urlsplit(opened.read_text())
    assert page.scheme == "file"
    assert link.query.removeprefix("token=") not in opened.read_text()
    assert f'content="0;url={link.geturl()}"' in Path(page.path).read_text()
    assert stat.S_IMODE(Path(page.path).parent.stat().st_mode) == 0o700
