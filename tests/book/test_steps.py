"""The stepper: what its buttons and its slider show of a collective is what Python says."""

from pathlib import Path

import numpy as np
import pytest
from browsers import CHROMIUM

from meshbook.drawing.collective_states import sent_pieces, steps_of
from meshbook.drawing.collective_steps import COSTS, draw_collective

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
ROWS = np.arange(16).reshape(4, 4)

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")

# What the visible pictures show: for each, [device, slot, number].
SHOWN = """() => [...document.querySelectorAll(".collective-step")]
  .filter(step => step.checkVisibility())
  .map(step => [...step.querySelectorAll("g")].map(cell => [
    Number(cell.dataset.device), Number(cell.dataset.slot),
    Number(cell.querySelector("text").textContent)]))"""


def numbers(kind):
    return (ROWS[:, :1] if kind == "all-gather" else ROWS).tolist()


def held(step):
    return sorted([device, slot, piece.value] for device, row in enumerate(step.held)
                  for slot, piece in enumerate(row) if piece)


@pytest.fixture
def tab(browser):
    context = browser.new_context(viewport={"width": 390, "height": 800})
    yield context.new_page()
    context.close()


def load(tab, kind, script=True):
    """A page with one collective; returns its Steps and a function that reads what is shown."""
    tab.set_content(f"<!doctype html><body>{draw_collective(kind, numbers(kind)).html}")
    tab.add_style_tag(path=STATIC / "meshbook.css")
    if script:
        tab.add_script_tag(path=STATIC / "steps.js")
    return steps_of(kind, numbers(kind)), lambda: [sorted(each) for each in tab.evaluate(SHOWN)]


@pytest.mark.parametrize("kind", COSTS)
def test_without_the_script_and_on_paper_all_steps_are_seen(tab, kind):
    steps, shown = load(tab, kind, script=False)
    assert shown() == [held(step) for step in steps]
    steps, shown = load(tab, kind)
    assert len(shown()) == 1
    tab.emulate_media(media="print")
    assert shown() == [held(step) for step in steps]
    assert not tab.get_by_role("button", name="Next").is_visible()


@pytest.mark.parametrize("kind", COSTS)
def test_buttons_show_one_step_after_the_other_as_python_says(tab, kind):
    steps, shown = load(tab, kind)
    following, back = (tab.get_by_role("button", name=name) for name in ("Next", "Previous"))
    told = tab.locator("[aria-live]")
    for at, step in enumerate(steps):
        assert shown() == [held(step)]
        sent = 4 * sent_pieces(steps[:at + 1]).get(0, 0)
        start = f"Step {at} of {len(steps) - 1}" if at else "Start"
        assert told.inner_text() == f"{start}: {step.words}, {sent} bytes sent"
        short = start.partition(" of")[0]
        assert tab.get_by_text(f"{short}: {sent} bytes sent").is_visible()
        if at < len(steps) - 1:
            following.click()
    assert following.is_disabled()
    back.click()
    assert shown() == [held(steps[-2])]
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_slider_and_the_keyboard_move_through_the_steps(tab):
    steps, shown = load(tab, "all-reduce")
    slider = tab.get_by_role("slider", name="Step of the all-reduce")
    slider.fill("4")
    assert shown() == [held(steps[4])]
    slider.focus()
    tab.keyboard.press("ArrowLeft")
    assert shown() == [held(steps[3])] and slider.get_attribute("aria-valuetext").startswith(
        "Step 3 of 6")
    tab.get_by_role("button", name="Previous").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.textContent") == "Next"
    assert shown() == [held(steps[4])]


def test_play_goes_to_the_end_and_can_be_paused(tab):
    tab.clock.install()
    steps, shown = load(tab, "all-gather")
    tab.get_by_role("button", name="Play").click()
    assert shown() == [held(steps[1])]
    tab.get_by_role("button", name="Pause").click()
    tab.clock.run_for(10_000)
    assert shown() == [held(steps[1])]
    tab.get_by_role("button", name="Play").click()
    tab.clock.run_for(10_000)
    assert shown() == [held(steps[3])]
    tab.get_by_role("button", name="Play").click()
    assert shown() == [held(steps[0])]


def test_all_steps_can_be_seen_again(tab):
    steps, shown = load(tab, "reduce-scatter")
    every = tab.get_by_role("button", name="All steps")
    every.click()
    assert shown() == [held(step) for step in steps]
    assert every.get_attribute("aria-pressed") == "true"
    every.click()
    assert shown() == [held(steps[0])]


@pytest.mark.parametrize("motion, moving", [("no-preference", True), ("reduce", False)])
def test_nothing_moves_for_those_who_do_not_want_it(tab, motion, moving):
    tab.emulate_media(reduced_motion=motion)
    load(tab, "all-gather")
    tab.get_by_role("button", name="Next").click()
    assert (tab.evaluate("document.getAnimations().length") > 0) == moving
