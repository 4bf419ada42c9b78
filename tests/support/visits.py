"""The built site in a browser: served on the loopback interface, with no other network."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browsers import CHROMIUM

SITE = Path(__file__).resolve().parents[2] / "_build" / "html"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.glob("book/*.html"))

needed = [
    pytest.mark.skipif(not PAGES, reason="no site in _build/html: make book"),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH"),
]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Say nothing of each request."""


@pytest.fixture(scope="module")
def address():
    """The site, served on the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def visit(browser, address, page, width=1440, theme="light"):
    """Show a page, its formulas set. Returns the tab and its complaints."""
    tab, complaints = alone(browser, address, width, theme)
    show(tab, address + page)
    return tab, complaints


def show(tab, url):
    """Load a page, and wait until its formulas are set."""
    tab.goto(url, wait_until="load")
    tab.evaluate("() => window.MathJax?.startup?.promise")


def alone(browser, address, width=1440, theme="light"):
    """A tab in a window that remembers nothing of others, and what goes wrong in it.

    Requests to other places are among its complaints.
    """
    window = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    complaints = []

    def elsewhere(url):
        return url.startswith("http") and not url.startswith(address)

    tab = window.new_page()
    tab.on("request", lambda request: elsewhere(request.url)
           and complaints.append(f"loads {request.url}"))
    tab.on("console", lambda message: message.type == "error"
           and complaints.append(f"{message.text} {message.location['url']}"))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda request: complaints.append(f"failed {request.url}"))
    return tab, complaints
