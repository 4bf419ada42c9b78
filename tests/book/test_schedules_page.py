"""Sliders for pipeline schedules: what they show is what Python simulates, and as it draws it."""

import itertools
from pathlib import Path

import pytest
from browsers import CHROMIUM

from meshbook.drawing.schedules import draw_schedules, facts, with_sliders
from meshbook.parallel.schedules import (
    Costs, gpipe, interleaved, one_f_one_b, simulate, split_backward, zero_bubble
)

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
SCHEDULES = {
    "GPipe": lambda p, m, v: gpipe(p, m), "1F1B": lambda p, m, v: one_f_one_b(p, m),
    "1F1B, B before W": lambda p, m, v: split_backward(one_f_one_b(p, m)),
    "Interleaved 1F1B": interleaved, "ZB-H1": lambda p, m, v: zero_bubble(p, m),
}
COSTS = ((1, 1, 1), (1, 1.25, 0.75), (0.5, 3, 2.25))
FIRST = {"p": 4, "m": 8, "v": 2, "costs": (1, 1, 1)}  # where the sliders stand

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")


def events_of(name, p, m, v, costs):
    """The events by Python, of chunks whose tasks take their part of a device's time."""
    parts = v if name == "Interleaved 1F1B" else 1
    return simulate(SCHEDULES[name](p, m, v), Costs(*(each / parts for each in costs))).events


def pictures_of(p, m, v, costs):
    return {name: events_of(name, p, m, v, costs) for name in SCHEDULES
            if name != "Interleaved 1F1B" or m % p == 0}


@pytest.fixture
def tab(browser):
    context = browser.new_context(viewport={"width": 390, "height": 800})
    yield context.new_page()
    context.close()


def add(tab, *scripts):
    for name in scripts:
        tab.add_script_tag(path=STATIC / name)


def load(tab, script=True):
    """A page with the picture of GPipe alone, to which the script adds its sliders."""
    first = draw_schedules({"GPipe": events_of("GPipe", **FIRST)})
    tab.set_content(f"<!doctype html><body>{with_sliders(first).html}")
    tab.add_style_tag(path=STATIC / "meshbook.css")
    if script:
        add(tab, "form-elements.js", "schedules.js", "schedules-form.js")


def test_the_script_simulates_as_python_does(tab):
    load(tab, script=False)
    add(tab, "schedules.js")
    asked = [(name, p, m, v, costs) for name, p, m, v, costs in itertools.product(
        SCHEDULES, (1, 3, 4, 8), (1, 6, 8, 16), (2, 3), COSTS)
        if name == "Interleaved 1F1B" or v == 2]
    answers = tab.evaluate(
        """asked => asked.map(([name, p, m, v, [F, B, W]]) => {
          try {
            const events = meshbookSchedules.eventsOf(name, {p, m, v, costs: {F, B, W}});
            return {...meshbookSchedules.facts(events), events: events.map(
              ({device, task, start, end}) =>
                [device, task.kind, task.microbatch, task.chunk, start, end])};
          } catch (error) { return error.message; } })""", asked)
    refused = 0
    for (name, p, m, v, costs), answer in zip(asked, answers, strict=True):
        try:
            events = events_of(name, p, m, v, costs)
        except ValueError as error:
            assert answer == str(error)
            refused += 1
            continue
        right = [[device, *task, start, end] for device, task, start, end in events]
        assert sorted(answer["events"]) == sorted(right), (name, p, m, v, costs)
        expected = facts(events)
        most = [max(count for _, count in steps) for steps in expected.live.values()]
        assert answer["makespan"] == expected.makespan
        assert answer["bubble"] == pytest.approx(expected.bubble, abs=1e-12)
        assert answer["live"] == pytest.approx(most)
    assert 20 < refused < len(asked) / 4


def test_a_schedule_that_deadlocks_is_refused(tab):
    load(tab, script=False)
    add(tab, "schedules.js")
    assert tab.evaluate("""() => {
      const backward = {kind: "BW", microbatch: 0, chunk: 0}, forward = {...backward, kind: "F"};
      try { meshbookSchedules.simulate([[backward, forward]], {F: 1, B: 1, W: 1}); }
      catch (error) { return error.message; } }""") == "the schedule deadlocks"


# Of each box: what it is, where it stands and in which colours; then all words in the picture.
SHOWN = """() => [...document.querySelectorAll("figure.schedules svg [data-task]")].map(box => [
  box.dataset.device, box.dataset.task, box.dataset.start, box.dataset.end,
  box.querySelector("title").textContent, box.querySelector("text")?.textContent ?? "",
  ...[...box.querySelectorAll("rect")].flatMap(rect => ["x", "y", "width", "height"].map(
    name => Number(rect.getAttribute(name)).toFixed(1)).concat(rect.getAttribute("fill")))])"""
WORDS = """() => [...document.querySelectorAll("figure.schedules svg > text")].map(
  each => each.textContent)"""


def drawn(tab, pictures):
    """What the page shows, and what it would show of Python's picture of these events."""
    found = tab.evaluate(SHOWN), tab.evaluate(WORDS)
    other = tab.context.new_page()
    other.set_content(with_sliders(draw_schedules(pictures)).html)
    expected = other.evaluate(SHOWN), other.evaluate(WORDS)
    other.close()
    by_place = lambda boxes: sorted(
        (each[:6] + [float(cell) if cell[0] != "#" else cell for cell in each[6:]]
         for each in boxes), key=lambda each: (each[:4], each[7]))
    return (by_place(found[0]), found[1]), (by_place(expected[0]), expected[1])


def same(found, expected):
    assert found[1] == expected[1] and len(found[0]) == len(expected[0])
    for one, other in zip(found[0], expected[0], strict=True):
        assert one[:6] == other[:6]
        for mine, right in zip(one[6:], other[6:], strict=True):
            assert mine == (right if isinstance(right, str) else pytest.approx(right, abs=0.11))


@pytest.mark.parametrize("moved", [
    {}, {"p": 2, "m": 4}, {"m": 6}, {"v": 4}, {"F": 0.5, "B": 1.25, "W": 2}, {"p": 8, "m": 24}])
def test_the_picture_is_the_one_that_python_draws(tab, moved):
    load(tab)
    for name, value in moved.items():
        tab.locator(f"[name={name}]").fill(str(value))
    p, m, v = (moved.get(name, FIRST[name]) for name in "pmv")
    costs = tuple(moved.get(name, 1) for name in "FBW")
    pictures = pictures_of(p, m, v, costs)
    same(*drawn(tab, pictures))
    told = tab.locator("[aria-live]").inner_text()
    for name, events in pictures.items():
        makespan, bubble, live = facts(events)
        held = ", ".join(f"{max(count for _, count in steps):g}" for steps in live.values())
        assert f"{name}: makespan {makespan:g}, bubble {bubble:.1%}, live {held}" in told
    refused = tab.locator(".schedules-refused").inner_text()
    assert refused == ("" if m % p == 0 else "Interleaved 1F1B: an interleaved schedule needs "
                       f"microbatches in rounds of {p}, one for each device; found {m}.")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_only_the_schedules_that_are_chosen_are_drawn(tab):
    load(tab)
    for name in ("GPipe", "1F1B, B before W", "Interleaved 1F1B"):
        tab.get_by_role("checkbox", name=name, exact=True).uncheck()
    pictures = pictures_of(4, 8, 2, (1, 1, 1))
    same(*drawn(tab, {name: pictures[name] for name in ("1F1B", "ZB-H1")}))
    for name in ("1F1B", "ZB-H1"):
        tab.get_by_role("checkbox", name=name, exact=True).uncheck()
    assert tab.locator("figure.schedules svg").count() == 0


def test_sliders_go_by_keyboard_and_say_where_they_stand(tab):
    load(tab)
    slider = tab.get_by_role("slider", name="Microbatches m")
    slider.focus()
    tab.keyboard.press("ArrowRight")
    assert slider.input_value() == "9"
    assert tab.locator("label", has=slider).locator("output").inner_text() == "9"
    assert "GPipe: makespan 36, bubble 25.0%, live 9, 9, 9, 9" in (
        tab.locator("[aria-live]").inner_text())
    tab.keyboard.press("Home")
    assert slider.input_value() == "1"
    tab.get_by_role("checkbox", name="ZB-H1").focus()
    tab.keyboard.press("Space")
    assert "ZB-H1" not in tab.locator("[aria-live]").inner_text()


def test_without_the_script_there_is_the_picture_and_on_paper_no_form(tab):
    load(tab, script=False)
    same(*drawn(tab, {"GPipe": events_of("GPipe", **FIRST)}))
    load(tab)
    tab.emulate_media(media="print")
    assert not tab.get_by_role("slider").first.is_visible()
    assert tab.locator("figure.schedules svg").is_visible()
