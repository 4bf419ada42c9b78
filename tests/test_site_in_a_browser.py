"""The built site as a reader sees it: offline, on a phone, in the dark."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from browsers import CHROMIUM

SITE = Path(__file__).resolve().parents[1] / "_build" / "html"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.glob("book/*.html"))

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="no site in _build/html: make book"),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH"),
]
each_page = pytest.mark.parametrize("page", PAGES)
each_theme = pytest.mark.parametrize("theme", ["light", "dark"])

# Text whose colour is too near to what lies under it: [contrast, text].
FAINT = """limit => {
  const parse = text => {
    const values = (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    return values.length < 4 ? [...values, 1] : values;
  };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]));
  const luminance = colour => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = colour[i] / 255;
    return sum + weight * (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const paint = element => {
    const style = getComputedStyle(element);
    if (!(element instanceof SVGElement) || element.tagName === "svg")
      return parse(style.backgroundColor);
    if (style.fill === "none" || element.tagName === "g") return [0, 0, 0, 0];
    const fill = parse(style.fill);
    return [...fill.slice(0, 3), fill[3] * style.fillOpacity * style.opacity];
  };
  const around = element => element ? [element, ...around(element.parentElement)] : [];
  const beneath = element => {
    element.scrollIntoView({block: "center", inline: "center"});
    const box = element.getBoundingClientRect();
    return document.elementsFromPoint(box.left + box.width / 2, box.top + box.height / 2)
      .filter(other => other !== element && !["text", "tspan"].includes(other.tagName));
  };
  const faint = [];
  const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, owner = node.parentElement;
    if (!node.data.trim() || owner.closest("mjx-container, script, style, button, .headerlink"))
      continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || !owner.checkVisibility()) continue;
    const ground = (owner instanceof SVGElement ? beneath(owner) : around(owner))
      .map(paint).reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
    const style = getComputedStyle(owner);
    const ink = parse(owner instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(over(ink, ground)), luminance(ground)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < limit)
      faint.push([contrast.toFixed(2), node.data.trim().slice(0, 40), `${ink} on ${ground}`]);
  }
  return faint;
}"""


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
    tab.goto(address + page, wait_until="load")
    if tab.query_selector(".math"):
        tab.wait_for_selector("mjx-container", state="attached")
    tab.wait_for_load_state("networkidle")
    return tab, complaints


def alone(browser, address, width=1440, theme="light"):
    """A tab with no network but the site, and the list of what goes wrong in it."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    complaints = []

    def only_the_site(route):
        if route.request.url.startswith(address):
            return route.continue_()
        complaints.append(f"loads {route.request.url}")
        return route.abort()

    context.route("http*://**", only_the_site)
    tab = context.new_page()
    tab.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda request: complaints.append(f"failed {request.url}"))
    return tab, complaints


@each_page
def test_no_complaint_on_the_console(browser, address, page):
    tab, complaints = visit(browser, address, page)
    assert complaints == []
    assert tab.query_selector("mjx-merror") is None
    assert tab.evaluate("document.querySelectorAll('.math').length") == tab.evaluate(
        "document.querySelectorAll('.math mjx-container').length")
    tab.context.close()


def test_the_front_page_leads_to_the_preface(browser, address):
    tab, complaints = alone(browser, address)
    tab.goto(address)
    tab.wait_for_url("**/book/start-here.html")
    assert complaints == []
    tab.context.close()


def test_the_site_reads_from_the_disk(browser):
    tab, complaints = visit(browser, "file://", str(SITE / PAGES[0]))
    assert complaints == []
    tab.context.close()


def test_the_search_leads_to_a_section_by_keyboard(browser):
    tab, complaints = visit(browser, "file://", str(SITE / PAGES[0]))
    tab.keyboard.press("Control+k")
    tab.keyboard.type("ninth experiment")
    tab.keyboard.press("Enter")
    found = tab.locator("#search-results li a").first
    found.wait_for()
    assert "06-nine-experiments" in found.get_attribute("href") and complaints == []
    tab.context.close()


def test_the_first_tab_stop_skips_to_the_text(browser, address):
    tab, _ = visit(browser, address, PAGES[0])
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.getAttribute('href')") == "#main-content"
    tab.context.close()


@each_page
def test_nothing_scrolls_sideways_on_a_phone(browser, address, page):
    tab, _ = visit(browser, address, page, width=390)
    wide = tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390, f"{wide} pixels wide"
    tab.context.close()


@each_theme
@each_page
def test_all_text_can_be_read(browser, address, page, theme):
    tab, _ = visit(browser, address, page, theme=theme)
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.evaluate(FAINT, 4.5) == []
    tab.context.close()


@pytest.mark.parametrize("width", [390, 1440])
@each_theme
@each_page
def test_nothing_serious_keeps_a_page_from_those_who_do_not_see_it(
        browser, address, page, theme, width):
    tab, _ = visit(browser, address, page, width, theme)
    found = [(each["id"], [node["html"][:160] for node in each["nodes"]])
             for each in Axe().run(tab).response["violations"]
             if each["impact"] in ("serious", "critical")]
    assert found == []
    tab.context.close()
