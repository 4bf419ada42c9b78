"""Make the theme's pages whole: launch buttons that open, scripts where they are used."""

import json
import sys
from pathlib import Path, PurePosixPath

import pages
import teaching
from docutils import nodes
from docutils.parsers.rst import Directive
from notebooks import ROOT, Links
from sphinx import addnodes

sys.path.append(str(ROOT))  # also for the page about the API, which imports the package

from meshbook.costs.page import data
from meshbook.drawing import svg
from meshbook.drawing.memory_timelines import WORDS
from meshbook.drawing.torus import NAMED


COSTS = (  # scripts that say what a step costs, in this order
    "form-elements.js", "costs.js", "costs-machines.js", "costs-work.js", "costs-traffic.js",
    "costs-memory.js", "costs-seconds.js", "costs-ranking.js")
EXPLORER = *COSTS, "explorer.js", "explorer-pictures.js", "explorer-form.js"
CALCULATOR = (
    *COSTS, "calculator-words.js", "calculator-timeline.js", "calculator-shown.js",
    "calculator-ranking.js", "calculator-form.js")


def launch_notebook(app, pagename, templatename, context, doctree):
    """Let the launch buttons open a chapter's notebook, in Colab and in Kaggle.

    The theme's own address is that of the Markdown, which Colab cannot open, and it does not know
    Kaggle. A page without a notebook, such as the status of the build, has no button.
    """
    name = PurePosixPath(pagename).name
    buttons = context.get("header_buttons", [])
    if (ROOT / "notebooks" / f"{name}.ipynb").exists():
        for group in buttons:
            if group.get("label") == "launch-buttons":
                group["buttons"] = [
                    {"type": "link", "text": place, "tooltip": f"Launch on {place}", "url": address,
                     "icon": f"_static/{place.lower()}-logo.svg"}
                    for place, address in Links().runtimes(name).items()]
    else:
        context["header_buttons"] = [
            group for group in buttons if group.get("label") != "launch-buttons"
        ]


def drop_unused(app, pagename, templatename, context, doctree):
    """Leave out what no page uses: Thebe, which is declared twice, and sphinx-design."""
    unused = lambda file: any(word in f"{getattr(file, 'filename', file)}".lower()
                              for word in ("thebe", "design"))
    context["script_files"] = [
        script for script in context.get("script_files", []) if not unused(script)
        and "THEBE" not in getattr(script, "attributes", {}).get("body", "")]
    context["css_files"] = [each for each in context.get("css_files", []) if not unused(each)]


def mend_bibliography(app, pagename, templatename, context, doctree):
    """Call an entry of a list a list item: the role that docutils gives it is out of use."""
    body = context.get("body", "")
    context["body"] = body.replace('role="doc-biblioentry"', 'role="listitem"')


def add_calculator(app, pagename, templatename, context, doctree):
    """Give the calculator's page its scripts, what they count with, and the colours of memory."""
    if PurePosixPath(pagename).name == "calculator":
        for name, value in ("Data", data()), ("Parts", WORDS):
            app.add_js_file(None, body=f"const meshbook{name} = {json.dumps(value)};")
        for script in CALCULATOR:
            app.add_js_file(script, loading_method="defer")


def add_steps(app, pagename, templatename, context, doctree):
    """Let the reader step through the collectives of a page that draws them."""
    if 'figure class="collective"' in context.get("body", ""):
        app.add_js_file("steps.js", loading_method="defer")


def add_schedules(app, pagename, templatename, context, doctree):
    """Let the reader move the sliders of a page's pipeline schedules."""
    if 'figure class="schedules"' in context.get("body", ""):
        for script in ("form-elements.js", "schedules.js", "schedules-form.js"):
            app.add_js_file(script, loading_method="defer")


def add_explorer(app, pagename, templatename, context, doctree):
    """Give the explorer's page its scripts, their data, and colours of devices and mesh axes."""
    if PurePosixPath(pagename).name == "explorer":
        colours = [[each, svg.ink(each)] for each in svg.DEVICES]
        for name, value in ("Costs", data()), ("Colours", colours), ("Axes", NAMED):
            app.add_js_file(None, body=f"const meshbook{name} = {json.dumps(value)};")
        for script in EXPLORER:
            app.add_js_file(script, loading_method="defer")


class PagesTable(Directive):
    """Where the status of the build says what each page is made of: known when all is built."""

    def run(self):
        """A mark, which `pages.fill` replaces."""
        return [nodes.raw("", pages.MARK, format="html")]


def fill_status(app, exception):
    """Write the table of pages."""
    if exception is None and app.builder.format == "html":
        pages.fill(ROOT / "book", Path(app.outdir, "book"))


def link_entries(app, doctree, docname):
    """Lead from each entry of the page about the API to the section that teaches it."""
    if docname != "book/api":
        return
    known = teaching.entries((ROOT / "book" / "api.md").read_text("utf8"))
    found = teaching.book_places(ROOT, known)
    for entry in doctree.findall(addnodes.desc):
        names = [name for signature in entry.findall(addnodes.desc_signature)
                 for name in signature["ids"] if name in known]
        place = found.get(names[0]) if names else None
        if place and f"book/{place.section.page}" in app.env.all_docs:
            entry[-1].insert(0, _taught(app, docname, place))


def _taught(app, docname, place):
    """A line that leads to a section."""
    page, number = f"book/{place.section.page}", place.section.number
    there = list(app.env.get_doctree(page).findall(nodes.section))
    title, section = there[0][0].astext(), there[number]
    words = title if number == 0 else f"{section[0].astext()} ({title})"
    address = f"{app.builder.get_relative_uri(docname, page)}#{section['ids'][0]}"
    link = nodes.reference("", words, internal=True, refuri=address)
    return nodes.paragraph("", f"{place.words} ", link, classes=["taught"])


def skip_what_is_not_ours(app, what, name, value, skip, options):
    """Leave out fields whose text is Python's ("Alias for field number") or JAX's, a dtype."""
    text, module = value.__doc__ or "", getattr(value, "__module__", None) or ""
    is_type = isinstance(value, type) and not module.startswith("meshbook")
    return True if is_type or text.startswith("Alias for field number") else None


def name_site(app, config):
    """Tell what describes a page to other sites where the site is; it is written once."""
    config.ogp_site_url = config.html_baseurl


FRONT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<link rel="icon" href="data:,">
<meta http-equiv="refresh" content="0; url={first}">
<p><a href="{first}">{title}</a></p>
</html>
"""


def write_front(app, exception):
    """Lead from the site's root to its first page, with an empty icon.

    Jupyter Book's own redirect names none, so that a browser asks for one that is not there.
    """
    if exception is None and app.builder.format == "html":
        front = FRONT.format(title=app.config.html_title, first=f"{app.config.root_doc}.html")
        Path(app.outdir, "index.html").write_text(front, "utf8")


def setup(app):
    """Register with Sphinx, after the theme."""
    app.connect("config-inited", name_site, priority=100)
    app.connect("html-page-context", launch_notebook, priority=900)
    app.connect("html-page-context", drop_unused, priority=900)
    for change in (mend_bibliography, add_calculator, add_steps, add_schedules, add_explorer):
        app.connect("html-page-context", change)
    app.add_directive("pages-of-the-book", PagesTable)
    app.connect("doctree-resolved", link_entries)
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-skip-member", skip_what_is_not_ours)
    app.connect("build-finished", write_front)
    app.connect("build-finished", fill_status)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
