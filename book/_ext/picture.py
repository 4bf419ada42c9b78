"""Take the book's pictures of itself from the built site: python book/_ext/picture.py.

One is the README's, a page with a drawing; the other is the card that a link to the book shows.
"""

from pathlib import Path

from browsers import CHROMIUM
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SITE, STATIC = ROOT / "_build" / "html" / "book", ROOT / "book" / "_static"
SEEN = "article svg[aria-label^='w_qkv_DSHK on (4, 2)']"
CENTRE = "drawing => drawing.scrollIntoView({block: 'center', behavior: 'instant'})"
FRONT = "div:has(> div > svg[aria-label^='fc1, as annotated'])"
CARD = """<body style="margin: 0; padding: 56px 64px; color: #222; font-family: sans-serif">
<div style="font-size: 64px; font-weight: 700">The Mesh Book</div>
<div style="font-size: 30px; margin: 8px 0 34px">Parallel training in JAX, executed and proved</div>
<div style="zoom: 1.55">{front}</div></body>"""


def take_page(browser, picture):
    """A drawing of chapter 5, with what stands around it."""
    tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
    tab.goto((SITE / "05-seeing-shardings.html").as_uri(), wait_until="networkidle")
    tab.locator(SEEN).evaluate(CENTRE)
    tab.wait_for_timeout(500)
    tab.screenshot(path=picture)


def take_card(browser, picture):
    """The picture of the front page under the title, 1200 by 630 pixels."""
    tab = browser.new_page(viewport={"width": 1200, "height": 630}, color_scheme="light")
    tab.goto((SITE / "start-here.html").as_uri(), wait_until="networkidle")
    front = tab.locator(FRONT).first.evaluate("row => row.outerHTML")
    tab.set_content(CARD.format(front=front))
    tab.screenshot(path=picture)


if __name__ == "__main__":
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        for take, name in ((take_page, "book.png"), (take_card, "card.png")):
            take(browser, STATIC / name)
            print(f"wrote book/_static/{name}, {(STATIC / name).stat().st_size / 1000:.0f} kB")
        browser.close()
