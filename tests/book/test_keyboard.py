"""The built site for those who have no mouse: the keyboard, and the search."""

from visits import PAGES, SITE, address, needed, visit  # noqa: F401

pytestmark = needed


def test_the_search_leads_to_a_page_by_keyboard(browser, address):
    tab, complaints = visit(browser, address, PAGES[0])
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


def test_the_search_works_from_the_disk(browser):
    tab, _ = visit(browser, "file://", f"{SITE}/search.html?q=ninth+experiment")
    tab.locator("#search-results li a", has_text="Nine experiments").wait_for()
    tab.context.close()
