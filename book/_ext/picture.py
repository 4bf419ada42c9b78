"""Take the README's picture of the book from the built site: python book/_ext/picture.py."""

from pathlib import Path

from browsers import CHROMIUM
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "_build" / "html" / "book" / "05-seeing-shardings.html"
PICTURE = ROOT / "book" / "_static" / "book.png"
SEEN = "article svg[aria-label^='w_qkv_DSHK on (4, 2)']"
CENTRE = "drawing => drawing.scrollIntoView({block: 'center', behavior: 'instant'})"


def take(page, picture, theme="light"):
    """Save a page's drawing, with what stands around it, as a PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=theme)
        tab.goto(page.as_uri(), wait_until="networkidle")
        tab.locator(SEEN).evaluate(CENTRE)
        tab.wait_for_timeout(500)
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    take(PAGE, PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}, {PICTURE.stat().st_size / 1000:.0f} kB")
