"""The built site for those who do not see it, or have no mouse: axe-core, and the keyboard."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from visits import PAGES, SITE, address, each_page, needed, visit  # noqa: F401

pytestmark = needed


@pytest.mark.parametrize("width, theme", [(390, "light"), (1440, "light"), (1440, "dark")])
@each_page
def test_nothing_serious_keeps_a_page_from_those_who_do_not_see_it(
        browser, address, page, width, theme):
    tab, _ = visit(browser, address, page, width, theme)
    found = [(each["id"], [node["html"][:160] for node in each["nodes"]])
             for each in Axe().run(tab).response["violations"]
             if each["impact"] in ("serious", "critical")]
    assert found == []
    tab.context.close()


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
