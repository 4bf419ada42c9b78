"""Take the book's pictures of TensorBoard: python book/_ext/screenshots.py, or `make screenshots`.

The runs are those of the page about it, whose cells are executed first.
"""

import io
import re
import sys
from pathlib import Path

from browsers import CHROMIUM
from PIL import Image
from playwright.sync_api import sync_playwright
from run_chapter import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "book" / "tensorboard.md"
PICTURES = ROOT / "book" / "_static"
LIMIT = 150_000  # bytes of a picture


def open_profiles(browser, address, size=(1280, 720)):
    """A tab with TensorBoard's page of profiles, alone: the tab and the plugin's frame."""
    tab = browser.new_page(viewport=dict(zip(("width", "height"), size, strict=True)))
    tab.set_default_timeout(120_000)  # two busy cores are slow
    tab.route("http*://**", lambda route: route.continue_()
              if route.request.url.startswith(address) else route.abort())
    tab.goto(f"{address}#profile", wait_until="load")
    plugin = tab.frame_locator("iframe").first
    plugin.get_by_text("Sessions (").wait_for()
    return tab, plugin


def listed(plugin, number):
    """Open a list of the plugin's side panel (0 the runs, 1 the tools): its entries."""
    choice, entries = plugin.locator("mat-select").nth(number), plugin.locator("mat-option")
    if not choice.is_visible():
        plugin.get_by_text("menu", exact=True).click()
    choice.click()
    entries.first.wait_for()
    return entries


def choose(plugin, number, text):
    """Choose the entry with this text from a list of the plugin's side panel, which closes."""
    choice = plugin.locator("mat-select").nth(number)
    if text not in choice.inner_text():
        listed(plugin, number).filter(has_text=text).click()
        choice.wait_for(state="hidden")


def open_trace(plugin, run_name):
    """Show a run in the trace viewer: the viewer's frame, with its rows drawn."""
    choose(plugin, 0, run_name)
    choose(plugin, 1, "Trace Viewer")
    viewer = plugin.frame_locator("iframe").first
    viewer.get_by_text("python", exact=True).wait_for()
    return viewer


def find(viewer, operation, duration=""):
    """Select an execution of an operation in the trace viewer: the text of its details.

    duration: of the execution that is wanted, in the viewer's own words; by default it is the
    first. Raises ValueError where there is none.
    """
    search, details = viewer.locator("input").first, viewer.get_by_text("Wall Duration")
    search.fill(operation)
    search.press("Enter")
    hits = viewer.get_by_text(re.compile(r"^\d+ of [1-9]\d*$"))
    hits.wait_for()
    for _ in range(int(hits.inner_text().split()[-1])):
        viewer.get_by_text("→").click()
        details.wait_for()
        if duration in (text := viewer.locator("body").inner_text()):
            return text
    raise ValueError(f"expected an execution of {operation} of {duration}, found none")


def save(tab, name):
    """Keep what a tab shows as a PNG of few colours. Raises ValueError where it is too large."""
    tab.mouse.move(0, 0)
    tab.wait_for_timeout(1500)  # lists unfold and canvases are drawn after their text is there
    picture, out = Image.open(io.BytesIO(tab.screenshot())), io.BytesIO()
    picture.convert("RGB").quantize(128).save(out, "PNG", optimize=True)
    if len(out.getvalue()) > LIMIT:
        raise ValueError(f"{name}: expected at most {LIMIT:,} bytes, found {len(out.getvalue()):,}")
    (PICTURES / name).write_bytes(out.getvalue())
    print(f"wrote {name}, {len(out.getvalue()) / 1000:.0f} kB")


def take(address, run_name, event, thread):
    """Both pictures: the list of runs, and one execution of an operation on its thread."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        tab, plugin = open_profiles(browser, address)
        viewer = open_trace(plugin, run_name)
        entries = listed(plugin, 0)
        save(tab, "xprof-runs.png")
        entries.filter(has_text=run_name).click()
        plugin.get_by_text("menu", exact=True).click()
        find(viewer, event["name"], f"{event['dur'] * 1e3:,.0f} ns")
        viewer.get_by_text(thread).evaluate("row => row.scrollIntoView({block: 'start'})")
        save(tab, "xprof-all-reduce.png")
        browser.close()


def longest_wait(trace, events):
    """Of the slowest collective's executions, the one that waited longest for other devices.

    trace: read by this book; events: of the same run, from XProf's trace viewer. A collective
    whose name stands in that of another cannot be searched for, and is passed over.
    """
    names = trace.by_operation()
    name = next(each.operation for each in trace.operations() if each.kind == "collective"
                and sum(each.operation in other for other in names) == 1)
    waits = [event for event in events if event["name"].startswith("Wait: pending")]

    def waited(event):
        return sum(wait["dur"] for wait in waits if wait["tid"] == event["tid"]
                   and event["ts"] <= wait["ts"] <= event["ts"] + event["dur"])

    return max((event for event in events if event["name"] == name), key=waited)


def main():
    """Run the page, and take the pictures of its first run."""
    sys.path[0] = str(ROOT)
    run(PAGE)
    from meshbook.profiling.tensorboard import tensorboard

    page = vars(sys.modules["__main__"])
    event = longest_wait(page["ours"], page["events"])
    (thread,) = [each["args"]["name"] for each in page["recorded"]
                 if each["name"] == "thread_name" and each["tid"] == event["tid"]]
    with tensorboard(page["folder"].name) as board:
        take(board.address, page["runs"][4, 2].name, event, thread)


if __name__ == "__main__":
    main()
