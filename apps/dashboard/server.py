"""The server that streamlit runs for `kvsim dashboard DIR`: for one user of this machine.

Other users of a machine reach its loopback address too, and so does every page that is open in the
browser. `Guard` therefore lets nothing through, page, file or WebSocket, without the token of this
server, which is drawn when it starts. Browsers send a cookie to all ports of a host, but not to all
paths: the pages lie below a path that no other server knows, and the cookie with the token is sent
only there.
"""

from __future__ import annotations

import gc
import html
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import streamlit
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import config
from streamlit.starlette import App

ADDRESS: Final = "127.0.0.1"
COOKIE: Final = "kvsim"
#: This machine in an address. Another name is that of a site that points to it (DNS rebinding).
HOST: Final = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")


def _inline_scripts() -> str:
    page = Path(streamlit.__file__).with_name("static") / "index.html"
    scripts = re.findall(r"<script>(.*?)</script>", page.read_text("utf-8"), re.DOTALL)
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    return " ".join(f"'sha256-{value}'" for value in hashes)


#: What a page may load: nothing from elsewhere, and no script in its text but Streamlit's own.
#: Streamlit and plotly set styles in elements. `connect-src` names the WebSocket for browsers to
#: which 'self' is http alone. No page may show this one in a frame.
POLICY: Final = (
    f"default-src 'self'; script-src 'self' {_inline_scripts()}; connect-src 'self' ws://%s; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
#: Headers of every response besides the policy.
HEADERS: Final = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REFUSED: Final = (
    "refused: the address has no token, or that of another server; expected the address that "
    "`kvsim dashboard` printed, open that one, or append its token=... to this one\n"
)
#: The path of the pages of a server that was started before, or elsewhere, in a link.
FORMER: Final = re.compile(r"/[0-9a-f]{32}(?=/)")


class Guard:
    """Middleware that answers only requests with the token, and only from the server's own pages.

    The token is in the address that is opened first, or in the cookie that this address sets for
    `base`, the path of the pages.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()
        self.base = f"/{sha256(self.token).hexdigest()[:32]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, refuse it, or turn the token of its address into a cookie."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        socketed = scope["type"] == "websocket"

        host = headers.get("host", "")
        host = host if HOST.fullmatch(host) else ADDRESS

        async def shielded(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = {"Content-Security-Policy": POLICY % host}
                MutableHeaders(scope=message).update(HEADERS | policy)
            await send(message)

        if not _is_of_this_server(scope, headers):
            allowed = False
        elif not socketed and self._matches(dict(query).get("token")):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            path = self.base + quote(FORMER.sub("", scope["path"])) + (f"?{rest}" if rest else "")
            response = RedirectResponse(path, 303, {"Cache-Control": "no-store"})
            terms: Any = {"path": self.base, "httponly": True, "samesite": "lax"}
            response.set_cookie(COOKIE, self.token.decode(), **terms)
            await response(scope, receive, shielded)
            return
        else:
            # another server of this machine may have set cookies of the same name
            cookies = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
            allowed = scope["path"].startswith(f"{self.base}/") and any(
                name == COOKIE and self._matches(value) for name, _, value in cookies
            )
        if allowed:
            await self.app({**scope, "root_path": self.base}, receive, shielded)
        elif socketed:
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = PlainTextResponse(REFUSED, 403, {"Cache-Control": "no-store"})
            await refusal(scope, receive, shielded)

    def _matches(self, token: str | None) -> bool:
        return token is not None and secrets.compare_digest(token.encode(), self.token)


def _is_of_this_server(scope: Scope, headers: Headers) -> bool:
    """Whether the host is this machine, and a page that asks is one of this server's.

    Browsers name the page in `Origin`: always for a WebSocket, for other requests where it matters.
    """
    host = headers.get("host", "")
    if not HOST.fullmatch(host):
        return False
    scheme = {"ws": "http", "wss": "https"}.get(scope["scheme"], scope["scheme"])
    origin = headers.get("origin")
    if origin is None:
        return scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
    return origin == f"{scheme}://{host}"


@asynccontextmanager
async def announced(_: App) -> AsyncIterator[None]:
    """Print the address with its token, and open it unless `--no-browser` is given."""
    port = config.get_option("server.port")
    address = f"http://{ADDRESS}:{port}/?token={TOKEN}"
    print(f"Dashboard: {address}\nCtrl-C ends it.", flush=True)  # noqa: T201 - for the user
    threading.Thread(target=load, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="kvsim-") as folder:
        if "--no-browser" not in sys.argv[2:]:
            page = Path(folder, "dashboard.html")
            threading.Thread(target=_open, args=(page, address, port), daemon=True).start()
        yield


def load() -> None:
    """Import what the pages need before one is opened.

    Streamlit collects garbage after every run of a page, which takes a fifth of a second with all
    the objects of these libraries, and no answer is sent meanwhile. Freezing leaves them out.
    """
    package = Path(__file__).resolve().parent
    if str(package.parents[1]) not in sys.path:
        sys.path.append(str(package.parents[1]))
    import_module(f"{package.parent.name}.{package.name}.navigation")
    gc.collect()
    gc.freeze()


def _open(page: Path, address: str, port: int) -> None:
    """Open an address in the browser, once the server answers, through a page that leads to it.

    Other users can read the arguments of a browser, but not this page, and so not the token.
    """
    page.write_text(f'<meta http-equiv="refresh" content="0;url={html.escape(address)}">')
    for _ in range(100):
        with socket.socket() as client:
            if client.connect_ex((ADDRESS, port)) == 0:
                webbrowser.open(page.as_uri())
                return
        time.sleep(0.1)


TOKEN: Final = secrets.token_urlsafe(32)
app = App(
    Path(__file__).with_name("app.py"),
    lifespan=announced,
    middleware=[Middleware(Guard, token=TOKEN)],
)
