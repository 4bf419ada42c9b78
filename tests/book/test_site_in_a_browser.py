"""The built site as a reader sees it: offline, on a phone, in the dark, with axe-core's eyes."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from visits import PAGES, SITE, address, alone, needed, show, visit  # noqa: F401

pytestmark = needed
VIEWS = [(page, width, theme) for page in PAGES
         for width, theme in ((390, "light"), (1440, "light"), (1440, "dark"))]

CONTRAST = "color-contrast"
SLOW = {"region": {"enabled": False}}  # and never serious
# What is around an article, and how links look, is the same on every page: on these axe looks at
# it in every view.
OF_STYLE = dict.fromkeys((CONTRAST, "link-in-text-block"), {"enabled": False})
FRAMES = ("book/02-device-mesh.html", "book/glossary.html")  # one has buttons of its own
# Contrast is looked at where test_all_text_can_be_read, which is stricter and ten times as fast,
# does not look. (Nor can axe judge formulas, which are drawn without text, or hidden marks.)
AXE = Axe().axe_script + """; axe.configure({rules: [
  {id: "color-contrast", selector: ":not(article *), article button, article button *"}]})"""

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


@pytest.fixture(scope="module")
def tabs(browser, address):  # noqa: F811
    """{(width, theme): (tab, its complaints)}: each of a reader who goes from page to page."""
    kinds = {view[1:] for view in VIEWS}
    return {kind: alone(browser, address, *kind) for kind in kinds}


@pytest.fixture(scope="module", params=VIEWS, ids=lambda view: f"{view[0]}-{view[1]}-{view[2]}")
def view(request, tabs, address):  # noqa: F811
    """A page as it is seen: (tab, complaints, width, theme). It is loaded once for all tests."""
    page, width, theme = request.param
    tab, complaints = tabs[width, theme]
    tab.goto("about:blank")  # where what the page before left undone ends
    complaints.clear()
    show(tab, address + page)
    return tab, complaints, width, theme


def test_nothing_scrolls_sideways(view):
    tab, _, width, _ = view
    wide = tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= width, f"{wide} pixels wide"


def test_all_text_can_be_read(view):
    assert view[0].evaluate(FAINT, 4.5) == []


def serious(tab, **options):
    """What axe-core finds on a page: [(rule, [the first characters of each element])]."""
    axe = Axe("" if tab.evaluate("'axe' in window") else AXE)  # it is loaded once
    # preload: it fetches style sheets anew, from addresses where they are not
    found = axe.run(tab, None, {"resultTypes": ["violations"], "preload": False} | options)
    return [(each["id"], [node["html"][:160] for node in each["nodes"]])
            for each in found.response["violations"] if each["impact"] in ("serious", "critical")]


def test_nothing_serious_keeps_a_page_from_those_who_do_not_see_it(view):
    tab, _, width, theme = view
    if tab.url.endswith(FRAMES):
        rules = {"rules": SLOW}
    elif (width, theme) == (1440, "light"):
        rules = {"rules": SLOW | OF_STYLE}
    else:
        rules = {"runOnly": ["scrollable-region-focusable"]}  # what a narrow page may do to figures
    assert serious(tab, **rules) == []


def test_no_complaint_on_the_console(view):  # last, when all has been loaded
    tab, complaints, _, theme = view
    assert complaints == []
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    assert tab.query_selector("mjx-merror") is None
    assert tab.evaluate("document.querySelectorAll('.math').length") == tab.evaluate(
        "document.querySelectorAll('.math mjx-container').length")


@pytest.mark.parametrize("selector", ("article button", ".bd-sidebar a"))
def test_what_the_look_at_the_article_leaves_out_is_seen(browser, address, selector):  # noqa: F811
    tab, _ = visit(browser, address, PAGES[0])
    tab.evaluate("document.querySelector('article').prepend(document.createElement('button'))")
    tab.evaluate("document.querySelector('article button').append('Run')")
    assert serious(tab, runOnly=[CONTRAST]) == []
    tab.add_style_tag(content=f"{selector} {{color: #ddd !important; background: #fff}}")
    (rule, elements), = serious(tab, runOnly=[CONTRAST])
    assert rule == CONTRAST and elements
    tab.context.close()


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (390, "dark")])
def test_a_ranking_that_was_asked_for_is_as_open_to_all(browser, address, width, theme):  # noqa: F811
    tab, complaints = alone(browser, address, width, theme)
    show(tab, address + "book/calculator.html")
    for name, value in {"of": "JAXformer, with 16 experts", "on": "TPU v4", "slice": "2x4x4"}.items():
        tab.locator(f"[name={name}]").select_option(value)
    tab.locator("[name=rows]").fill("256")
    tab.wait_for_function("document.querySelector('.calculator-ranking').ariaBusy === 'false'")
    for each in tab.locator("#calculator summary").all():
        each.press("Enter")
    rows = tab.locator(".calculator-ranking tbody tr")
    assert tab.locator(".calculator-ranking tbody tr >> visible=true").count() == rows.count() > 40
    assert serious(tab, rules=SLOW) == [] and tab.evaluate(FAINT, 4.5) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width and complaints == []
    tab.context.close()


@pytest.mark.parametrize("url", ("https://example.org/pixel.png", "http://192.0.2.1/pixel.png"))
def test_what_is_loaded_from_elsewhere_is_seen_and_does_not_arrive(browser, address, url):  # noqa: F811
    tab, complaints = visit(browser, address, PAGES[0])
    tab.evaluate("""url => new Promise(done => {
      const image = document.createElement("img");
      image.onerror = image.onload = done;
      image.src = url;
      document.body.append(image);
    })""", url)
    assert f"loads {url}" in complaints and f"failed {url}" in complaints
    tab.context.close()


def test_the_front_page_leads_to_the_preface(browser, address):
    tab, complaints = alone(browser, address)
    tab.goto(address)
    tab.wait_for_url("**/book/start-here.html")
    assert complaints == []
    tab.context.close()


def test_a_page_leads_to_what_it_is_asked_for(browser, address):
    tab, complaints = visit(browser, address, PAGES[0])
    tab.keyboard.press("Control+k")
    box = tab.locator("input[type=search]:visible").first
    box.fill("all-reduce")
    box.press("Enter")
    tab.wait_for_selector("#search-results li a")
    assert "search.html" in tab.url and complaints == []
    tab.context.close()


def test_the_site_reads_from_the_disk(browser):
    tab, complaints = visit(browser, "file://", str(SITE / PAGES[0]))
    assert complaints == []
    tab.context.close()


def test_a_page_is_printed_in_the_light_and_shown_again_in_the_dark(browser, address):
    tab, _ = visit(browser, address, PAGES[0], theme="dark")
    tab.evaluate("""() => matchMedia("print").addEventListener("change", ({matches}) => {
      if (matches) window.printed = document.documentElement.dataset.theme; })""")
    tab.pdf()
    assert tab.evaluate("printed") == "light"
    tab.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    tab.context.close()
